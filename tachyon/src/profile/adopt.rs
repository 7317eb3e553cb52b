//! Combines several profiles into one, and translates handles of one into handles of another.
//!
//! The segments of a recording have a profile each. To look at several, they are taken into one that grows.

use super::{Frame, FrameId, NativeMapping, Process, Profile, SPECIAL_FILENAME, Thread, ThreadId};
use foldhash::fast::RandomState;
use std::collections::HashMap;

/// A profile that takes in others. Frames are those that are shown ([`Profile::shown`]): native addresses are left out.
#[derive(Clone, Debug, Default)]
pub struct Adopter {
    /// All that was taken in.
    pub profile: Profile,
    processes: HashMap<(String, u32), u32, RandomState>,
    threads: HashMap<(u32, u64, u32), ThreadId, RandomState>,
}

/// Handles of a profile that was taken in, as handles of the one that took it.
#[derive(Debug, Default)]
pub struct Adopted {
    /// By [`FrameId`].
    pub frames: Vec<FrameId>,
    /// By [`ThreadId`].
    pub threads: Vec<ThreadId>,
}

impl Adopter {
    /// Takes in what `other` has. Equal frames, processes and threads are one.
    ///
    /// # Panics
    /// After 2^32 threads.
    pub fn adopt(&mut self, other: &Profile) -> Adopted {
        if self.profile.meta.start_us == 0 {
            self.profile.meta = other.meta.clone();
        }
        let meta = &mut self.profile.meta;
        meta.python_version = meta.python_version.max(other.meta.python_version);
        let processes: Vec<u32> = other.processes.iter().map(|process| self.process(process)).collect();
        let threads = other.threads.iter().map(|thread| self.thread(thread, processes[thread.process as usize]));
        let threads = threads.collect();
        for mapping in other.native.mappings() {
            let process = processes.get(mapping.process as usize).copied().unwrap_or_default();
            self.profile.native_mapping(NativeMapping { process, ..mapping.clone() });
        }
        Adopted { frames: self.frames(other), threads }
    }

    fn frames(&mut self, other: &Profile) -> Vec<FrameId> {
        let (mut ids, none) = (vec![None; other.strings.len()], self.profile.strings.intern(SPECIAL_FILENAME));
        let strings = &mut self.profile.strings;
        let mut string = |id: super::StrId| match ids.get(id.0 as usize) {
            Some(&Some(id)) => id,
            Some(None) => *ids[id.0 as usize].insert(strings.intern(other.strings.get(id))),
            // A frame that never got its names.
            None => none,
        };
        let frames = &mut self.profile.frames;
        let frame = |frame: &Frame| {
            let (filename, function) = (string(frame.filename), string(frame.function));
            frames.intern(Frame { filename, function, ..*frame })
        };
        other.frames.iter().map(frame).collect()
    }

    fn process(&mut self, process: &Process) -> u32 {
        let processes = &mut self.profile.processes;
        let index = *self.processes.entry((process.instance.clone(), process.pid)).or_insert_with(|| {
            processes.push(process.clone());
            u32::try_from(processes.len() - 1).expect("fewer than 2^32 processes fit in memory")
        });
        let known = &mut processes[index as usize];
        // Some facts become known later: a name changes with `exec`, a version is read when the process is looked at.
        if known != process {
            known.clone_from(process);
        }
        index
    }

    fn thread(&mut self, thread: &Thread, process: u32) -> ThreadId {
        let threads = &mut self.profile.threads;
        let key = (process, thread.unique_tid, thread.interpreter);
        let id = *self.threads.entry(key).or_insert_with(|| {
            threads.push(Thread { process, ..thread.clone() });
            ThreadId(u32::try_from(threads.len() - 1).expect("fewer than 2^32 threads fit in memory"))
        });
        let known = &mut threads[id.0 as usize].name;
        if !thread.name.is_empty() && *known != thread.name {
            known.clone_from(&thread.name);
        }
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::NativePlace;

    fn profile(thread: &str, lines: &[i32]) -> Profile {
        let mut profile = Profile::default();
        profile.meta.start_us = 7;
        profile.processes.push(Process { pid: 40, instance: "aa".into(), ..Process::default() });
        profile.threads.push(Thread { unique_tid: 41, name: thread.into(), ..Thread::default() });
        let (file, function) = (profile.strings.intern("a.py"), profile.strings.intern("f"));
        for &lineno in lines {
            profile.frames.intern(Frame { lineno, ..Frame::without_location(file, function) });
        }
        profile
    }

    #[test]
    fn equal_things_of_two_segments_are_one() {
        let mut adopter = Adopter::default();
        let first = adopter.adopt(&profile("", &[1, 2]));
        let second = adopter.adopt(&profile("worker", &[2, 3]));
        assert_eq!((first.frames[1], first.threads[0]), (second.frames[0], second.threads[0]));
        assert_eq!((adopter.profile.frames.len(), adopter.profile.threads.len()), (3, 1));
        assert_eq!(adopter.profile.thread(second.threads[0]).name, "worker", "a name that is learnt later");
        let mut other = profile("worker", &[]);
        other.processes[0].instance = "bb".into();
        let other = adopter.adopt(&other);
        assert_ne!(other.threads, second.threads, "a pid that was given out again is another process");
    }

    #[test]
    fn native_code_is_told_by_name() {
        let mut segment = profile("", &[]);
        let mapping =
            NativeMapping { path: "/lib/libz.so.1".into(), build_id: "aa".into(), ..NativeMapping::default() };
        let mapping = Some(segment.native_mapping(mapping));
        for address in [0x10, 0x20] {
            let place = NativePlace { mapping, address, vaddr: address, inlined: false };
            segment.native_frame("libz.so.1!deflate", None, None, place);
        }
        let mut adopter = Adopter::default();
        let adopted = adopter.adopt(&segment);
        assert!(adopted.frames.windows(2).all(|pair| pair[0] == pair[1]), "{adopted:?}");
        assert_eq!(adopter.profile.native.mappings().len(), 1, "its build id finds its names later");
    }
}
