//! The agent's configuration: one table of keys, which a file, the environment and the command line all set.

use super::labels::Rule;
use crate::cli::args::values;
use crate::cli::failure::Failure;
use crate::cli::plan::Keep;
use crate::discover::{Filter, filter};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use toml::{Table, Value};

/// Read if no other is named and it exists.
pub const DEFAULT_PATH: &str = "/etc/tachyon-bpf/agent.toml";
/// What the environment's variables begin with: `TACHYON_RECORD_FREQUENCY` is `record.frequency`.
const VARIABLES: &str = "TACHYON_";
/// And how they go on.
const SECTIONS: [&str; 4] = ["RECORD_", "SEGMENTS_", "SPOOL_", "LABELS_"];

/// All that can be configured.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub record: Record,
    /// Length of a segment.
    pub length: Duration,
    /// The spool's directory.
    pub spool: PathBuf,
    pub keep_bytes: u64,
    pub keep_age: Duration,
    pub labels: Labels,
    /// Where each value comes from, by the number of its key.
    sources: Vec<String>,
}

/// What is recorded, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub frequency: u32,
    pub native: bool,
    pub wall: bool,
    pub max_cpu: Option<f64>,
    pub max_memory: Option<u64>,
    pub filter: Filter,
}

/// What is recorded about each process.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Labels {
    /// Variables of its environment that become labels.
    pub environment: Vec<String>,
    pub command_line: bool,
    pub rules: Vec<Rule>,
}

/// One key.
pub struct Key {
    /// `section.name`.
    pub name: &'static str,
    /// As it would be written in the file; empty if there is none.
    pub default: &'static str,
    /// What it means, for `--check` and the manual.
    pub help: &'static str,
    set: fn(&mut Config, &str) -> Result<(), String>,
    /// It may be given several times, as a list.
    is_list: bool,
}

const fn key(
    name: &'static str,
    default: &'static str,
    help: &'static str,
    set: fn(&mut Config, &str) -> Result<(), String>,
) -> Key {
    Key { name, default, help, set, is_list: false }
}

const fn list(name: &'static str, help: &'static str, set: fn(&mut Config, &str) -> Result<(), String>) -> Key {
    Key { name, default: "", help, set, is_list: true }
}

/// All keys except `[[labels.rule]]`, each of which is a table.
pub const KEYS: [Key; 15] = [
    key("record.frequency", "19", "samples per second of each thread's CPU time, 1 to 10000", |config, text| {
        config.record.frequency = values::frequency(text)?;
        Ok(())
    }),
    key("record.native", "true", "record native frames too", |config, text| {
        config.record.native = truth(text)?;
        Ok(())
    }),
    key("record.wall", "false", "record waiting threads too, with what they wait for", |config, text| {
        config.record.wall = truth(text)?;
        Ok(())
    }),
    key(
        "record.max_cpu",
        "1%",
        "share of one core for the agent and its BPF programs; above, it samples less",
        |config, text| {
            config.record.max_cpu = Some(values::share(text)?);
            Ok(())
        },
    ),
    key(
        "record.max_memory",
        "128MiB",
        "memory of the agent and its maps; near it caches go, then names, then it begins anew",
        |config, text| {
            config.record.max_memory = Some(values::memory(text)?);
            Ok(())
        },
    ),
    list("record.uid", "only processes of this user, by name or number", |config, text| {
        config.record.filter.uids.push(filter::user_id(text)?);
        Ok(())
    }),
    list("record.cgroup", "only processes in this cgroup or below it", |config, text| {
        config.record.filter.cgroups.push(filter::cgroup_path(text)?);
        Ok(())
    }),
    list("record.comm", "only processes whose kernel name matches this pattern", |config, text| {
        config.record.filter.comms.push(filter::comm_pattern(text)?);
        Ok(())
    }),
    list(
        "record.container",
        "only processes in this container: its id, or at least the first 8 digits",
        |config, text| {
            config.record.filter.containers.push(filter::container_id(text)?);
            Ok(())
        },
    ),
    key(
        "segments.length",
        "60s",
        "length of a segment; it ends at a multiple of this on the monotonic clock",
        |config, text| {
            config.length = values::rotation(text)?;
            Ok(())
        },
    ),
    key("spool.path", "/var/spool/tachyon-bpf", "directory of the segments", |config, text| {
        if !text.starts_with('/') {
            return Err("must be an absolute path".to_owned());
        }
        config.spool = PathBuf::from(text);
        Ok(())
    }),
    key("spool.keep_bytes", "2GiB", "most bytes of finished segments; the oldest are removed first", |config, text| {
        match values::keep(text) {
            Ok(Keep::Bytes(bytes)) => config.keep_bytes = bytes,
            _ => return Err("must be a size with its unit, such as 2GiB".to_owned()),
        }
        Ok(())
    }),
    key("spool.keep_age", "7d", "greatest age of finished segments", |config, text| {
        match values::keep(text) {
            Ok(Keep::Age(age)) => config.keep_age = age,
            _ => return Err("must be an age with its unit, such as 7d".to_owned()),
        }
        Ok(())
    }),
    key(
        "labels.command_line",
        "false",
        "label each process with its command line, which may hold secrets",
        |config, text| {
            config.labels.command_line = truth(text)?;
            Ok(())
        },
    ),
    list(
        "labels.environment",
        "label each process with this variable of its environment, as env.NAME",
        |config, text| {
            if text.is_empty() || text.contains('=') {
                return Err("must be the name of a variable".to_owned());
            }
            config.labels.environment.push(text.to_owned());
            Ok(())
        },
    ),
];

