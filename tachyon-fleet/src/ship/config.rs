//! `fleet.toml`: what is shipped, and where. `docs/fleet.md` explains it, and `deploy/fleet.toml` has every key.

mod backends;

pub use backends::{OtlpConfig, Protocol, PyroscopeConfig, StoreConfig, StoreFormat};

use crate::failure::Usage;
use crate::net::bucket;
use crate::net::http::checked_url;
use crate::segment::Options;
use serde::{Deserialize, Deserializer, de};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tachyon::advice::Told;

/// Read if no other is named.
pub(super) const DEFAULT_PATH: &str = "/etc/tachyon-bpf/fleet.toml";
/// Where progress is kept, unless the configuration or systemd's `StateDirectory` say otherwise.
const DEFAULT_STATE: &str = "/var/lib/tachyon-fleet";
/// URLs of stores.
const STORES: &str = "s3://bucket/prefix, gs://…, az://…, file:///dir";

/// The whole file.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Where segments come from.
    pub spool: SpoolConfig,
    /// Where progress is kept.
    pub state: StateConfig,
    /// Metrics and health.
    pub http: HttpConfig,
    /// OpenTelemetry.
    pub otlp: Vec<OtlpConfig>,
    /// Pyroscope.
    pub pyroscope: Vec<PyroscopeConfig>,
    /// Object stores.
    pub store: Vec<StoreConfig>,
}

/// `[spool]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SpoolConfig {
    /// The agent's spool, or a directory of recordings.
    pub path: PathBuf,
    /// Time between two looks.
    #[serde(deserialize_with = "time")]
    pub look: Duration,
    /// A larger file is not taken for a segment.
    #[serde(deserialize_with = "size")]
    pub largest: u64,
    /// Length of a slice.
    #[serde(deserialize_with = "time")]
    pub slice: Duration,
}

impl Default for SpoolConfig {
    fn default() -> Self {
        let (look, slice) = (Duration::from_secs(5), Duration::from_secs(60));
        Self { path: "/var/spool/tachyon-bpf".into(), look, largest: 128 << 20, slice }
    }
}

/// `[state]`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StateConfig {
    /// Directory.
    pub path: Option<PathBuf>,
}

/// `[http]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpConfig {
    /// An address of this host, or `off`.
    #[serde(deserialize_with = "listen")]
    pub listen: Option<SocketAddr>,
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self { listen: Some(SocketAddr::from(([127, 0, 0, 1], 9464))) }
    }
}

