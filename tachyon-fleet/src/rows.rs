//! Rows of the four tables (`docs/fleet.md`).

use crate::hash::StackId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What distinguishes a process from others: labels of the account, some of which have a column of their own.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Labels {
    /// `service.version`.
    pub version: Option<String>,
    /// CPython's version.
    pub python: Option<String>,
    /// Script or module.
    pub script: Option<String>,
    /// The kernel's short name.
    pub comm: Option<String>,
    /// Id of the container.
    pub container: Option<String>,
    /// Uid of the pod.
    pub pod: Option<String>,
    /// Pid on the host.
    pub pid: Option<i32>,
    /// All others, by name.
    pub others: BTreeMap<String, String>,
}

impl Labels {
    /// From labels by name; also returns the service, which is one of them. `host` is a column of the row.
    #[must_use]
    pub fn new(mut labels: BTreeMap<String, String>, host: &str) -> (Self, Option<String>) {
        if labels.get("host").is_some_and(|label| label == host) {
            labels.remove("host");
        }
        // A rule may have set it to something that is not a number.
        let pid = labels.get("pid").and_then(|pid| pid.parse().ok());
        if pid.is_some() {
            labels.remove("pid");
        }
        let service = labels.remove("service.name");
        let mut take = |name| labels.remove(name);
        let (version, python, script) = (take("service.version"), take("python"), take("script"));
        let (comm, container, pod) = (take("comm"), take("container"), take("pod"));
        (Self { version, python, script, comm, container, pod, pid, others: labels }, service)
    }

    /// All of them by name, with the columns `host` and `service`.
    #[must_use]
    pub fn by_name(&self, host: &str, service: &str) -> BTreeMap<String, String> {
        let pid = self.pid.map(|pid| pid.to_string());
        let known = [
            ("service.version", &self.version),
            ("python", &self.python),
            ("script", &self.script),
            ("comm", &self.comm),
            ("container", &self.container),
            ("pod", &self.pod),
            ("pid", &pid),
            ("service.name", &Some(service.to_owned())),
            ("host", &Some(host.to_owned())),
        ];
        let known = known.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value.clone()?)));
        known.chain(self.others.clone()).collect()
    }
}

/// Samples of one stack in one slice of one set of labels. Rows are in this order of their fields.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SampleRow {
    /// Service.
    pub service: Arc<str>,
    /// Start of the slice, milliseconds since 1970, UTC.
    pub slice_start_ms: i64,
    /// The stack.
    pub stack_id: StackId,
    /// Labels of the process.
    pub labels: Arc<Labels>,
    /// Host.
    pub host: Arc<str>,
    /// CPU time that the samples stand for, nanoseconds.
    pub on_cpu_ns: i64,
    /// Waiting time that they stand for, nanoseconds.
    pub waiting_ns: i64,
    /// Samples.
    pub samples: i64,
}

/// A stack: ids of its frames, innermost first.
pub type StackRow = (StackId, Arc<[i64]>);

/// A frame.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrameRow {
    /// Id.
    pub frame_id: i64,
    /// Qualified name; for native frames without their object.
    pub function: Arc<str>,
    /// Source file, or a native frame's object; empty: none.
    pub file: Arc<str>,
    /// Line; `None`: not known.
    pub line: Option<i32>,
    /// `python`, `native`, `kernel`, `special`.
    pub kind: Arc<str>,
    /// Build id of the object, for a function known only by its address.
    pub build_id: Option<Arc<str>>,
}

/// Samples that were lost on a host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LossRow {
    /// Start of the segment, milliseconds since 1970, UTC.
    pub slice_start_ms: i64,
    /// Host.
    pub host: Arc<str>,
    /// Cause, as accounts name it; those of waiting threads after `waiting.`.
    pub cause: String,
    /// Runs of the timer, or ticks of waiting threads.
    pub runs: i64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_have_columns_and_a_map() {
        let labels = |pairs: &[(&str, &str)]| pairs.iter().map(|&(name, value)| (name.into(), value.into())).collect();
        let given = [("host", "h"), ("pid", "7"), ("service.name", "web"), ("service.version", "2"), ("team", "a")];
        let (known, service) = Labels::new(labels(&given), "h");
        assert_eq!((known.pid, known.version.as_deref(), service.as_deref()), (Some(7), Some("2"), Some("web")));
        assert_eq!(known.others, labels(&[("team", "a")]));
        assert_eq!(known.by_name("h", "web"), labels(&given));
        let (odd, service) = Labels::new(labels(&[("host", "other"), ("pid", "x")]), "h");
        assert_eq!((odd.pid, service), (None, None));
        assert_eq!(odd.others, labels(&[("host", "other"), ("pid", "x")]), "nothing gets lost");
    }
}