fn truth(text: &str) -> Result<bool, String> {
    text.parse().map_err(|_| "must be true or false".to_owned())
}

impl Default for Config {
    fn default() -> Self {
        let record = Record {
            frequency: 0,
            native: true,
            wall: false,
            max_cpu: None,
            max_memory: None,
            filter: Filter::default(),
        };
        let (length, keep_age) = (Duration::ZERO, Duration::ZERO);
        let mut config = Self {
            record,
            length,
            spool: PathBuf::new(),
            keep_bytes: 0,
            keep_age,
            labels: Labels::default(),
            sources: vec!["default".to_owned(); KEYS.len()],
        };
        for key in KEYS.iter().filter(|key| !key.default.is_empty()) {
            (key.set)(&mut config, key.default).expect("a default is a good value");
        }
        config
    }
}

impl Config {
    /// Defaults, then the file, then the environment, then `KEY=VALUE` of the command line.
    ///
    /// # Errors
    /// [`Failure`] with exit status 2 for an invalid configuration; with 1 for a file that cannot be read.
    pub fn load(
        file: Option<&Path>,
        environment: impl Iterator<Item = (String, String)>,
        settings: &[String],
    ) -> Result<Self, Failure> {
        let mut config = Self::default();
        if let Some((path, text)) = read(file)? {
            config.read_file(&path, &text)?;
        }
        for (name, value) in environment {
            let Some(name) = name.strip_prefix(VARIABLES) else { continue };
            let shown = format!("{VARIABLES}{name}");
            match KEYS.iter().position(|key| variable(key.name) == name) {
                Some(number) => config.set(number, &[&value], &shown)?,
                // Others only share the prefix and are not the agent's.
                None if SECTIONS.iter().any(|section| name.starts_with(section)) => {
                    let key = name.replacen('_', ".", 1).to_lowercase();
                    return Err(unknown(&shown, &key));
                }
                None => {}
            }
        }
        for setting in settings {
            let (name, value) = setting
                .split_once('=')
                .ok_or_else(|| Failure::usage(format!("--set {setting} has no value")).with_hint("write KEY=VALUE"))?;
            config.set(number_of(name)?, &[value], "--set")?;
        }
        Ok(config)
    }

    fn read_file(&mut self, path: &Path, text: &str) -> Result<(), Failure> {
        let shown = path.display().to_string();
        let root: Table = text.parse().map_err(|error: toml::de::Error| {
            let line = error.span().map_or(1, |span| text[..span.start.min(text.len())].lines().count().max(1));
            Failure::usage(format!("{shown}, line {line}: {}", error.message()))
        })?;
        for (section, table) in &root {
            let Value::Table(table) = table else { return Err(unknown(&shown, section)) };
            for (name, value) in table {
                let name = format!("{section}.{name}");
                if name == "labels.rule" {
                    self.labels.rules = Rule::all(value).map_err(|why| Failure::usage(format!("{shown}: {why}")))?;
                    continue;
                }
                let number = KEYS.iter().position(|key| key.name == name).ok_or_else(|| unknown(&shown, &name))?;
                let texts = texts(value).ok_or_else(|| {
                    Failure::usage(format!("{shown}: {name} must be a text, a number or a list of them"))
                })?;
                let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
                self.set(number, &texts, &shown)?;
            }
        }
        Ok(())
    }

