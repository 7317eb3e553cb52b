//! Reads one file after the other into one profile.

use super::identity::ThreadIds;
use crate::profile::{self, FrameId, Merge, Profile, ThreadId};
use crate::sinks::metadata::{Metadata, ThreadMetadata};
use crate::sinks::{former_process_frame_name, process_frame_name};
use crate::tach::{Frame, ReadError, Sample, Tables};
use foldhash::fast::RandomState;
use std::collections::HashMap;

/// A handle that no frame has: there are never so many.
const NO_FRAME: FrameId = FrameId(u32::MAX);
/// The bits of a status byte that are CPython's; in our own files the other two are the sample's [`Merge`].
const STATUS_BITS: u8 = 0x3f;

/// The profile that files are read into, and what is known about the current file.
pub(super) struct Import {
    pub profile: Profile,
    /// If there are several files, threads get new ids; those of a single file keep theirs.
    ids: Option<ThreadIds>,
    /// The threads of all files, if there are several.
    by_id: HashMap<(u64, u32), ThreadId>,
    file: AtHand,
    /// The current stack.
    pub stack: Vec<FrameId>,
}

/// The current file.
#[derive(Default)]
struct AtHand {
    /// By index in the file; [`NO_FRAME`]: its names do not exist, so no sample can use it.
    frames: Vec<FrameId>,
    /// What is known about each (thread id, interpreter) of a file with our metadata; the process is the profile's.
    known: HashMap<(u64, u32), profile::Thread>,
    /// By process of the profile: the frame that names it in this file; the sink will add it again.
    roots: HashMap<u32, [FrameId; 2]>,
    /// Threads seen so far.
    threads: HashMap<(u64, u32), ThreadId, RandomState>,
    /// The process of threads that are not in the metadata.
    unknown: Unknown,
    merge_in_status: bool,
}

/// A process that is not in the metadata.
#[derive(Clone, Debug, Default)]
pub(super) struct Unknown {
    pub comm: String,
    pub place: Option<u32>,
}

impl Import {
    /// `many`: several files follow.
    pub fn new(profile: Profile, many: bool) -> Self {
        let ids = many.then(ThreadIds::default);
        Self { profile, ids, by_id: HashMap::new(), file: AtHand::default(), stack: Vec::new() }
    }

    /// Begins the next file. `places` are the places of its processes in the profile.
    pub fn begin(&mut self, tables: &Tables, metadata: Option<Metadata>, places: &[u32], unknown: Unknown) {
        let frames = import_frames(&mut self.profile, tables);
        self.file = AtHand { frames, unknown, ..AtHand::default() };
        let Some(metadata) = metadata else { return };
        self.file.merge_in_status = metadata.merge_in_status;
        for object in metadata.objects {
            self.profile.native.tell_object(object.path, object.build_id);
        }
        if metadata.many_processes {
            for (process, &place) in metadata.processes.into_iter().zip(places) {
                let process = process.into();
                let names = [process_frame_name(&process), former_process_frame_name(&process)];
                self.file.roots.insert(place, names.map(|name| self.profile.special_frame(&name)));
            }
        }
        for thread in metadata.threads {
            // A process that is not listed: as if the thread were not listed either.
            if let Some(&process) = places.get(thread.process as usize) {
                let ThreadMetadata { thread_id, interpreter, tid, ns_tid, name, .. } = thread;
                let known = profile::Thread { process, tid, unique_tid: thread_id, ns_tid, interpreter, name };
                self.file.known.insert((thread_id, interpreter), known);
            }
        }
    }