impl Config {
    /// Reads and checks it.
    ///
    /// # Errors
    /// When it cannot be read, has an unknown key, or one that makes no sense.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let text = fs::read_to_string(path).map_err(|error| {
            let hint = match error.kind() {
                io::ErrorKind::NotFound => "docs/fleet.md has one to begin with; --config names another",
                _ => "whoever ships must be able to read it",
            };
            Usage::new(format!("cannot read {shown}: {}", Told::of(&error.into()).message), hint)
        })?;
        Self::parse(&text, &shown.to_string())
    }

    fn parse(text: &str, shown: &str) -> anyhow::Result<Self> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
            Usage::new(format!("{shown}, line {line}: {}", error.message().trim()), "deploy/fleet.toml has all keys")
        })?;
        config.check().map_err(|(why, hint)| Usage::new(format!("{shown}: {why}"), hint))?;
        Ok(config)
    }

    /// The directory of progress.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        // systemd may give several, separated by colons.
        let of_systemd = || std::env::var("STATE_DIRECTORY").ok()?.split(':').next().map(PathBuf::from);
        self.state.path.clone().or_else(of_systemd).unwrap_or_else(|| DEFAULT_STATE.into())
    }

    /// How segments are read.
    pub(super) fn options(&self) -> Options {
        Options { slice: self.spool.slice, start: None }
    }

    fn check(&self) -> Result<(), (String, &'static str)> {
        let wrong = |key: &str, why: &str, hint: &'static str| Err((format!("{key} {why}"), hint));
        if self.http.listen.is_some_and(|address| !address.ip().is_loopback()) {
            return wrong("http.listen", "is not an address of this host alone", "127.0.0.1:9464, [::1]:9464, or off");
        }
        if self.otlp.is_empty() && self.pyroscope.is_empty() && self.store.is_empty() {
            return wrong("it", "names nobody to ship to", "add [[otlp]], [[pyroscope]] or [[store]]");
        }
        if !(Duration::from_secs(1)..=Duration::from_secs(86_400)).contains(&self.spool.slice) {
            return wrong("spool.slice", "is not between 1s and 24h", "60s is what tables are made for");
        }
        if !(Duration::from_millis(100)..=Duration::from_secs(3600)).contains(&self.spool.look) {
            return wrong("spool.look", "is not between 100ms and 1h", "5s is the default");
        }
        let has_url = |key: &str, url: &str, has_secret: bool| match checked_url(url, has_secret) {
            Ok(_) => Ok(()),
            Err(error) => Err((format!("{key}: {error}"), "docs/fleet.md has an example")),
        };
        let pair = |key: &str, a: bool, b: bool| {
            if a == b { Ok(()) } else { wrong(key, "are given both or not at all", "docs/fleet.md has an example") }
        };
        for otlp in &self.otlp {
            has_url("otlp.endpoint", &otlp.endpoint, otlp.token_file.is_some())?;
            pair("otlp.cert_file and key_file", otlp.cert_file.is_some(), otlp.key_file.is_some())?;
            if otlp.max_message < 64 << 10 {
                return wrong("otlp.max_message", "is less than 64KiB", "servers take 4MiB");
            }
        }
        for pyroscope in &self.pyroscope {
            let has_secret = pyroscope.token_file.is_some() || pyroscope.password_file.is_some();
            has_url("pyroscope.url", &pyroscope.url, has_secret)?;
            pair("pyroscope.cert_file and key_file", pyroscope.cert_file.is_some(), pyroscope.key_file.is_some())?;
            pair("pyroscope.user and password_file", pyroscope.user.is_some(), pyroscope.password_file.is_some())?;
            if let Some(label) = pyroscope.labels.iter().find(|label| matches!(label.as_str(), "pid" | "tid")) {
                let why = format!("has {label}: each process would be a series of its own, and 5,000 are all");
                return wrong("pyroscope.labels", &why, "leave it out; tables and OTLP have it");
            }
        }
        for store in &self.store {
            if store.url.is_empty() {
                return wrong("store.url", "is missing", STORES);
            }
            // It becomes the backend's name, which messages and metrics show.
            let url = bucket::url(&store.url).map_err(|error| (format!("store.url: {error}"), STORES))?;
            if url.password().is_some() {
                return wrong("store.url", "has a password in it", "give the key as a file: secret_access_key_file, …");
            }
            if let Some(endpoint) = &store.endpoint {
                // Keys are only used to sign; these are sent as they are.
                let sent = [&store.session_token_file, &store.sas_file, &store.service_account_file];
                has_url("store.endpoint", endpoint, sent.iter().any(|file| file.is_some()))?;
            }
            if store.formats.is_empty() {
                return wrong("store.formats", "is empty", "[\"parquet\"], [\"tach\"], or both");
            }
            let keys = (store.access_key_id_file.is_some(), store.secret_access_key_file.is_some());
            pair("store.access_key_id_file and secret_access_key_file", keys.0, keys.1)?;
            let seconds = store.batch.map(|batch| batch.as_secs_f64());
            if seconds.is_some_and(|seconds| !(60.0..=86_400.0).contains(&seconds) || 86_400.0 % seconds != 0.0) {
                return wrong("store.batch", "is not between 1m and 24h, and a part of a day", "1h is usual");
            }
        }
        let mut names = BTreeSet::new();
        for name in self.names() {
            if !names.insert(name.clone()) {
                return Err((format!("two backends are called {name}"), "give each a name of its own"));
            }
        }
        Ok(())
    }

    /// The names of backends, in the order OTLP, Pyroscope, stores.
    pub(super) fn names(&self) -> Vec<String> {
        let otlp = self.otlp.iter().map(|it| (&it.name, "otlp", &it.endpoint));
        let pyroscope = self.pyroscope.iter().map(|it| (&it.name, "pyroscope", &it.url));
        let store = self.store.iter().map(|it| (&it.name, "store", &it.url));
        let all = otlp.chain(pyroscope).chain(store);
        all.map(|(name, kind, url)| name.clone().unwrap_or_else(|| format!("{kind} {url}"))).collect()
    }
}

fn time<'de, D: Deserializer<'de>>(value: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(value)?;
    humantime::parse_duration(&text)
        .map_err(|error| de::Error::custom(format!("{text} is no time, such as 30s: {error}")))
}

fn optional_time<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Duration>, D::Error> {
    time(value).map(Some)
}

fn size<'de, D: Deserializer<'de>>(value: D) -> Result<u64, D::Error> {
    let text = String::deserialize(value)?;
    let size: Result<bytesize::ByteSize, _> = text.parse();
    size.map(|size| size.0).map_err(|_| de::Error::custom(format!("{text} is no size, such as 4MiB")))
}