    fn set(&mut self, number: usize, texts: &[&str], source: &str) -> Result<(), Failure> {
        let key = &KEYS[number];
        if texts.len() != 1 && !key.is_list {
            return Err(Failure::usage(format!("{source}: {} is one value, not a list", key.name)));
        }
        if key.is_list {
            self.clear(key.name);
        }
        for text in texts {
            (key.set)(self, text).map_err(|why| {
                Failure::usage(format!("{source}: {} = {text}: {why}", key.name))
                    .with_hint(format!("it is: {}", key.help))
            })?;
        }
        source.clone_into(&mut self.sources[number]);
        Ok(())
    }

    /// A given list replaces the one before.
    fn clear(&mut self, name: &str) {
        let filter = &mut self.record.filter;
        match name {
            "record.uid" => filter.uids.clear(),
            "record.cgroup" => filter.cgroups.clear(),
            "record.comm" => filter.comms.clear(),
            "record.container" => filter.containers.clear(),
            _ => self.labels.environment.clear(),
        }
    }

    /// All keys with their values, and where those come from.
    pub fn shown(&self) -> Vec<(&'static str, String, &str)> {
        KEYS.iter().zip(&self.sources).map(|(key, source)| (key.name, self.value(key.name), source.as_str())).collect()
    }

    fn value(&self, name: &str) -> String {
        let list = |items: Vec<String>| if items.is_empty() { "any".to_owned() } else { items.join(", ") };
        let (record, filter) = (&self.record, &self.record.filter);
        match name {
            "record.frequency" => record.frequency.to_string(),
            "record.native" => record.native.to_string(),
            "record.wall" => record.wall.to_string(),
            "record.max_cpu" => record.max_cpu.map_or_else(String::new, |share| format!("{}%", share * 100.0)),
            "record.max_memory" => record.max_memory.map_or_else(String::new, bytes),
            "record.uid" => list(filter.uids.iter().map(ToString::to_string).collect()),
            "record.cgroup" => list(filter.cgroups.clone()),
            "record.comm" => list(filter.comms.iter().map(ToString::to_string).collect()),
            "record.container" => list(filter.containers.clone()),
            "segments.length" => humantime::format_duration(self.length).to_string(),
            "spool.path" => self.spool.display().to_string(),
            "spool.keep_bytes" => bytes(self.keep_bytes),
            "spool.keep_age" => humantime::format_duration(self.keep_age).to_string(),
            "labels.command_line" => self.labels.command_line.to_string(),
            _ if self.labels.environment.is_empty() => "none".to_owned(),
            _ => self.labels.environment.join(", "),
        }
    }
}

fn bytes(bytes: u64) -> String {
    bytesize::ByteSize(bytes).display().iec().to_string()
}

/// `RECORD_MAX_CPU` for `record.max_cpu`.
fn variable(key: &str) -> String {
    key.replace('.', "_").to_uppercase()
}

fn number_of(name: &str) -> Result<usize, Failure> {
    KEYS.iter().position(|key| key.name == name).ok_or_else(|| unknown("--set", name))
}

fn unknown(source: &str, name: &str) -> Failure {
    let names = KEYS.iter().map(|key| key.name).chain(["labels.rule"]);
    let nearest = names.max_by(|a, b| strsim::jaro_winkler(a, name).total_cmp(&strsim::jaro_winkler(b, name)));
    Failure::usage(format!("{source}: unknown key {name}")).with_hint(match nearest {
        Some(nearest) if strsim::jaro_winkler(nearest, name) > 0.8 => format!("did you mean {nearest}?"),
        _ => "`tachyon-bpf agent --check` lists all keys".to_owned(),
    })
}

/// A value, or a list of values, as the text that the environment would have.
fn texts(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) => Some(vec![value.to_string()]),
        Value::Array(values) => Some(values.iter().map(texts).collect::<Option<Vec<_>>>()?.concat()),
        Value::Datetime(_) | Value::Table(_) => None,
    }
}

