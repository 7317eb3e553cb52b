//! Native addresses of samples to frames of the profile.

use super::spaces::{AddressSpace, Code, Spaces};
use crate::events::Frames;
use crate::merge::{Keep, NativeKind};
use crate::profile::{FrameId, NativeMapping, NativePlace, ProcessId, Profile, name_of_address};
use crate::symbolize::native::{Detail, NativeName, NativeSymbols, made_name};
use crate::types::Pid;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tachyon_common::event::SampleRecord;

/// Most addresses whose frames are remembered; then all are looked up anew.
const MAX_KNOWN: usize = 1 << 20;
/// The same for those of functions that processes made.
const MAX_MADE: usize = 1 << 16;

/// Name of a function that no table names, and of memory without a name.
const UNKNOWN: &str = "<unknown>";
/// Beginning of the name of greenlet's library, `_greenlet.cpython-….so`.
const GREENLET: &str = "_greenlet.";
/// The function of that library that starts a greenlet (`TGreenlet.cpp`, `TUserGreenlet.cpp`, before 2.0 `greenlet.c`). Its caller,
/// `g_switch`, is a greenlet's first: what lies below on the stack belongs to whoever ran there, and is exchanged beneath it.
const GREENLET_START: &str = "g_initialstub";
const ANONYMOUS: &str = "[anonymous]";
/// What stands before the name of a function that the process made, where others have their file.
const MADE: &str = "[jit]";

/// Turns addresses into frames.
pub(in crate::recording) struct Mixer {
    spaces: Arc<Spaces>,
    symbols: Arc<NativeSymbols>,
    /// Which native frames are wanted that say nothing about the Python code.
    pub keep: Keep,
    /// By number of the file and offset in it.
    known: HashMap<(u64, u64), Known>,
    /// Frames of all of those.
    frames: Vec<FrameId>,
    /// Frames of code without a file, by the name of what is mapped.
    nameless: HashMap<Arc<str>, FrameId>,
    /// Frames of functions that processes made, by address: with their names, which others may have there another time.
    made: HashMap<u64, (Box<[u8]>, FrameId)>,
    /// Where the present sample's stack has code of no file that no process has named.
    pub unnamed: Option<u64>,
    /// Whether the present sample's stack has code that switches between stacks.
    pub foreign: bool,
    /// Whether its innermost activation has called such code.
    pub switching: bool,
    /// Whether its stack has been followed to the first function of a greenlet, where it ends.
    pub rooted: bool,
    /// Of the present sample: what each native frame is, and where its frames end.
    pub kinds: Vec<NativeKind>,
    pub ends: Vec<u32>,
    pub ids: Vec<FrameId>,
}

/// What is known of one address.
#[derive(Clone, Debug)]
struct Known {
    kind: NativeKind,
    /// Indices into [`Mixer::frames`].
    frames: Range<usize>,
    /// It is [`GREENLET_START`].
    starts_greenlet: bool,
    /// It has no name because this process has cost enough; until when nobody asks again for it.
    refused: Option<(ProcessId, Instant)>,
}

impl Known {
    fn holds(&self, process: ProcessId) -> bool {
        self.refused.is_none_or(|(refused, until)| refused == process && Instant::now() < until)
    }
}

/// What was refused a process is asked for again after this.
const REFUSED_FOR: Duration = Duration::from_secs(1);

impl Mixer {
    /// Knows nothing yet.
    pub fn new(spaces: Arc<Spaces>, symbols: Arc<NativeSymbols>, keep: Keep) -> Self {
        Self {
            spaces,
            symbols,
            keep,
            known: HashMap::new(),
            frames: Vec::new(),
            nameless: HashMap::new(),
            made: HashMap::new(),
            unnamed: None,
            foreign: false,
            switching: false,
            rooted: false,
            kinds: Vec::new(),
            ends: Vec::new(),
            ids: Vec::new(),
        }
    }

    /// Names the native frames of a sample, whose process is this one of the profile's.
    pub fn take(&mut self, profile: &mut Profile, process: ProcessId, record: &SampleRecord, frames: Frames<'_>) {
        self.kinds.clear();
        self.ends.clear();
        self.ids.clear();
        (self.foreign, self.switching, self.rooted, self.unnamed) = (false, false, false, None);
        let addresses = frames.native();
        if addresses.len() == 0 {
            return;
        }
        let space = self.spaces.get(record.image, record.instance).unwrap_or_default();
        if self.known.len() >= MAX_KNOWN {
            self.known.clear();
            self.frames.clear();
        }
        if self.made.len() >= MAX_MADE {
            self.made.clear();
        }
        for address in addresses {
            let root = self.rooted;
            let kind = match space.at(address) {
                Some(code) if code.is_made() => self.made(profile, &space, address),
                Some(code) => self.in_code(profile, (process, record.tgid), code, address),
                None => self.nameless(profile, ANONYMOUS, NativeKind::Other),
            };
            self.kinds.push(kind);
            self.ends.push(u32::try_from(self.ids.len()).unwrap_or(u32::MAX));
            if root {
                // All of it is this greenlet's. Its first evaluator, while it is entered, runs nothing yet: what Python frames
                // there are then are those of whoever started it.
                let mut evaluators = self.kinds.iter().filter_map(|kind| match kind {
                    NativeKind::Evaluator { entering } => Some(*entering),
                    _ => None,
                });
                self.switching |= evaluators.next() == Some(true) && evaluators.next().is_none();
                self.foreign = false;
                break;
            }
        }
    }

