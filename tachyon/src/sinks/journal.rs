//! What comes last in a TACH file, written beside it as it becomes known, so that a recording that is cut can be read.
//!
//! One JSON object per line, each line written at once and only ever appended: an incomplete last line is dropped. A
//! frame may come twice, when its names arrived late; the later line counts. `docs/formats/tach.md` has the keys.

use super::metadata::{ObjectMetadata, ProcessMetadata, ThreadMetadata};
use crate::profile::Meta;
use crate::tach::{Compression, Frame, Layout, Options, Tables};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, BufRead, Write};

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// The first one.
    Start(Start),
    /// A frame.
    Frame(FrameLine),
    /// The next process.
    Process(ProcessMetadata),
    /// The next thread.
    Thread(ThreadMetadata),
    /// An object with native code.
    Object(ObjectMetadata),
    /// The samples are complete: they end at this offset of the (last) file.
    SamplesEnd(u64),
}

/// What does not change while samples come in.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Start {
    /// Version of this schema.
    pub schema: u32,
    /// A random number, which the recording's tail has as well.
    pub id: u64,
    /// The early layout.
    pub early: bool,
    /// Samples are compressed.
    pub zstd: bool,
    /// Start on the monotonic clock, microseconds.
    pub start_time_us: u64,
    /// Microseconds between samples.
    pub sample_interval_us: u64,
    /// CPython's version, as far as known at the start.
    pub python_version: [u8; 3],
    /// Only samples that held the GIL.
    pub gil_only: bool,
    /// Waiting threads too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub waits: bool,
    /// Native frames are recorded.
    pub native: bool,
    /// Opcodes are recorded.
    pub opcodes: bool,
    /// The outermost frame of every stack names its process.
    pub many_processes: bool,
    /// Host name.
    pub host: String,
    /// Start, seconds since 1970, UTC.
    pub start_unix: f64,
    /// As in the metadata.
    pub merge_in_status: bool,
}

impl Start {
    /// The only schema there is.
    pub const SCHEMA: u32 = 1;

    /// For a recording that begins.
    #[must_use]
    pub fn new(meta: &Meta, options: &Options, id: u64) -> Self {
        Self {
            schema: Self::SCHEMA,
            id,
            early: options.layout == Layout::Early,
            zstd: options.compression == Compression::Zstd,
            start_time_us: options.start_time_us,
            sample_interval_us: options.sample_interval_us,
            python_version: options.python_version,
            gil_only: meta.gil_only,
            waits: meta.waits,
            native: meta.native,
            opcodes: meta.opcodes,
            many_processes: meta.many_processes,
            host: meta.hostname.clone(),
            start_unix: meta.start_unix,
            merge_in_status: true,
        }
    }
}

/// A frame of the file's table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FrameLine {
    /// Its index.
    pub index: u32,
    /// Source file.
    pub file: String,
    /// Function.
    pub function: String,
    /// Line, last line, column, last column.
    pub position: [i32; 4],
    /// Opcode.
    pub opcode: u8,
}

/// Writes a journal.
#[derive(Debug)]
pub(super) struct Journal {
    out: File,
    /// See [`Start::id`].
    pub id: u64,
    buffer: Vec<u8>,
    begun: bool,
    processes: usize,
    threads: usize,
    mappings: usize,
    objects: HashSet<ObjectMetadata>,
    /// By index in the file: what was written.
    pub frames: Vec<crate::profile::Frame>,
}

impl Journal {
    pub fn new(out: File) -> Self {
        Self {
            out,
            id: RandomState::new().hash_one(0),
            buffer: Vec::new(),
            begun: false,
            processes: 0,
            threads: 0,
            mappings: 0,
            objects: HashSet::new(),
            frames: Vec::new(),
        }
    }

    pub fn put(&mut self, line: &Line) {
        serde_json::to_writer(&mut self.buffer, line).expect("strings and numbers become JSON");
        self.buffer.push(b'\n');
    }

    /// Adds the start and any new processes and threads.
    pub fn put_profile(&mut self, profile: &crate::profile::Profile, options: &Options) {
        if !std::mem::replace(&mut self.begun, true) {
            self.put(&Line::Start(Start::new(&profile.meta, options, self.id)));
        }
        for process in profile.processes.iter().skip(self.processes) {
            self.put(&Line::Process(ProcessMetadata::from(process)));
        }
        self.processes = profile.processes.len();
        for id in self.threads..profile.threads.len() {
            let id = crate::profile::ThreadId(u32::try_from(id).unwrap_or(u32::MAX));
            self.put(&Line::Thread(ThreadMetadata::new(profile, id)));
        }
        self.threads = profile.threads.len();
        let mappings = profile.native.mappings();
        for mapping in mappings[self.mappings..].iter().filter(|mapping| !mapping.build_id.is_empty()) {
            // Every process has a mapping of its own.
            let object = ObjectMetadata::new(&mapping.path, &mapping.build_id);
            if self.objects.insert(object.clone()) {
                self.put(&Line::Object(object));
            }
        }
        self.mappings = mappings.len();
    }

    /// Writes what was added to the file.
    pub fn write(&mut self, sync: bool) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        self.out.write_all(&self.buffer)?;
        self.buffer.clear();
        if sync { self.out.sync_data() } else { Ok(()) }
    }
}

/// A journal that was read.
#[derive(Debug, Default)]
pub struct Read {
    /// The first line; `None`: the journal is empty.
    pub start: Option<Start>,
    /// Processes.
    pub processes: Vec<ProcessMetadata>,
    /// Threads.
    pub threads: Vec<ThreadMetadata>,
    /// Objects with native code.
    pub objects: Vec<ObjectMetadata>,
    /// Where the samples end, if they were complete.
    pub samples_end: Option<u64>,
    frames: HashMap<u32, FrameLine>,
}

impl Read {
    /// Reads the lines up to the first malformed one.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn new(mut journal: impl BufRead) -> io::Result<Self> {
        let mut read = Self::default();
        let mut line = Vec::new();
        loop {
            line.clear();
            journal.read_until(b'\n', &mut line)?;
            if line.last() != Some(&b'\n') {
                return Ok(read);
            }
            match serde_json::from_slice(&line) {
                Ok(Line::Start(start)) => read.start = Some(start),
                Ok(Line::Frame(frame)) => {
                    read.frames.insert(frame.index, frame);
                }
                Ok(Line::Process(process)) => read.processes.push(process),
                Ok(Line::Thread(thread)) => read.threads.push(thread),
                Ok(Line::Object(object)) => read.objects.push(object),
                Ok(Line::SamplesEnd(offset)) => read.samples_end = Some(offset),
                Err(_) => return Ok(read),
            }
        }
    }

    /// The tables of the file: frames up to the first one missing from the journal. `last` becomes the last string.
    #[must_use]
    pub fn tables(&self, last: String) -> Tables {
        let mut interner = crate::tach::Interner::default();
        let mut frames = Vec::new();
        while let Some(line) = u32::try_from(frames.len()).ok().and_then(|index| self.frames.get(&index)) {
            let [lineno, end_lineno, column, end_column] = line.position;
            frames.push(Frame {
                filename: interner.string(&line.file),
                function: interner.string(&line.function),
                lineno,
                end_lineno,
                column,
                end_column,
                opcode: line.opcode,
            });
        }
        Tables::new(interner.strings().chain([last.as_str()]), frames)
    }
}
