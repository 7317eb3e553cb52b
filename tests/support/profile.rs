//! A profile as tests look at it: samples with the names of their frames.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use tachyon::tach::{Frame, Header, Reader};

/// Bits of a sample's status.
pub mod status {
    /// The thread holds the GIL.
    pub const HAS_GIL: u8 = 1;
    /// The thread runs on a CPU.
    pub const ON_CPU: u8 = 2;
    /// The state is not known.
    pub const UNKNOWN: u8 = 4;
    /// `THREAD_STATUS_HAS_EXCEPTION`.
    pub const HAS_EXCEPTION: u8 = 16;
    /// The thread is its interpreter's main thread.
    pub const MAIN_THREAD: u8 = 32;
}

/// Line, end line, column and end column; -1: not known.
pub type Place = [i32; 4];

/// A frame with its names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ShownFrame {
    /// Qualified name of the function.
    pub function: String,
    /// Source file. For frames that are not source lines: that of the line that called them if it is known, else `~`.
    pub filename: String,
    /// Place in the file; `None` for those with `~`.
    pub place: Option<Place>,
    /// Opcode, if recorded.
    pub opcode: Option<u8>,
}

impl ShownFrame {
    /// Whether it has no source of its own: `~`, or the line of Python that called it, without columns.
    #[must_use]
    pub fn is_special(&self) -> bool {
        let nowhere = self.filename == "~" && self.place.is_none();
        let outside = self.function.contains('!') || self.function.starts_with("[k] ");
        let waiting = self.function.starts_with("<waiting: ");
        nowhere
            || (outside || waiting)
                && self.place.is_some_and(|[line, end_line, column, _]| line == end_line && column < 0)
    }

    /// Whether it is native code: `object!function`.
    #[must_use]
    pub fn is_native(&self) -> bool {
        self.is_special() && self.function.contains('!') && !self.is_kernel()
    }

    /// Whether it is the kernel's.
    #[must_use]
    pub fn is_kernel(&self) -> bool {
        self.is_special() && self.function.starts_with("[k] ")
    }
}

/// A sample of one thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Thread id, as the file has it.
    pub thread_id: u64,
    /// Interpreter id.
    pub interpreter_id: u32,
    /// Microseconds on the monotonic clock.
    pub timestamp_us: u64,
    /// See [`status`].
    pub status: u8,
    /// Index into [`Recorded::stacks`].
    pub stack: usize,
}

/// A TACH file, read with the project's own reader.
#[derive(Debug)]
pub struct Recorded {
    /// The file's header.
    pub header: Header,
    /// The frames in use, in order of first use.
    pub frames: Vec<ShownFrame>,
    /// The distinct stacks, in order of first use: indices into `frames`, leaf first.
    pub stacks: Vec<Vec<usize>>,
    /// The samples in the order of the file.
    pub samples: Vec<Sample>,
}

impl Recorded {
    /// Reads a file.
    ///
    /// # Panics
    /// When it is not a readable TACH file.
    #[must_use]
    pub fn read(path: &Path) -> Self {
        let fault = |error: &dyn std::fmt::Display| -> ! { panic!("cannot read {}: {error}", path.display()) };
        let file = File::open(path).unwrap_or_else(|error| fault(&error));
        let mut reader = Reader::new(BufReader::new(file)).unwrap_or_else(|error| fault(&error));
        let header = *reader.header();
        let mut samples = reader.samples().unwrap_or_else(|error| fault(&error));
        let tables = samples.tables();
        let name = |index| tables.string(index).expect("the reader checked the index").to_owned();
        let mut recorded = Self { header, frames: Vec::new(), stacks: Vec::new(), samples: Vec::new() };
        let (mut frames, mut by_content, mut stacks) = (HashMap::new(), HashMap::new(), HashMap::new());
        while let Some(sample) = samples.next_sample().unwrap_or_else(|error| fault(&error)) {
            let stack: Vec<usize> = sample
                .frames
                .iter()
                .map(|&index| {
                    *frames.entry(index).or_insert_with(|| {
                        let Frame { filename, function, .. } = *tables.frame(index).expect("checked by the reader");
                        let frame = tables.frame(index).expect("checked by the reader");
                        let shown = ShownFrame {
                            function: name(function),
                            filename: name(filename),
                            place: frame.location().map(|at| [at.lineno, at.end_lineno, at.column, at.end_column]),
                            opcode: frame.opcode(),
                        };
                        *by_content.entry(shown.clone()).or_insert_with(|| {
                            recorded.frames.push(shown);
                            recorded.frames.len() - 1
                        })
                    })
                })
                .collect();
            let known = &mut recorded.stacks;
            let stack = *stacks.entry(stack.clone()).or_insert_with(|| {
                known.push(stack);
                known.len() - 1
            });
            recorded.samples.push(Sample {
                thread_id: sample.thread_id,
                interpreter_id: sample.interpreter_id,
                timestamp_us: sample.timestamp_us,
                status: sample.status,
                stack,
            });
        }
        recorded
    }

    /// The same with Python frames and markers only.
    #[must_use]
    pub fn without_native(&self) -> Self {
        let python = |stack: &Vec<usize>| stack.iter().copied().filter(|&at| !self.frames[at].is_native()).collect();
        let stacks = self.stacks.iter().map(python).collect();
        Self { header: self.header, frames: self.frames.clone(), stacks, samples: self.samples.clone() }
    }

    /// A sample's frames, leaf first.
    pub fn frames_of(&self, sample: &Sample) -> impl DoubleEndedIterator<Item = &ShownFrame> + ExactSizeIterator {
        self.stacks[sample.stack].iter().map(|&frame| &self.frames[frame])
    }

    /// A sample's innermost frame.
    #[must_use]
    pub fn leaf(&self, sample: &Sample) -> Option<&ShownFrame> {
        self.frames_of(sample).next()
    }

    /// Samples of threads that waited for this, in all of these functions.
    #[must_use]
    pub fn waiting(&self, cause: &str, functions: &[&str]) -> usize {
        let mark = format!("<waiting: {cause}>");
        let fits = |sample: &&_| {
            let is_in = |wanted: &&str| self.frames_of(sample).any(|frame| frame.function == *wanted);
            self.leaf(sample).is_some_and(|leaf| leaf.function == mark) && functions.iter().all(is_in)
        };
        self.samples.iter().filter(fits).count()
    }

    /// A sample's outermost frame.
    #[must_use]
    pub fn root(&self, sample: &Sample) -> Option<&ShownFrame> {
        self.frames_of(sample).next_back()
    }

    /// How many samples each distinct stack has.
    #[must_use]
    pub fn counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.stacks.len()];
        for sample in &self.samples {
            counts[sample.stack] += 1;
        }
        counts
    }

    /// A stack as people read it, leaf first.
    #[must_use]
    pub fn shown(&self, stack: usize) -> String {
        let lines = self.stacks[stack].iter().map(|&frame| {
            let ShownFrame { function, filename, place, .. } = &self.frames[frame];
            format!("  {function:.60} ({filename:.120}) {place:?}\n")
        });
        lines.collect()
    }
}
