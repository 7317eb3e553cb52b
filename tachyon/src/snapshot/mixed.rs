//! Python and native frames of a thread in one stack, in call order.

use std::collections::HashMap;
use std::sync::Arc;

use super::memory::Pages;
use super::stack::Stack;
use super::unwind::{NativeAddress, NativeStack, Unwinder};
use crate::inspect::{Evaluator, EvaluatorCode, Interpreter};
use crate::merge::{Boundaries, Joined, Keep, Native, NativeKind, Python, PythonFrame, Quality, join};
use crate::profile::FrameId;
use crate::remote::elf::Load;
use crate::remote::{Blocked, Mapping, RemoteProcess, TargetFile};
use crate::symbolize::native::{Detail, NativeName, NativeSymbols, Pinned};
use tachyon_common::event::frame;
use tachyon_common::layout::Layout;

/// Which native frames are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NativeChoice {
    /// Also show the interpreter's own frames between Python frames.
    pub interpreter_frames: bool,
    /// Also show those below the outermost Python frame.
    pub roots: bool,
}

/// A mixed stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MixedStack {
    /// Leaf first.
    pub frames: Vec<MixedFrame>,
    /// How far the order can be believed.
    pub quality: Quality,
    /// The native stack reaches the thread's first function.
    pub whole: bool,
}

/// A frame of a mixed stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MixedFrame {
    /// A Python frame.
    Python(FrameId),
    /// A native one.
    Native(NativeName),
}

/// Why a thread has no mixed stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoNative {
    /// It is on a CPU: its registers cannot be read without stopping it.
    #[error("it runs")]
    Running,
    /// It went on while its stack was being read.
    #[error("it went on while it was read")]
    WentOn,
    /// `/proc/PID/task/TID/syscall` cannot be read, or it is not known which thread it is.
    #[error("its registers cannot be read")]
    Unknown,
    /// The evaluator's code was not found in the interpreter's file.
    #[error("the evaluator was not found in the interpreter's file")]
    NoEvaluator,
}

/// Reads native stacks of one process and joins them with Python's.
pub(super) struct NativeStacks<'a> {
    process: &'a RemoteProcess,
    maps: &'a [Mapping],
    unwinder: Unwinder<'a>,
    symbols: Arc<NativeSymbols>,
    pinned: HashMap<u64, Option<Pinned>>,
    evaluator: Option<(Evaluator, Vec<Mapping>)>,
    boundaries: Boundaries,
    choice: NativeChoice,
    loads: Vec<Load>,
}

impl<'a> NativeStacks<'a> {
    pub(super) fn new(
        process: &'a RemoteProcess,
        maps: &'a [Mapping],
        interpreter: &Interpreter,
        layout: &Layout,
        choice: NativeChoice,
        symbols: Arc<NativeSymbols>,
    ) -> Self {
        let own = |mapping: &&Mapping| mapping.executable && mapping.file_path() == Some(&*interpreter.path);
        let code: Vec<Mapping> = maps.iter().filter(own).cloned().collect();
        let file = code.iter().find_map(|mapping| {
            let file = process.mapped_file(mapping).ok()?;
            (file.identity() == interpreter.file).then(|| file.open().ok()).flatten()
        });
        let loads = |file: &TargetFile| crate::remote::elf::Elf::parse(file).map(|elf| elf.loads().to_vec());
        let loads = file.as_ref().and_then(|file| loads(file).ok()).unwrap_or_default();
        let evaluator = file.and_then(|file| Evaluator::of_file(file).ok()).map(|evaluator| (evaluator, code));
        Self {
            process,
            maps,
            unwinder: Unwinder::new(process, maps),
            symbols,
            pinned: HashMap::new(),
            evaluator,
            boundaries: Boundaries::of(layout),
            choice,
            loads,
        }
    }

    /// The native stack of a thread. `python` is called between two looks at the thread: if they agree, the thread slept all
    /// the time, and what `python` read belongs to the native stack.
    pub(super) fn read<T>(
        &mut self,
        tid: Option<u32>,
        python: impl FnOnce() -> T,
    ) -> (T, Result<NativeStack, NoNative>) {
        let before = self.asleep(tid);
        let read = python();
        let native = before.and_then(|(pc, sp)| {
            let stack = self.unwinder.unwind(&Pages::new(self.process), pc, sp);
            match self.asleep(tid) {
                Ok(after) if after == (pc, sp) => Ok(stack),
                _ => Err(NoNative::WentOn),
            }
        });
        (read, native)
    }

