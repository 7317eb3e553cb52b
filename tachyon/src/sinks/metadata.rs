//! What a profile file carries besides samples: one JSON document in an unused entry of TACH's string table.
//!
//! CPython's reader never looks at unused strings, so the document is invisible to it. It is always the last entry, so
//! a program that gives a function such a name cannot forge it. The schema is documented in `docs/formats/tach.md`.

use super::file_thread_id;
use crate::profile::{Process, Profile, ThreadId, address_of_name, script};
use crate::report::Report;
use crate::tach::Tables;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};

/// What the entry starts with; the document follows.
pub const PREFIX: &str = "tachyon-bpf:metadata:1:";

/// The document.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Metadata {
    /// Name and version of the program that recorded.
    pub tool: String,
    /// Host name.
    pub host: String,
    /// Start, seconds since 1970, UTC.
    pub start_unix: f64,
    /// The outermost frame of every stack names its process.
    pub many_processes: bool,
    /// Number of this file in a recording that takes several, from 1.
    pub part: u32,
    /// How many files the recording takes.
    pub parts: u32,
    /// The upper two bits of each sample's status are its [`crate::profile::Merge`].
    pub merge_in_status: bool,
    /// Processes.
    pub processes: Vec<ProcessMetadata>,
    /// Threads of those.
    pub threads: Vec<ThreadMetadata>,
    /// Objects that have functions without a name.
    pub objects: Vec<ObjectMetadata>,
    /// The account of the whole recording.
    pub report: Report,
}

/// An object whose functions are named by their addresses, with what is needed to name them later.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct ObjectMetadata {
    /// As in the names of its frames.
    pub name: String,
    /// Path as its process saw it.
    pub path: String,
    /// In hexadecimal digits.
    pub build_id: String,
}

impl ObjectMetadata {
    /// The objects of a profile.
    fn of(profile: &Profile) -> Vec<Self> {
        let nameless: HashSet<&str> =
            profile.strings.iter().filter_map(|name| Some(address_of_name(name)?.0)).collect();
        let objects = profile.native.objects().into_iter().map(|(path, build_id)| Self::new(path, build_id));
        objects.filter(|object| nameless.contains(&*object.name)).collect()
    }

    /// The metadata of an object.
    #[must_use]
    pub fn new(path: &str, build_id: &str) -> Self {
        let name = path.rsplit('/').next().unwrap_or_default().to_owned();
        Self { name, path: path.to_owned(), build_id: build_id.to_owned() }
    }
}

/// One process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessMetadata {
    /// Pid on the host.
    pub pid: u32,
    /// The kernel's short name.
    pub comm: String,
    /// Command line; empty when it could not be read.
    pub cmdline: Vec<String>,
    /// CPython's version; empty when never learnt.
    pub python_version: String,
    /// Id of its container, from its control group; empty when it is in none that can be seen.
    pub container: String,
    /// Uid of its Kubernetes pod, likewise.
    pub pod: String,
    /// The service that it says it belongs to; empty if it does not say.
    pub service: String,
    /// Variables that it was started with, by name: those that the recording asked for; absent when there are none.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// Script or module of its command line ([`crate::profile::script`]); empty when it has none.
    pub script: String,
    /// Distinguishes it from every other process of this boot of its host, in hexadecimal digits; empty if not known.
    pub instance: String,
}

/// One thread of one interpreter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ThreadMetadata {
    /// The id in the file's samples.
    pub thread_id: u64,
    /// The interpreter in the file's samples.
    pub interpreter: u32,
    /// Index into [`Metadata::processes`].
    pub process: u32,
    /// Thread id on the host.
    pub tid: u32,
    /// Thread id in its own pid namespace.
    pub ns_tid: u32,
    /// Name; empty when not known.
    pub name: String,
}

impl From<&Process> for ProcessMetadata {
    fn from(process: &Process) -> Self {
        Self {
            pid: process.pid,
            comm: process.comm.clone(),
            cmdline: process.cmdline.clone(),
            python_version: process.python_version.clone(),
            container: process.container.clone(),
            pod: process.pod.clone(),
            service: process.service.clone(),
            environment: process.environment.clone(),
            script: script(&process.cmdline),
            instance: process.instance.clone(),
        }
    }
}

impl From<ProcessMetadata> for Process {
    fn from(process: ProcessMetadata) -> Self {
        Self {
            pid: process.pid,
            comm: process.comm,
            cmdline: process.cmdline,
            python_version: process.python_version,
            container: process.container,
            pod: process.pod,
            service: process.service,
            environment: process.environment,
            instance: process.instance,
            details: None,
        }
    }
}

