//! Which processes and threads of several files are the same.
//!
//! A process is identified by its host and its [instance](Process::instance). Files of older versions have none: there it
//! is the same if host, pid, command line and Python version are. Two entries of one file are never the same process:
//! the file's writer knew that they are two. A thread is the same if its process and its number are.

use crate::profile::Process;
use std::collections::{HashMap, HashSet};

/// What identifies a process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Instance { host: String, pid: u32, instance: String },
    Looks { host: String, pid: u32, cmdline: Vec<String>, python_version: String },
}

/// The processes of several files.
#[derive(Debug, Default)]
pub struct Processes {
    /// All of them, in order of first appearance.
    pub all: Vec<Process>,
    /// The last of those that look the same: a later file continues it.
    latest: HashMap<Key, u32>,
}

impl Processes {
    /// The places in [`Self::all`] of a file's processes. Files come in time order.
    ///
    /// # Panics
    /// When there are 2^32 processes.
    pub fn of_file(&mut self, host: &str, processes: impl IntoIterator<Item = Process>) -> Vec<u32> {
        let mut of_this_file = HashSet::new();
        let places = processes.into_iter().map(|process| {
            let key = key(host, &process);
            if let Some(&known) = self.latest.get(&key)
                && of_this_file.insert(known)
            {
                complete(&mut self.all[known as usize], process);
                return known;
            }
            let place = self.push(process);
            of_this_file.insert(place);
            self.latest.insert(key, place);
            place
        });
        places.collect()
    }

    /// Adds a process about which nothing is known that another file could share.
    ///
    /// # Panics
    /// When there are 2^32 processes.
    pub fn push(&mut self, process: Process) -> u32 {
        let place = u32::try_from(self.all.len()).expect("fewer than 2^32 processes fit in memory");
        self.all.push(process);
        place
    }
}

fn key(host: &str, process: &Process) -> Key {
    let (host, pid) = (host.to_owned(), process.pid);
    if process.instance.is_empty() {
        let (cmdline, python_version) = (process.cmdline.clone(), process.python_version.clone());
        Key::Looks { host, pid, cmdline, python_version }
    } else {
        Key::Instance { host, pid, instance: process.instance.clone() }
    }
}

/// Fills in what an earlier file did not know yet.
fn complete(known: &mut Process, later: Process) {
    let texts = [
        (&mut known.comm, later.comm),
        (&mut known.python_version, later.python_version),
        (&mut known.container, later.container),
        (&mut known.pod, later.pod),
        (&mut known.service, later.service),
    ];
    for (known, later) in texts {
        if known.is_empty() {
            *known = later;
        }
    }
    if known.cmdline.is_empty() {
        known.cmdline = later.cmdline;
    }
    if known.environment.is_empty() {
        known.environment = later.environment;
    }
}

/// Thread ids that are unique in a profile: a number that another process used before gets a generation in its upper half.
#[derive(Debug, Default)]
pub struct ThreadIds {
    given: HashMap<(u32, u64), u64>,
    used: HashSet<u64>,
}

impl ThreadIds {
    /// The id of a process's thread: always the same for the same arguments.
    pub fn of(&mut self, process: u32, tid: u64) -> u64 {
        let used = &mut self.used;
        *self.given.entry((process, tid)).or_insert_with(|| {
            let mut id = tid;
            while !used.insert(id) {
                id = id.wrapping_add(1 << 32);
            }
            id
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, command: &str, instance: &str) -> Process {
        let cmdline = vec![command.to_owned()];
        Process { pid, cmdline, instance: instance.to_owned(), ..Process::default() }
    }

    #[test]
    fn instances_tell_processes() {
        let mut processes = Processes::default();
        assert_eq!(processes.of_file("h", [process(7, "a", "1"), process(7, "a", "2")]), [0, 1], "a reused pid");
        assert_eq!(processes.of_file("h", [process(7, "renamed", "2")]), [1]);
        assert_eq!(processes.of_file("h", [process(7, "a", "1")]), [0]);
        assert_eq!(processes.of_file("other", [process(7, "a", "1")]), [2]);
        assert_eq!(processes.of_file("h", [process(7, "a", "3")]), [3]);
        assert_eq!(processes.all.len(), 4);
    }

    #[test]
    fn without_instances_looks_do() {
        let mut processes = Processes::default();
        assert_eq!(processes.of_file("h", [process(7, "a", ""), process(8, "a", "")]), [0, 1]);
        assert_eq!(processes.of_file("h", [process(7, "a", ""), process(7, "b", "")]), [0, 2]);
        assert_eq!(processes.of_file("other", [process(7, "a", "")]), [3]);
        // One file knows two that look the same: the next file continues the second.
        assert_eq!(processes.of_file("h", [process(9, "w", ""), process(9, "w", "")]), [4, 5]);
        assert_eq!(processes.of_file("h", [process(9, "w", ""), process(9, "w", "")]), [5, 6]);
    }

    #[test]
    fn what_was_not_known_is_learnt() {
        let mut processes = Processes::default();
        let early = Process { pid: 7, instance: "1".into(), ..Process::default() };
        let late = Process { comm: "app".into(), python_version: "3.14.0".into(), ..process(7, "a", "1") };
        processes.of_file("h", [early]);
        processes.of_file("h", [late.clone()]);
        assert_eq!(processes.all, [late]);
    }

    #[test]
    fn thread_ids_are_unique_and_stay() {
        let mut ids = ThreadIds::default();
        let given = [(0, 5), (1, 5), (0, 5), (2, 5), (1, 5), (0, 6)].map(|(process, tid)| ids.of(process, tid));
        assert_eq!(given, [5, 5 | 1 << 32, 5, 5 | 2 << 32, 5 | 1 << 32, 6]);
    }
}
