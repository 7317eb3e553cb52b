//! What a profile file carries beside samples: one JSON document in an unused entry of TACH's string table.
//!
//! CPython's reader never looks at unused strings, so the document is invisible to it. It is always the last entry:
//! a program that calls a function by such a name does not get to speak for its profile. The schema is documented in
//! `docs/formats/tach.md`.

use super::file_thread_id;
use crate::profile::{Process, Profile, ThreadId, script};
use crate::report::Report;
use crate::tach::Tables;
use serde::{Deserialize, Serialize};

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
    /// Place of this file in a recording that takes several, from 1.
    pub part: u32,
    /// How many files the recording takes.
    pub parts: u32,
    /// Processes.
    pub processes: Vec<ProcessMetadata>,
    /// Threads of those.
    pub threads: Vec<ThreadMetadata>,
    /// The account of the whole recording.
    pub report: Report,
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
    /// Script or module of its command line ([`crate::profile::script`]); empty when it has none.
    pub script: String,
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
            script: script(&process.cmdline),
        }
    }
}

impl ThreadMetadata {
    /// What is told of a thread of the profile.
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
            processes: profile.processes.iter().map(ProcessMetadata::from).collect(),
            threads: threads.map(|id| ThreadMetadata::new(profile, id)).collect(),
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
        serde_json::from_str(tables.string(last)?.strip_prefix(PREFIX)?).ok()
    }
}