fn listen<'de, D: Deserializer<'de>>(value: D) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(value)?;
    match text.as_str() {
        "off" => Ok(None),
        _ => {
            text.parse().map(Some).map_err(|_| de::Error::custom(format!("{text} is no address with a port, nor off")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_default_that_is_documented() {
        let text = include_str!("../../../deploy/fleet.toml");
        // All keys are there as comments.
        let uncommented: String = text
            .lines()
            .map(|line| {
                let is_key = |line: &&str| {
                    let key = line.split(" = ").next().unwrap_or_default();
                    line.contains(" = ") && key.chars().all(|c| c.is_ascii_lowercase() || c == '_')
                        || line.starts_with("[[")
                };
                line.strip_prefix("# ").filter(is_key).unwrap_or(line)
            })
            .fold(String::new(), |text, line| text + line + "\n");
        let all = Config::parse(&uncommented, "fleet.toml").unwrap();
        assert_eq!((all.otlp.len(), all.pyroscope.len(), all.store.len()), (2, 1, 1));
        assert_eq!((&all.spool, &all.http), (&SpoolConfig::default(), &HttpConfig::default()));
        assert_eq!(all.store[0].formats, StoreConfig::default().formats);
    }

    /// Every key that a table accepts is in its part of the file.
    #[test]
    fn every_key_is_in_the_file_that_has_them_all() {
        let text = include_str!("../../../deploy/fleet.toml");
        for table in ["[spool]", "[state]", "[http]", "[[otlp]]", "[[pyroscope]]", "[[store]]"] {
            let told = toml::from_str::<Config>(&format!("{table}\nno_key = 1\n")).unwrap_err().message().to_owned();
            // "unknown field `no_key`, expected one of `path`, `look`"
            let keys: Vec<&str> = told.split('`').skip(1).step_by(2).skip(1).collect();
            assert!(!keys.is_empty(), "{told}");
            let begins = |line: &str| line.trim_start_matches("# ").starts_with('[');
            let part: Vec<&str> = text
                .lines()
                .skip_while(|line| line.trim_start_matches("# ") != table)
                .skip(1)
                .take_while(|line| !begins(line))
                .collect();
            for key in keys {
                assert!(part.iter().any(|line| line.starts_with(&format!("# {key} = "))), "{table} {key}");
            }
        }
    }

    #[test]
    fn what_makes_no_sense_is_told_with_its_place() {
        let otlp = "[[otlp]]\nendpoint = \"http://127.0.0.1:4317\"\n";
        for (text, expected) in [
            ("", "f: it names nobody to ship to"),
            (
                "[spool]\npth = \"/x\"\n",
                "f, line 2: unknown field `pth`, expected one of `path`, `look`, `largest`, `slice`",
            ),
            ("[[otlp]]\nendpoint = \"collector:4317\"\n", "f: otlp.endpoint: collector:4317 is no URL of HTTP"),
            (
                "[[otlp]]\nendpoint = \"http://c:1\"\ntoken_file = \"t\"\n",
                "f: otlp.endpoint: http://c:1 would get a secret that everybody on the way can read",
            ),
            ("[[otlp]]\ntimeout = \"fast\"\n", "f, line 2: fast is no time, such as 30s: expected number at 0"),
            (
                "[[pyroscope]]\nurl = \"http://p:4040\"\nlabels = [\"pid\"]\n",
                "f: pyroscope.labels has pid: each process would be a series of its own, and 5,000 are all",
            ),
            (
                "[[store]]\nurl = \"s3://b\"\nformats = [\"csv\"]\n",
                "f, line 3: unknown variant `csv`, expected `parquet` or `tach`",
            ),
            (
                "[[store]]\nurl = \"s3://b\"\nbatch = \"7m\"\n",
                "f: store.batch is not between 1m and 24h, and a part of a day",
            ),
            ("[[store]]\nurl = \"s3://id:word@bucket/x\"\n", "f: store.url has a password in it"),
            ("[[store]]\nurl = \"s3://id:word@bucket:x/x\"\n", "f: store.url: s3://[secret]@bucket:x/x is no URL"),
            (
                "[[store]]\nurl = \"s3://b\"\nendpoint = \"https://id:word@s3.example\"\n",
                "f: store.endpoint: https://[secret]@s3.example has a user or a password in it",
            ),
            (
                "[[store]]\nurl = \"az://b\"\nendpoint = \"http://store\"\nsas_file = \"s\"\n",
                "f: store.endpoint: http://store would get a secret that everybody on the way can read",
            ),
            ("[http]\nlisten = \"0.0.0.0:9464\"\n", "f: http.listen is not an address of this host alone"),
        ] {
            assert_eq!(Config::parse(text, "f").unwrap_err().to_string(), expected, "{text}");
        }
        let twice = format!("{otlp}{otlp}");
        assert_eq!(
            Config::parse(&twice, "f").unwrap_err().to_string(),
            "f: two backends are called otlp http://127.0.0.1:4317"
        );
        assert_eq!(Config::parse(&format!("[http]\nlisten = \"off\"\n{otlp}"), "f").unwrap().http.listen, None);
    }
}