fn read(file: Option<&Path>) -> Result<Option<(PathBuf, String)>, Failure> {
    let path = file.unwrap_or(Path::new(DEFAULT_PATH));
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some((path.to_owned(), text))),
        Err(error) if file.is_none() && error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Failure::new(format!("cannot read the configuration {}", path.display())).with_source(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::advice::Advice as _;
    use std::io::Write as _;

    fn load(text: &str, environment: &[(&str, &str)], settings: &[&str]) -> Result<Config, Failure> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let settings: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
        Config::load(Some(file.path()), environment, &settings)
    }

    #[test]
    fn later_sources_win() {
        let text = "[record]\nfrequency = 49\nmax_cpu = \"2%\"\ncomm = [\"a*\", \"b\"]\n[segments]\nlength = \"5s\"\n";
        let environment =
            [("TACHYON_RECORD_FREQUENCY", "29"), ("TACHYON_SPOOL_PATH", "/x"), ("TACHYON_RING_BYTES", "1")];
        let config = load(text, &environment, &["record.comm=c", "record.frequency=19"]).unwrap();
        assert_eq!((config.record.frequency, config.record.max_cpu), (19, Some(0.02)));
        assert_eq!(config.record.filter.comms, [glob::Pattern::new("c").unwrap()]);
        assert_eq!((config.length, &*config.spool), (Duration::from_secs(5), Path::new("/x")));
        let sources: Vec<_> = config.shown().into_iter().map(|(name, _, source)| (name, source.to_owned())).collect();
        assert!(sources.contains(&("spool.path", "TACHYON_SPOOL_PATH".to_owned())), "{sources:?}");
        assert!(sources.contains(&("spool.keep_age", "default".to_owned())), "{sources:?}");
    }

    #[test]
    fn the_defaults_are_those_of_the_contract() {
        let config = load("", &[], &[]).unwrap();
        assert_eq!((config.record.frequency, config.record.native), (19, true));
        assert_eq!((config.record.max_cpu, config.record.max_memory), (Some(0.01), Some(128 << 20)));
        assert_eq!((config.length, config.keep_bytes), (Duration::from_secs(60), 2 << 30));
        assert_eq!(config.keep_age, Duration::from_secs(7 * 24 * 3600));
        assert!(config.record.filter.is_empty() && config.labels == Labels::default());
    }

    #[test]
    fn what_is_wrong_is_told_with_its_mend() {
        for (text, message, hint) in [
            ("[record]\nfrequenzy = 1\n", "unknown key record.frequenzy", "did you mean record.frequency?"),
            ("[spol]\npath = \"/x\"\n", "unknown key spol.path", "did you mean spool.path?"),
            ("zzz = 1\n", "unknown key zzz", "`tachyon-bpf agent --check` lists all keys"),
            ("[record]\nfrequency = 0\n", "record.frequency = 0: must be 1 to 10000 Hz", "it is: samples per second"),
            ("[record]\nfrequency = [1, 2]\n", "record.frequency is one value, not a list", ""),
            ("[record]\nwall = 3\n", "record.wall = 3: ", "it is: record waiting"),
            ("[spool]\npath = \"x\"\n", "spool.path = x: must be an absolute path", "it is: directory"),
            ("[spool]\nkeep_bytes = \"7d\"\n", "must be a size", "it is:"),
            ("[spool\n", "line 1: ", ""),
            ("[[labels.rule]]\nmatsch = {}\n", "matsch", ""),
        ] {
            let error = load(text, &[], &[]).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
            assert!(error.hint().unwrap_or_default().starts_with(hint), "{error}: {:?}", error.hint());
            assert_eq!(error.exit_status(), 2);
        }
        let odd = load("", &[("TACHYON_RECORD_FREQUENZY", "3")], &[]).unwrap_err();
        assert!(odd.to_string().contains("TACHYON_RECORD_FREQUENZY: unknown key record.frequenzy"), "{odd}");
        assert_eq!(odd.hint().as_deref(), Some("did you mean record.frequency?"));
        assert!(load("", &[], &["record.frequency"]).unwrap_err().to_string().contains("no value"));
        let missing = Config::load(Some(Path::new("/nosuch.toml")), std::iter::empty(), &[]).unwrap_err();
        assert_eq!(missing.exit_status(), 1);
    }

    #[test]
    fn the_example_is_the_defaults() {
        let text = include_str!("../../../../deploy/agent.toml");
        let uncommented = text
            .lines()
            .map(|line| {
                line.strip_prefix("# ").filter(|line| line.contains(" = ") || line.starts_with('[')).unwrap_or(line)
            })
            .collect::<Vec<_>>()
            .join("\n");
        let example = load(text, &[], &[]).unwrap();
        assert_eq!(Config { sources: Vec::new(), ..example }, Config { sources: Vec::new(), ..Config::default() });
        load(&uncommented, &[], &[]).unwrap();
        for key in &KEYS {
            let name = key.name.split_once('.').unwrap().1;
            assert!(
                text.lines().any(|line| line.trim_start_matches("# ").starts_with(&format!("{name} = "))),
                "{name}"
            );
        }
    }
}