impl ThreadMetadata {
    /// The metadata of a thread of the profile.
    #[must_use]
    pub fn new(profile: &Profile, id: ThreadId) -> Self {
        let thread = profile.thread(id);
        Self {
            thread_id: file_thread_id(profile, id),
            interpreter: thread.interpreter,
            process: thread.process,
            tid: thread.tid,
            ns_tid: thread.ns_tid,
            name: thread.name.clone(),
        }
    }
}

impl Metadata {
    /// The document for a profile that is complete.
    #[must_use]
    pub fn new(profile: &Profile, report: &Report) -> Self {
        let threads = (0..).map(ThreadId).take(profile.threads.len());
        Self {
            tool: concat!("tachyon-bpf ", env!("CARGO_PKG_VERSION")).to_owned(),
            host: profile.meta.hostname.clone(),
            start_unix: profile.meta.start_unix,
            many_processes: profile.meta.many_processes,
            part: 1,
            parts: 1,
            merge_in_status: true,
            processes: profile.processes.iter().map(ProcessMetadata::from).collect(),
            threads: threads.map(|id| ThreadMetadata::new(profile, id)).collect(),
            objects: ObjectMetadata::of(profile),
            report: report.clone(),
        }
    }

    /// The entry of the string table.
    #[must_use]
    pub fn to_entry(&self) -> String {
        let document = serde_json::to_string(self).expect("strings, numbers and maps with string keys become JSON");
        format!("{PREFIX}{document}")
    }

    /// Finds and reads the document of a file. `None`: there is none, or none that this version can read.
    #[must_use]
    pub fn find(tables: &Tables) -> Option<Self> {
        let last = u32::try_from(tables.string_count().checked_sub(1)?).ok()?;
        if tables.frames().iter().any(|frame| frame.filename == last || frame.function == last) {
            return None;
        }
        let document = tables.string(last)?.strip_prefix(PREFIX)?;
        if cost(document) > MOST_COST.max(document.len() * COST_A_BYTE) {
            return None;
        }
        serde_json::from_str(document).ok()
    }
}

/// What a document may cost per byte, and what any document may cost. Documents from this program, which have all members, cost three
/// to six per byte.
const COST_A_BYTE: usize = 7;
const MOST_COST: usize = 256 << 10;
/// Memory of an object (a thread has 72 bytes, a process 200), and of a text or other member: of a map's entry and its
/// name.
const OBJECT: usize = 192;
const MEMBER: usize = 48;

/// What a document will take in memory, roughly. A document of nine million bytes has room for three million empty objects or
/// texts, which would take fifty times the memory.
fn cost(document: &str) -> usize {
    let (mut cost, mut in_text, mut escaped) = (0, false, false);
    for byte in document.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_text,
            b'"' => in_text = !in_text,
            b'{' if !in_text => cost += OBJECT,
            b',' if !in_text => cost += MEMBER,
            _ => {}
        }
    }
    cost
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_of_empty_entries_is_none_of_ours() {
        let find = |document: &str| Metadata::find(&Tables::new(["a", &format!("{PREFIX}{document}")], Vec::new()));
        assert!(find("{}").is_some());
        // Braces in a command line are text.
        let odd = format!(r#"{{"processes":[{{"pid":7,"cmdline":["\"{}"]}}]}}"#, "{".repeat(100_000));
        assert_eq!(find(&odd).expect("it is ours").processes[0].pid, 7);
        let many = |key: &str, entry: &str| format!(r#"{{"{key}":[{}]}}"#, vec![entry; 60_000].join(","));
        for (key, entry) in
            [("processes", "{}"), ("threads", "{}"), ("threads", r#"{"tid":1}"#), ("cmdlines", r#""""#), ("notes", "7")]
        {
            assert!(find(&many(key, entry)).is_none(), "{key} {entry}");
        }
        // The minimum that this version writes.
        let process = serde_json::to_string(&ProcessMetadata::default()).unwrap();
        let thread = serde_json::to_string(&ThreadMetadata::default()).unwrap();
        let account = serde_json::to_string(&crate::report::ProcessReport::default()).unwrap();
        assert!(find(&many("processes", &process)).is_some() && find(&many("threads", &thread)).is_some());
        let report = format!(r#"{{"report":{}}}"#, many("processes", &account));
        assert!(cost(&report) < COST_A_BYTE * report.len(), "{} of {}", cost(&report), report.len());
    }
}
