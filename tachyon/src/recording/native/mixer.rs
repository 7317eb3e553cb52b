//! Turns native addresses of samples into frames of the profile.
//!
//! What an address is decides where its frame stands among the Python frames, and whether it is shown: symbol tables say that. Lines
//! and inlined functions are looked up only for frames that are shown, which are few: the evaluator and its callers are not.

use super::spaces::{AddressSpace, Code, Spaces};
use super::switch::{GREENLET, Greenlet, Switch};
use crate::events::Frames;
use crate::merge::{Keep, NativeFrames, NativeKind};
use crate::profile::{FrameId, NativeMapping, NativePlace, ProcessId, Profile, name_of_address};
use crate::remote::FileIdentity;
use crate::symbolize::native::{Detail, NativeName, NativeSymbols, Pinned, made_name};
use crate::types::Pid;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tachyon_common::event::SampleRecord;
use tachyon_common::stop::StopReason;

/// Most addresses whose frames are remembered; beyond that, all are looked up anew.
const MAX_KNOWN: usize = 1 << 20;
/// The same for functions that processes generated.
const MAX_MADE: usize = 1 << 16;

/// Name of a function that no table names, and of memory without a name.
const UNKNOWN: &str = "<unknown>";
const ANONYMOUS: &str = "[anonymous]";
/// Stands before the name of a function that the process generated, where others have their file.
const MADE: &str = "[jit]";

/// Turns addresses into frames.
pub(in crate::recording) struct Mixer {
    spaces: Arc<Spaces>,
    symbols: Arc<NativeSymbols>,
    /// Which native frames are wanted even though they say nothing about the Python code.
    pub keep: Keep,
    /// By file number and offset in the file.
    known: HashMap<(u64, u64), Known, RandomState>,
    /// Frames of those addresses that were shown.
    frames: Vec<FrameId>,
    /// Frames of code without a file, by the name of what is mapped.
    nameless: HashMap<Arc<str>, FrameId>,
    /// Frames of functions that processes generated, by address, with their names: another function may be there later.
    made: HashMap<u64, (Box<[u8]>, FrameId), RandomState>,
    /// Where the present sample's stack has code that is in no file and that no process has named, and where code of a file called
    /// it.
    pub unnamed: Option<(u64, Option<u64>)>,
    /// Whether the present sample's stack has code that switches between greenlets, and how far that is.
    pub switch: Switch,
    /// Whether it has code in assembly language whose unwind rules are in no `.eh_frame`.
    pub assembly: bool,
    /// The version of it that [`Mixer::known`] reflects.
    assembly_version: u64,
    /// What each native frame of the present sample is.
    pub kinds: Vec<NativeKind>,
    /// And where each gets its name.
    places: Vec<Place>,
    space: Arc<AddressSpace>,
    process: (ProcessId, Pid),
}

/// What names a native frame.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// It already has a frame.
    Named(FrameId),
    /// An address in a file, with its key in [`Mixer::known`].
    InFile { key: (u64, u64), address: u64 },
}

/// What is known of one address.
#[derive(Clone, Debug)]
struct Known {
    kind: NativeKind,
    /// Indices into [`Mixer::frames`], once it has been shown.
    frames: Option<Range<usize>>,
    /// Only for greenlet's library.
    greenlet: Option<Greenlet>,
    /// The file that it is in.
    file: Option<FileIdentity>,
    /// Where the function begins, by offset in the file, if it is in assembly language and has no unwind rules in `.eh_frame`.
    assembly: Option<u64>,
    /// It has no name because this process has cost enough; the time until which nobody asks for it again.
    refused: Option<(ProcessId, Instant)>,
}

impl Known {
    fn holds(&self, process: ProcessId) -> bool {
        self.refused.is_none_or(|(refused, until)| refused == process && Instant::now() < until)
    }
}

/// A name that a process was refused is asked for again after this.
const REFUSED_FOR: Duration = Duration::from_secs(1);

impl Mixer {
    /// Knows nothing yet.
    pub fn new(spaces: Arc<Spaces>, symbols: Arc<NativeSymbols>, keep: Keep) -> Self {
        Self {
            spaces,
            symbols,
            keep,
            known: HashMap::default(),
            frames: Vec::new(),
            nameless: HashMap::new(),
            made: HashMap::default(),
            unnamed: None,
            assembly: false,
            assembly_version: 0,
            switch: Switch::default(),
            kinds: Vec::new(),
            places: Vec::new(),
            space: Arc::default(),
            process: (ProcessId(0), Pid(0)),
        }
    }