    /// A file's sample as one of the profile, except for its frames, which are then in [`Self::stack`].
    ///
    /// # Errors
    /// When a frame has no names; the reader has checked them all.
    pub fn sample(&mut self, sample: &Sample<'_>) -> Result<profile::Sample<'static>, ReadError> {
        let thread = self.thread(sample.thread_id, sample.interpreter_id);
        let frames = &self.file.frames;
        self.stack.clear();
        self.stack.extend(sample.frames.iter().map(|&index| frames.get(index as usize).copied().unwrap_or(NO_FRAME)));
        if let Some(place) = self.stack.iter().position(|&frame| frame == NO_FRAME) {
            return Err(ReadError::InvalidFrameIndex { index: sample.frames[place], count: frames.len() });
        }
        if let Some(roots) = self.file.roots.get(&self.profile.thread(thread).process)
            && self.stack.last().is_some_and(|last| roots.contains(last))
        {
            self.stack.pop();
        }
        let (status, merge) = if self.file.merge_in_status {
            (sample.status & STATUS_BITS, Merge::from_number(sample.status >> 6))
        } else {
            (sample.status, Merge::None)
        };
        Ok(profile::Sample { thread, time_us: sample.timestamp_us, status, frames: &[], merge, work: None })
    }

    /// The process of a thread of the file, if known before its first sample.
    pub fn process_of(&self, id: u64, interpreter: u32) -> Option<u32> {
        match self.file.threads.get(&(id, interpreter)) {
            Some(&thread) => Some(self.profile.thread(thread).process),
            None => self.file.known.get(&(id, interpreter)).map(|thread| thread.process),
        }
    }

    fn thread(&mut self, id: u64, interpreter: u32) -> ThreadId {
        if let Some(&thread) = self.file.threads.get(&(id, interpreter)) {
            return thread;
        }
        let known = self.file.known.remove(&(id, interpreter));
        let mut thread = known.unwrap_or_else(|| {
            // Other systems' ids are wider than Linux's; with `ns_tid` 0 sinks take the whole id.
            let tid = u32::try_from(id).unwrap_or(0);
            let process = self.unknown_process();
            profile::Thread { process, tid, unique_tid: id, ns_tid: tid, interpreter, name: String::new() }
        });
        let handle = match &mut self.ids {
            None => push(&mut self.profile, thread),
            Some(ids) => {
                let number = if thread.tid == 0 { id } else { u64::from(thread.tid) };
                thread.unique_tid = ids.of(thread.process, number);
                let profile = &mut self.profile;
                let name = thread.name.clone();
                let key = (thread.unique_tid, interpreter);
                let handle = *self.by_id.entry(key).or_insert_with(|| push(profile, thread));
                let known = &mut self.profile.threads[handle.0 as usize].name;
                if known.is_empty() {
                    *known = name;
                }
                handle
            }
        };
        self.file.threads.insert((id, interpreter), handle);
        handle
    }

    fn unknown_process(&mut self) -> u32 {
        let Unknown { comm, place } = &mut self.file.unknown;
        let processes = &mut self.profile.processes;
        *place.get_or_insert_with(|| {
            processes.push(profile::Process { comm: comm.clone(), ..profile::Process::default() });
            u32::try_from(processes.len() - 1).expect("a file has fewer than 2^32 processes")
        })
    }

    /// Threads seen so far, in all files.
    pub fn threads(&self) -> u64 {
        self.profile.threads.len() as u64
    }
}

fn push(profile: &mut Profile, thread: profile::Thread) -> ThreadId {
    let handle = ThreadId(u32::try_from(profile.threads.len()).expect("the header counts threads in 32 bits"));
    profile.threads.push(thread);
    handle
}

fn import_frames(profile: &mut Profile, tables: &Tables) -> Vec<FrameId> {
    let mut import = |frame: &Frame| {
        let (filename, function) = (tables.string(frame.filename)?, tables.string(frame.function)?);
        if frame.is_called() {
            return Some(profile.special_frame(function));
        }
        let (filename, function) = (profile.strings.intern(filename), profile.strings.intern(function));
        let mut imported = profile::Frame::without_location(filename, function);
        if let Some(location) = frame.location() {
            imported.lineno = location.lineno;
            imported.end_lineno = location.end_lineno;
            imported.column = location.column;
            imported.end_column = location.end_column;
        }
        imported.opcode = frame.opcode;
        Some(profile.frames.intern(imported))
    };
    tables.frames().iter().map(|frame| import(frame).unwrap_or(NO_FRAME)).collect()
}