    fn asleep(&self, tid: Option<u32>) -> Result<(u64, u64), NoNative> {
        match tid.and_then(|tid| self.process.blocked(tid)) {
            Some(Blocked::At { pc, sp }) => Ok((pc, sp)),
            Some(Blocked::Running) => Err(NoNative::Running),
            None => Err(NoNative::Unknown),
        }
    }

    /// Joins a thread's two stacks. `named` are the Python frames, as many as `python` has; a `None` is not shown.
    pub(super) fn mix(
        &mut self,
        native: &NativeStack,
        python: Option<&Stack>,
        named: &[Option<FrameId>],
    ) -> Result<MixedStack, NoNative> {
        if self.evaluator.is_none() && python.is_some() {
            return Err(NoNative::NoEvaluator);
        }
        let kinds: Vec<NativeKind> = native.frames.iter().map(|frame| self.kind(*frame)).collect();
        let frames = python.map_or(&[][..], |python| &python.frames);
        let frames: Vec<PythonFrame> =
            frames.iter().map(|raw| PythonFrame { entry: raw.flags & frame::ENTRY != 0, shims: raw.shims }).collect();
        let python = Python {
            frames: &frames,
            root_shims: python.map_or(0, |python| python.root_shims),
            stop: python.map_or(tachyon_common::stop::StopReason::NoFrame, |python| python.stop),
            boundaries: self.boundaries,
        };
        let mut joined = Vec::new();
        // A thread that sleeps is not in the evaluator's first or last instructions.
        let native_frames =
            Native { frames: &kinds, whole: native.whole, foreign: true, switching: None, entered: None };
        let keep = Keep { interpreter: self.choice.interpreter_frames, roots: self.choice.roots };
        let quality = join(&native_frames, &python, keep, &mut joined);
        let frame = |frame: Joined| match frame {
            Joined::Python(index) => named.get(index).copied().flatten().map(MixedFrame::Python),
            Joined::Native(index) => Some(MixedFrame::Native(self.name(*native.frames.get(index)?))),
            Joined::Collector => None,
        };
        let frames = joined.into_iter().filter_map(frame).collect();
        Ok(MixedStack { frames, quality, whole: native.whole })
    }

    fn kind(&mut self, frame: NativeAddress) -> NativeKind {
        let lookup = frame.lookup();
        let Some((evaluator, code)) = &self.evaluator else { return NativeKind::Other };
        let Some(mapping) = code.iter().find(|mapping| mapping.contains(lookup)) else { return NativeKind::Other };
        let offset = lookup - mapping.start + mapping.offset;
        let Some(vaddr) = Load::code_vaddr(&self.loads, offset) else { return NativeKind::Other };
        match evaluator.code_at(vaddr) {
            Some(EvaluatorCode::Evaluator) => NativeKind::Evaluator { entering: evaluator.is_prologue(vaddr) },
            Some(EvaluatorCode::Handler) => NativeKind::Handler,
            None => {
                let mapping = mapping.clone();
                let name = self.pin(&mapping).map(|file| self.symbols.name(&file, offset, Detail::Function, None));
                NativeKind::of_interpreter(name.and_then(|name| name.function).as_deref())
            }
        }
    }

    fn name(&mut self, frame: NativeAddress) -> NativeName {
        let lookup = frame.lookup();
        let at = self.maps.partition_point(|mapping| mapping.end <= lookup);
        let Some(mapping) = self.maps.get(at).filter(|mapping| mapping.contains(lookup)) else {
            return NativeName { vaddr: lookup, ..NativeName::default() };
        };
        match self.pin(mapping) {
            Some(file) => self.symbols.name(&file, lookup - mapping.start + mapping.offset, Detail::Lines, None),
            None => NativeName { object: mapping.name(), vaddr: lookup, ..NativeName::default() },
        }
    }

    fn pin(&mut self, mapping: &Mapping) -> Option<Pinned> {
        let (symbols, process) = (&self.symbols, self.process);
        self.pinned.entry(mapping.start).or_insert_with(|| symbols.pin(process, mapping)).clone()
    }
}
