//! `ship` against servers: receivers that decode everything on published definitions, killed and restarted; hostile spools; TLS, tokens, proxies.

mod collector;
#[path = "../../../tests/support/not_run.rs"]
mod not_run;
mod outage;
mod secure;
mod servers;
mod stores;
#[path = "../support/mod.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod support;
mod told;
mod whole;

use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use support::Segment;
use tachyon_fleet::segment::{self, Options};

/// A directory with a spool, a state and a configuration.
pub(crate) struct Host {
    pub(crate) dir: tempfile::TempDir,
}

type Samples = [(&'static str, &'static str, &'static [&'static str], u64)];

/// Two services, native frames and waits.
pub(crate) const APP: &Samples = &[
    ("web", "1", &["main", "handle", "libz.so.1!deflate"], 30),
    ("web", "1", &["main", "handle"], 20),
    ("web", "1", &["main", "handle", "libfoo.so!0x4a3c0"], 3),
    ("web", "1", &["main", "<waiting: socket>"], 7),
    ("my shop", "2", &["main", "handle"], 5),
    ("my shop", "2", &["main", "größe", "[k] read"], 1),
];

impl Host {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("spool")).unwrap();
        Self { dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Segments of a host, one after the other.
    pub(crate) fn segments(&self, numbers: std::ops::Range<u64>) {
        numbers.for_each(|sequence| drop(segment(sequence).write(&self.path("spool"))));
    }

    /// Writes the configuration; `backends` are added.
    pub(crate) fn configure(&self, backends: &str) -> PathBuf {
        let (spool, state) = (self.path("spool"), self.path("state"));
        let text = format!(
            "[spool]\npath = \"{}\"\nlook = \"100ms\"\n[state]\npath = \"{}\"\n[http]\nlisten = \"off\"\n{backends}",
            spool.display(),
            state.display()
        );
        let path = self.path("fleet.toml");
        fs::write(&path, text).unwrap();
        path
    }

    /// `ship --once`.
    pub(crate) fn once(&self) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tachyon-fleet"));
        command.args(["ship", "--once", "--config"]).arg(self.path("fleet.toml"));
        command.output().expect("the program starts")
    }

    /// All files of a directory with their content.
    pub(crate) fn content(&self, name: &str) -> BTreeMap<PathBuf, Vec<u8>> {
        content(&self.path(name), Path::new(""))
    }
}

pub(crate) fn content(root: &Path, below: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(root.join(below)).into_iter().flatten() {
        let name = below.join(entry.unwrap().file_name());
        if root.join(&name).is_dir() {
            found.extend(content(root, &name));
        } else {
            found.insert(name.clone(), fs::read(root.join(name)).unwrap());
        }
    }
    found
}

pub(crate) fn segment(sequence: u64) -> Segment<'static> {
    Segment { host: "h1", sequence, samples: APP, loss: &[("ring_full", 3)], before: &[] }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Service, pid, type of value, names of the stack, time: what both sides tell of a sample.
pub(crate) type Key = (String, Option<i64>, String, Vec<(String, String, i64)>, i64);

/// What a spool's segments say, in OTLP's words.
pub(crate) fn expected(spool: &Path) -> BTreeMap<Key, i64> {
    let mut counts = BTreeMap::new();
    for entry in fs::read_dir(spool).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "tach") {
            continue;
        }
        let segment = segment::read(&path, Options { slice: std::time::Duration::from_secs(60), start: None }).unwrap();
        for row in &segment.samples {
            let frame = |id: &i64| {
                let frame = &segment.frames[id];
                (frame.function.to_string(), frame.file.to_string(), frame.line.map_or(0, i64::from))
            };
            let stack: Vec<_> = segment.stacks[&row.stack_id].iter().map(frame).collect();
            for (name, value) in [("samples", row.samples), ("cpu", row.on_cpu_ns), ("off_cpu", row.waiting_ns)] {
                if value > 0 {
                    let key = (
                        row.service.to_string(),
                        row.labels.pid.map(i64::from),
                        name.to_owned(),
                        stack.clone(),
                        row.slice_start_ms,
                    );
                    *counts.entry(key).or_default() += value;
                }
            }
        }
    }
    counts
}

/// What a receiver decoded, each profile once; and how many profiles came again.
pub(crate) fn received(messages: &[Value]) -> (BTreeMap<Key, i64>, u64) {
    for message in messages {
        assert_eq!(message["problems"], serde_json::json!([]), "the rules of dictionaries");
    }
    decoded(messages)
}

/// The same, whatever the rules of dictionaries say.
pub(crate) fn decoded(messages: &[Value]) -> (BTreeMap<Key, i64>, u64) {
    let (mut counts, mut seen, mut again) = (BTreeMap::new(), std::collections::BTreeSet::new(), 0);
    for message in messages {
        let samples = message["samples"].as_array().unwrap();
        let profiles: std::collections::BTreeSet<&str> =
            samples.iter().map(|it| it["profile"].as_str().unwrap()).collect();
        let new: std::collections::BTreeSet<&str> =
            profiles.iter().copied().filter(|id| seen.insert((*id).to_owned())).collect();
        again += (profiles.len() - new.len()) as u64;
        for sample in samples.iter().filter(|it| new.contains(it["profile"].as_str().unwrap())) {
            let frame = |frame: &Value| {
                let text = |place: usize| frame[place].as_str().unwrap().to_owned();
                (text(0), text(1), frame[2].as_i64().unwrap())
            };
            let resource = &sample["resource"];
            let key = (
                resource["service.name"].as_str().unwrap().to_owned(),
                resource["process.pid"].as_i64(),
                sample["type"].as_str().unwrap().to_owned(),
                sample["stack"].as_array().unwrap().iter().map(frame).collect(),
                sample["time"].as_i64().unwrap() / 1_000_000,
            );
            *counts.entry(key).or_default() += sample["value"].as_i64().unwrap();
        }
    }
    (counts, again)
}