    /// The address spaces that it knows.
    pub fn spaces(&self) -> Arc<Spaces> {
        Arc::clone(&self.spaces)
    }

    /// Finds out what the native frames of a sample are; `process` is its process in the profile.
    pub fn take(&mut self, profile: &mut Profile, process: ProcessId, record: &SampleRecord, frames: Frames<'_>) {
        self.kinds.clear();
        self.places.clear();
        (self.switch, self.unnamed, self.assembly) = (Switch::default(), None, false);
        let addresses = frames.native();
        if addresses.len() == 0 {
            return;
        }
        let space = self.spaces.get(record.image, record.instance).unwrap_or_default();
        self.take_assembly();
        if self.known.len() >= MAX_KNOWN {
            self.known.clear();
            self.frames.clear();
        }
        if self.made.len() >= MAX_MADE {
            self.made.clear();
        }
        (self.space, self.process) = (Arc::clone(&space), (process, Pid(record.tgid)));
        // A thread state that switches to a greenlet which has not called Python yet is given no frame.
        let no_frame = record.stop == StopReason::NoFrame as u8;
        for address in addresses {
            let root = self.switch.rooted;
            let kind = match space.at(address) {
                Some(code) if code.is_made() => self.made(profile, &space, address),
                Some(code) => self.in_code(profile, code, address, no_frame),
                None => self.nameless(profile, ANONYMOUS, NativeKind::Other),
            };
            self.kinds.push(kind);
            if root {
                self.switch.ends(&self.kinds, no_frame);
                break;
            }
        }
    }

    /// Updates addresses that were looked up before their code was found to be in assembly language: where stacks ended
    /// at first.
    fn take_assembly(&mut self) {
        let version = self.spaces.assembly.version();
        if version == std::mem::replace(&mut self.assembly_version, version) {
            return;
        }
        let parts = self.spaces.assembly.parts();
        for ((_, offset), known) in &mut self.known {
            let start = known.file.and_then(|file| parts.start(file, *offset));
            if start != std::mem::replace(&mut known.assembly, start) {
                // It may have a name now.
                known.frames = None;
            }
        }
    }

    /// A new profile begins, with no frames yet: what is known about files' symbols is kept, for other recordings as well.
    pub fn begin_profile(&mut self) {
        self.symbols.keep();
        self.known.clear();
        self.frames.clear();
        self.nameless.clear();
        self.made.clear();
    }

    /// Forgets an image whose last process has ended.
    pub fn forget(&self, image: u64) {
        self.spaces.forget_image(image);
    }

    fn in_code(&mut self, profile: &mut Profile, code: &Code, address: u64, no_frame: bool) -> NativeKind {
        let Some(file) = &code.file else {
            if code.object.starts_with(GREENLET) {
                self.switch.meet(Greenlet::Nameless, &self.kinds, no_frame);
            }
            let object = if code.object.is_empty() { ANONYMOUS } else { &code.object };
            let plumbing = code.interpreter.is_some() || code.trampolines;
            let kind = if plumbing { NativeKind::Plumbing } else { NativeKind::Other };
            return self.nameless(profile, object, kind);
        };
        let key = (file.number(), address - code.start + code.offset);
        self.places.push(Place::InFile { key, address });
        if let Some((_, caller)) = &mut self.unnamed {
            caller.get_or_insert(address);
        }
        let known = match self.known.get(&key).filter(|known| known.holds(self.process.0)) {
            Some(known) => known.clone(),
            None => {
                let known = self.look_up(code, file, key.1);
                self.known.insert(key, known.clone());
                known
            }
        };
        self.assembly |= known.assembly.is_some();
        if let Some(greenlet) = known.greenlet {
            self.switch.meet(greenlet, &self.kinds, no_frame);
        }
        known.kind
    }

    /// What lies at an offset of a file, without its frames yet.
    fn look_up(&self, code: &Code, file: &Pinned, offset: u64) -> Known {
        let (process, pid) = self.process;
        let by_name = code.interpreter.as_ref().is_some_and(|interpreter| interpreter.kind_at(offset).is_none());
        let in_greenlet = code.object.starts_with(GREENLET);
        let asks = by_name || in_greenlet;
        // All other code needs no name until it is shown.
        let name = if asks { self.function(file, offset, pid) } else { NativeName::default() };
        let greenlet = in_greenlet.then(|| Greenlet::of(name.function.as_deref()));
        let refused = name.refused.then(|| (process, Instant::now() + REFUSED_FOR));
        let file = file.identity();
        let assembly = file.and_then(|file| self.spaces.assembly.parts().start(file, offset));
        Known { kind: kind(code, offset, &name), frames: None, greenlet, file, assembly, refused }
    }