    /// A profile begins that has no frames yet: files keep what is known of their symbols.
    pub fn begin_profile(&mut self) {
        self.known.clear();
        self.frames.clear();
        self.nameless.clear();
        self.made.clear();
    }

    /// Forgets an image whose last process has ended.
    pub fn forget(&self, image: u64) {
        self.spaces.forget_image(image);
    }

    fn in_code(
        &mut self,
        profile: &mut Profile,
        (process, pid): (ProcessId, u32),
        code: &Code,
        address: u64,
    ) -> NativeKind {
        if code.object.starts_with(GREENLET) {
            let activation = |kind: &NativeKind| matches!(kind, NativeKind::Evaluator { .. } | NativeKind::Handler);
            (self.foreign, self.switching) = (true, self.switching || !self.kinds.iter().any(activation));
        }
        let Some(file) = &code.file else {
            let object = if code.object.is_empty() { ANONYMOUS } else { &code.object };
            let plumbing = code.interpreter.is_some() || code.trampolines;
            let kind = if plumbing { NativeKind::Plumbing } else { NativeKind::Other };
            return self.nameless(profile, object, kind);
        };
        let key = (file.number(), address - code.start + code.offset);
        if let Some(known) = self.known.get(&key).filter(|known| known.holds(process)) {
            self.ids.extend_from_slice(&self.frames[known.frames.clone()]);
            // A greenlet that has not called Python yet: whose Python stack it is nobody can tell.
            self.rooted |= known.starts_greenlet && !self.switching;
            return known.kind;
        }
        let name = self.symbols.name(file, key.1, Detail::Lines, Some(Pid(pid)));
        let mapping = NativeMapping {
            process: process.0,
            start: code.start,
            end: code.end,
            offset: code.offset,
            path: code.path.to_string(),
            build_id: file.build_id().to_owned(),
        };
        let mapping = Some(profile.native_mapping(mapping));
        let start = self.frames.len();
        let functions = name.lines.len().max(1);
        for at in 0..functions {
            // The last one is the function that the code is of, which a symbol table may know better than DWARF.
            let (line, inlined) = (name.lines.get(at), at + 1 < functions);
            let function =
                if inlined { line.and_then(|line| line.function.as_deref()) } else { name.function.as_deref() };
            let by_address = || name.function_vaddr.filter(|_| !inlined).map(name_of_address);
            let function = function.map(str::to_owned).or_else(by_address);
            let shown = format!("{}!{}", code.object, function.as_deref().unwrap_or(UNKNOWN));
            let place = NativePlace { mapping, address, vaddr: name.vaddr, inlined };
            let (file, line) = (line.and_then(|line| line.file.as_deref()), line.and_then(|line| line.line));
            self.frames.push(profile.native_frame(&shown, file, line, place));
        }
        let starts_greenlet = code.object.starts_with(GREENLET)
            && name.function.as_deref().is_some_and(|function| function.contains(GREENLET_START));
        self.rooted |= starts_greenlet && !self.switching;
        let refused = name.refused.then(|| (process, Instant::now() + REFUSED_FOR));
        let frames = start..self.frames.len();
        let known = Known { kind: kind(code, key.1, &name), frames, starts_greenlet, refused };
        self.ids.extend_from_slice(&self.frames[known.frames.clone()]);
        let kind = known.kind;
        self.known.insert(key, known);
        kind
    }

    /// A frame of code that the process made, by its name if it has told one.
    fn made(&mut self, profile: &mut Profile, space: &AddressSpace, address: u64) -> NativeKind {
        let Some(name) = space.made(address) else {
            self.unnamed.get_or_insert(address);
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
        self.ids.push(frame);
        NativeKind::Other
    }

    /// A frame of code that has no file: its addresses mean nothing once the process is gone.
    fn nameless(&mut self, profile: &mut Profile, object: &str, kind: NativeKind) -> NativeKind {
        let frame = match self.nameless.get(object) {
            Some(&frame) => frame,
            None => {
                let frame = profile.special_frame(&format!("{object}!{UNKNOWN}"));
                self.nameless.insert(object.into(), frame);
                frame
            }
        };
        self.ids.push(frame);
        kind
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