    /// A function's name; DWARF may know one where no symbol does.
    fn function(&self, file: &Pinned, offset: u64, pid: Pid) -> NativeName {
        let name = self.symbols.name(file, offset, Detail::Function, Some(pid));
        match name.function {
            None if !name.refused => self.symbols.name(file, offset, Detail::Lines, Some(pid)),
            _ => name,
        }
    }

    /// Makes the frames of an address in a file.
    fn show(&mut self, profile: &mut Profile, key: (u64, u64), address: u64) -> Range<usize> {
        let start = self.frames.len();
        let (space, (process, pid)) = (Arc::clone(&self.space), self.process);
        let Some((code, file)) = space.at(address).and_then(|code| Some((code, code.file.as_ref()?))) else {
            return start..start;
        };
        let name = self.symbols.name(file, key.1, Detail::Lines, Some(pid));
        let mapping = NativeMapping {
            process: process.0,
            start: code.start,
            end: code.end,
            offset: code.offset,
            path: code.path.to_string(),
            build_id: file.build_id().to_owned(),
        };
        let mapping = Some(profile.native_mapping(mapping));
        let assembly = self.known.get(&key).and_then(|known| name.vaddr.checked_sub(key.1 - known.assembly?));
        let functions = name.lines.len().max(1);
        for at in 0..functions {
            // The last one is the function that contains the code, which a symbol table may know better than DWARF.
            let (line, inlined) = (name.lines.get(at), at + 1 < functions);
            let function = if inlined { line.and_then(|line| line.function.as_deref()) } else { name.shown() };
            let by_address = || name.function_vaddr.or(assembly).filter(|_| !inlined).map(name_of_address);
            let function = function.map(str::to_owned).or_else(by_address);
            let shown = format!("{}!{}", code.object, function.as_deref().unwrap_or(UNKNOWN));
            let place = NativePlace { mapping, address, vaddr: name.vaddr, inlined };
            let (file, line) = (line.and_then(|line| line.file.as_deref()), line.and_then(|line| line.line));
            self.frames.push(profile.native_frame(&shown, file, line, place));
        }
        let frames = start..self.frames.len();
        if let Some(known) = self.known.get_mut(&key) {
            known.frames = Some(frames.clone());
            if name.refused {
                known.refused = Some((process, Instant::now() + REFUSED_FOR));
            }
        }
        frames
    }

    /// A frame of code that the process generated, by its name if the process announced one.
    fn made(&mut self, profile: &mut Profile, space: &AddressSpace, address: u64) -> NativeKind {
        let Some(name) = space.made(address) else {
            self.unnamed.get_or_insert((address, None));
            return self.nameless(profile, ANONYMOUS, NativeKind::Other);
        };
        let frame = match self.made.get(&address).filter(|(known, _)| **known == *name) {
            Some(&(_, frame)) => frame,
            None => {
                let place = NativePlace { mapping: None, address, vaddr: address, inlined: false };
                let frame = profile.native_frame(&format!("{MADE}!{}", made_name(name)), None, None, place);
                self.made.insert(address, (name.into(), frame));
                frame
            }
        };
        self.places.push(Place::Named(frame));
        NativeKind::Other
    }

    /// A frame of code without a file: its addresses mean nothing once the process is gone.
    fn nameless(&mut self, profile: &mut Profile, object: &str, kind: NativeKind) -> NativeKind {
        let frame = match self.nameless.get(object) {
            Some(&frame) => frame,
            None => {
                let frame = profile.special_frame(&format!("{object}!{UNKNOWN}"));
                self.nameless.insert(object.into(), frame);
                frame
            }
        };
        self.places.push(Place::Named(frame));
        kind
    }
}

impl NativeFrames for Mixer {
    fn frames(&mut self, profile: &mut Profile, index: usize) -> &[FrameId] {
        if let Some(&Place::InFile { key, address }) = self.places.get(index) {
            let shown = self.known.get(&key).and_then(|known| known.frames.clone());
            let frames = shown.unwrap_or_else(|| self.show(profile, key, address));
            return &self.frames[frames];
        }
        match self.places.get(index) {
            Some(Place::Named(frame)) => std::slice::from_ref(frame),
            _ => &[],
        }
    }
}

fn kind(code: &Code, offset: u64, name: &NativeName) -> NativeKind {
    match &code.interpreter {
        None => NativeKind::Other,
        Some(interpreter) => {
            interpreter.kind_at(offset).unwrap_or_else(|| NativeKind::of_interpreter(name.function.as_deref()))
        }
    }
}
