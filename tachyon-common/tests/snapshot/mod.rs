//! Snapshots of real processes: the memory that a walk reads of them, and the stacks that they told themselves.
//!
//! `cargo xtask snapshots` records them (`tachyon/examples/snapshot.rs`, which takes this file too), and the test walks
//! them. A file is text up to an empty line, then bytes: each range of memory is its address, its length and its content.
//! Nothing is in it that no walk has read, so a walk that reads more needs new ones.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use tachyon_common::event::{RawFrame, frame as frame_flags};
use tachyon_common::layout::{Layout, flags};
use tachyon_common::limits::{MAX_PY_FRAMES, MAX_THREAD_STEPS};
use tachyon_common::process::ProcessEntry;
use tachyon_common::stop::StopReason;
use tachyon_common::unwind::StackBuffer;
use tachyon_common::walk::{
    CodeBuffer, CodeIdentity, Found, FrameBuffer, FrameSink, FrameWalk, InterpBuffer, Link, OwnStack, SlotBuffer,
    StackScan, ThreadBuffer, ThreadFacts, ThreadPointer, ThreadSearch, Unreadable, UserMemory, believable_stop,
    entered_here, innermost_frame, read_slots, read_thread, read_u32, read_u64, runs_here, thread_facts, verify_thread,
};

/// The first line of a file.
const TITLE: &str = "tachyon-bpf snapshot 1";

/// A process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Captured {
    /// Its version, for people.
    pub version: String,
    /// Where things are.
    pub layout: Layout,
    /// What the kernel side would know of it.
    pub entry: ProcessEntry,
    /// Its threads.
    pub threads: Vec<Thread>,
    /// What a walk of each reads.
    pub memory: Memory,
}

/// A thread of it, as a sample finds it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Thread {
    /// `fsbase`.
    pub pointer: u64,
    /// Its stack pointer.
    pub sp: u64,
    /// Its other registers, as far as a search for frame objects asks for them.
    pub registers: [u64; 16],
    /// It is the main thread, the only one that runs.
    pub main: bool,
    /// What it told of its stack, leaf first.
    pub frames: Vec<Told>,
}

/// A frame as CPython itself tells of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// `co_qualname`, before 3.11 `co_name`.
    pub name: String,
    /// `co_filename`.
    pub file: String,
    /// `f_lineno`.
    pub line: u32,
    /// `co_firstlineno`.
    pub firstlineno: i32,
    /// `f_lasti`.
    pub lasti: i32,
    /// Byte offsets of the instructions that are this line's.
    pub spans: Vec<(i32, i32)>,
}

/// Ranges of memory by their address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory(pub BTreeMap<u64, Vec<u8>>);

impl UserMemory for Memory {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let (start, range) = self.0.range(..=addr).next_back().ok_or(Unreadable)?;
        let from = usize::try_from(addr - start).map_err(|_| Unreadable)?;
        let to = from.checked_add(into.len()).ok_or(Unreadable)?;
        into.copy_from_slice(range.get(from..to).ok_or(Unreadable)?);
        Ok(())
    }
}

/// Reads through to a process, and keeps what was read.
pub struct Recording<'a, M: ?Sized> {
    memory: &'a M,
    bytes: RefCell<BTreeMap<u64, u8>>,
}

#[allow(dead_code, reason = "the test does not record")]
impl<'a, M: UserMemory + ?Sized> Recording<'a, M> {
    /// Nothing is read yet.
    pub fn new(memory: &'a M) -> Self {
        Self { memory, bytes: RefCell::default() }
    }

    /// What was read.
    pub fn finish(self) -> Memory {
        let mut ranges: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        for (addr, byte) in self.bytes.into_inner() {
            match ranges.last_entry() {
                Some(mut last) if last.key() + last.get().len() as u64 == addr => last.get_mut().push(byte),
                _ => drop(ranges.insert(addr, vec![byte])),
            }
        }
        Memory(ranges)
    }
}

impl<M: UserMemory + ?Sized> UserMemory for Recording<'_, M> {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        self.memory.read(addr, into)?;
        self.bytes.borrow_mut().extend((addr..).zip(into.iter().copied()));
        Ok(())
    }
}

/// How a walk ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Walked {
    /// Why.
    pub stop: StopReason,
    /// The thread state; 0: none was found.
    pub tstate: u64,
    /// What else the thread does.
    pub facts: ThreadFacts,
    /// Leaf first, each with what it runs.
    pub frames: Vec<(RawFrame, CodeIdentity)>,
}

#[derive(Default)]
struct Sink(Vec<(RawFrame, CodeIdentity)>);

impl FrameSink for Sink {
    fn store(&mut self, index: usize, frame: RawFrame, identity: &CodeIdentity) {
        assert!(index == self.0.len() && index < MAX_PY_FRAMES, "frame {index} after {}", self.0.len());
        self.0.push((frame, *identity));
    }

    fn mark_entry(&mut self, index: usize) {
        self.0[index].0.flags |= frame_flags::ENTRY;
    }
}

/// What a sample does that finds a thread with this pointer and these registers: `tachyon-ebpf/src/sample.rs`, `search.rs` and
/// `frames.rs`, without a cache.
pub fn walk<M: UserMemory>(
    memory: &M,
    (layout, entry): (&Layout, &ProcessEntry),
    pointer: ThreadPointer,
    sp: u64,
    registers: &[u64; 16],
) -> Walked {
    let stack = OwnStack::of(pointer, sp);
    let mut walked =
        Walked { stop: StopReason::Complete, tstate: 0, facts: ThreadFacts::default(), frames: Vec::new() };
    let (tstate, thread) = match search(memory, (layout, entry), pointer, stack, registers) {
        Ok(found) => found,
        Err(stop) => return Walked { stop, ..walked },
    };
    walked.tstate = tstate;
    walked.facts = thread_facts(memory, layout, (entry, pointer), tstate, &thread, &mut InterpBuffer::default());
    let mut walk = match innermost_frame(memory, layout, &thread) {
        Ok(frame) => FrameWalk::start(frame),
        Err(stop) => return Walked { stop, ..walked },
    };
    walk.gc_frame = walked.facts.gc_frame;
    walk.enter(layout, &thread);
    let mut sink = Sink::default();
    let (mut frame_buffer, mut code_buffer) = (FrameBuffer::default(), CodeBuffer::default());
    // Shims take no slot.
    let looks = 0..2 * MAX_PY_FRAMES;
    let stop =
        looks.map(|_| walk.frame(memory, layout, entry.code_type, 7, &mut frame_buffer, &mut code_buffer, &mut sink));
    walked.stop = stop.flatten().next().unwrap_or(StopReason::TailCallFailed);
    if !entered_here(layout, stack, walk.entry_frame) {
        return Walked { stop: StopReason::UnknownThread, ..walked };
    }
    let (leaf, root) = (sink.0.first().map(|(frame, _)| frame), sink.0.last().map(|(frame, _)| frame));
    let linked = leaf.is_some_and(|leaf| is_linked(memory, layout, &mut walk, leaf, &mut frame_buffer));
    let settled = believable_stop(layout, walked.stop, sink.0.len(), leaf, root, linked);
    if settled == walked.stop {
        walked.frames = sink.0;
    }
    Walked { stop: settled, ..walked }
}

/// The thread's state, copied.
fn search<M: UserMemory>(
    memory: &M,
    (layout, entry): (&Layout, &ProcessEntry),
    pointer: ThreadPointer,
    stack: OwnStack,
    registers: &[u64; 16],
) -> Result<(u64, ThreadBuffer), StopReason> {
    let mut slots = SlotBuffer::default();
    if !Layout::present(layout.tstate_cframe) && layout.status_bound_gilstate != 0 {
        read_slots(memory, layout, pointer, &mut slots);
    }
    let mut search = ThreadSearch::start(memory, layout, entry, pointer, stack, false)?;
    let mut piece = StackBuffer::default();
    let mut steps = 0;
    let tstate = loop {
        match search.step(memory, layout, &slots) {
            Found::State { tstate, .. } => break tstate,
            Found::Stop(stop) => return Err(stop),
            Found::Scan => {
                for _ in 0..StackScan::PIECES {
                    search.scan.go_on(memory, stack, registers, &mut piece);
                }
            }
            Found::More => {}
        }
        steps += 1;
        if steps >= MAX_THREAD_STEPS {
            return Err(StopReason::ThreadListTooLong);
        }
    };
    let mut thread = ThreadBuffer::default();
    read_thread(memory, layout, tstate, &mut thread).map_err(|_| StopReason::UnreadableThread)?;
    // What the next sample of this thread asks, which has remembered the state: these threads run what they made.
    if !verify_thread(layout, pointer, &thread) || !runs_here(layout, tstate, stack, &thread) {
        return Err(StopReason::UnknownThread);
    }
    Ok((tstate, thread))
}

/// A string of the process.
pub fn text<M: UserMemory>(memory: &M, layout: &Layout, object: u64) -> Result<String, Unreadable> {
    let len = read_u64(memory, object, layout.unicode_length)?;
    let state = read_u32(memory, object, layout.unicode_state)?;
    let kind = (state >> layout.unicode_kind_shift & 7) as usize;
    assert!(
        len < 4096 && matches!(kind, 1 | 2 | 4) && state & layout.unicode_compact_bit != 0,
        "no string: {state:#x}"
    );
    let ascii = state & layout.unicode_ascii_bit != 0;
    let start = if ascii { layout.unicode_ascii_size } else { layout.unicode_compact_size };
    let mut bytes = vec![0; len as usize * kind];
    memory.read(object + u64::from(start), &mut bytes)?;
    let character = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
    Ok(bytes.chunks(kind).map(|bytes| char::from_u32(character(bytes)).unwrap_or('\u{fffd}')).collect())
}

/// Compares a walk with what the thread told.
///
/// # Errors
/// What differs first.
pub fn compare<M: UserMemory>(memory: &M, layout: &Layout, thread: &Thread, walked: &Walked) -> Result<(), String> {
    if walked.stop != StopReason::Complete || walked.frames.len() != thread.frames.len() {
        return Err(format!("{:?} with {} of {} frames", walked.stop, walked.frames.len(), thread.frames.len()));
    }
    for (index, ((raw, identity), told)) in walked.frames.iter().zip(&thread.frames).enumerate() {
        let shown = |object| text(memory, layout, object).map_err(|_| format!("frame {index}: a name is unreadable"));
        let (name, file) = (shown(identity.qualname)?, shown(identity.filename)?);
        if (&name, &file, identity.firstlineno, identity.lacks) != (&told.name, &told.file, told.firstlineno, 0) {
            return Err(format!("frame {index}: {name} ({file}:{}), told was {told:?}", identity.firstlineno));
        }
        // The innermost frame has gone on since it told, on the same line.
        let same = index == 0 || raw.lasti == told.lasti;
        if !same || !told.spans.iter().any(|(start, end)| (*start..*end).contains(&raw.lasti)) {
            return Err(format!("frame {index}: at {}, told was {told:?}", raw.lasti));
        }
        let generates = raw.flags & frame_flags::GENERATOR != 0;
        let is_generator = matches!(&*told.name, "Shape.generator" | "inner" | "outer");
        if !layout.has(flags::FRAME_OBJECTS) && generates != is_generator {
            return Err(format!("frame {index}: {name} has the flags {:#x}", raw.flags));
        }
    }
    Ok(())
}

/// All fields of [`Layout`] that are not computed from others, written and read by name: files outlive additions.
macro_rules! layout_fields {
    ($($name:ident)*) => {
        fn write_layout(layout: &Layout, text: &mut String) {
            $(let _ = writeln!(text, "layout.{} {:#x}", stringify!($name), layout.$name);)*
            for (number, place) in layout.unlinked.iter().enumerate() {
                let _ = writeln!(text, "layout.unlinked.{number} {place:#x}");
            }
        }

        /// A field that the file does not know makes it useless: nobody can tell what its value would be.
        fn read_layout(field: impl Fn(&str) -> u64) -> Layout {
            Layout {
                $($name: u32::try_from(field(concat!("layout.", stringify!($name)))).expect("32 bits"),)*
                tstate_read: 0,
                frame_read: 0,
                code_read: 0,
                interp_read: 0,
                interp_at: 0,
                unlinked: std::array::from_fn(|number| {
                    u32::try_from(field(&format!("layout.unlinked.{number}"))).expect("32 bits")
                }),
            }
            .complete()
        }
    };
}

layout_fields! {
    version_hex flags runtime_interpreters_head runtime_next_interp_id runtime_main_thread runtime_tstate_current
    runtime_gil runtime_gc_collecting interp_next interp_threads_head interp_id interp_ceval_gil interp_threads_main
    interp_gc_collecting interp_gc_frame interp_code_generation gil_locked gil_last_holder tstate_next tstate_interp
    tstate_thread_id tstate_native_thread_id tstate_frame tstate_cframe tstate_status status_bound_gilstate
    status_active status_holds_gil tstate_holds_gil tstate_gil_requested tstate_current_exception tstate_exc_state
    exc_value tstate_base_frame tstate_current_executor cframe_current_frame frame_previous frame_code frame_instr frame_owner frame_is_entry
    frame_tlbc_index ob_type ob_size code_filename code_qualname code_linetable code_firstlineno code_version
    code_code_adaptive code_tlbc bytes_sval unicode_state unicode_length unicode_ascii_size unicode_compact_size
    unicode_kind_shift unicode_compact_bit unicode_ascii_bit owner_shim_min owner_generator stackref_tag_mask
    instr_unit frame_stacktop frame_return_offset frame_localsplus code_nlocalsplus code_stacksize generator_state_before
}

impl Captured {
    /// The file.
    #[allow(dead_code, reason = "the test does not record")]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut text = format!("{TITLE}\nversion {}\n", self.version);
        write_layout(&self.layout, &mut text);
        for (name, word) in
            [("runtime", self.entry.runtime), ("code_type", self.entry.code_type), ("none", self.entry.none)]
        {
            let _ = writeln!(text, "entry.{name} {word:#x}");
        }
        for thread in &self.threads {
            let _ = write!(text, "thread {} {:#x} {:#x}", u32::from(thread.main), thread.pointer, thread.sp);
            let _ = thread.registers.iter().try_for_each(|register| write!(text, " {register:#x}"));
            text.push('\n');
            for Told { name, file, line, firstlineno, lasti, spans } in &thread.frames {
                let spans: Vec<String> = spans.iter().map(|(start, end)| format!("{start}-{end}")).collect();
                let _ = writeln!(text, "frame {line} {firstlineno} {lasti} {} {file}\t{name}", spans.join(","));
            }
        }
        text.push('\n');
        let mut bytes = text.into_bytes();
        for (addr, range) in &self.memory.0 {
            bytes.extend(addr.to_le_bytes());
            bytes.extend((range.len() as u32).to_le_bytes());
            bytes.extend(range);
        }
        bytes
    }

    /// What is in a file.
    ///
    /// # Panics
    /// When it is no snapshot, or one that must be recorded again.
    pub fn parse(bytes: &[u8]) -> Self {
        let end = bytes.windows(2).position(|pair| pair == b"\n\n").expect("an empty line ends the text");
        let text = core::str::from_utf8(&bytes[..end]).expect("UTF-8");
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some(TITLE));
        let mut snapshot = Self::default();
        let mut fields = BTreeMap::new();
        for line in lines {
            let (word, rest) = line.split_once(' ').expect("a word and more");
            match word {
                "version" => snapshot.version = rest.to_owned(),
                "thread" => snapshot.threads.push(thread(rest)),
                "frame" => snapshot.threads.last_mut().expect("of a thread").frames.push(told(rest)),
                _ => drop(fields.insert(word, number(rest))),
            }
        }
        let field = |name: &str| {
            *fields.get(name).unwrap_or_else(|| panic!("no {name}\nhint: record it again with `cargo xtask snapshots`"))
        };
        snapshot.layout = read_layout(field);
        snapshot.entry = ProcessEntry {
            runtime: field("entry.runtime"),
            code_type: field("entry.code_type"),
            none: field("entry.none"),
            ..ProcessEntry::default()
        };
        let mut rest = &bytes[end + 2..];
        while let Some((addr, behind)) = rest.split_first_chunk() {
            let (len, behind) = behind.split_first_chunk().expect("a length");
            let (range, behind) = behind.split_at(u32::from_le_bytes(*len) as usize);
            snapshot.memory.0.insert(u64::from_le_bytes(*addr), range.to_vec());
            rest = behind;
        }
        snapshot
    }
}

fn number(text: &str) -> u64 {
    u64::from_str_radix(text.strip_prefix("0x").expect("hexadecimal"), 16).expect("a number")
}

fn thread(text: &str) -> Thread {
    let (main, rest) = text.split_once(' ').expect("more words");
    let mut words = rest.split(' ').map(number);
    let mut next = || words.next().expect("a word");
    let (pointer, sp) = (next(), next());
    Thread { pointer, sp, registers: core::array::from_fn(|_| next()), main: main == "1", frames: Vec::new() }
}

fn told(text: &str) -> Told {
    let (numbers, name) = text.split_once('\t').expect("a name");
    let words: Vec<&str> = numbers.splitn(5, ' ').collect();
    let [line, firstlineno, lasti, spans, file] = words[..] else { panic!("{text}: not five words") };
    let small = |text: &str| text.parse().expect("a number");
    let span = |span: &str| span.split_once('-').map(|(start, end)| (small(start), small(end))).expect("two numbers");
    Told {
        name: name.to_owned(),
        file: file.to_owned(),
        line: line.parse().expect("a line"),
        firstlineno: small(firstlineno),
        lasti: small(lasti),
        spans: spans.split(',').map(span).collect(),
    }
}

/// Whether the leaf is proven to be linked, as `tachyon-ebpf`'s `frames.rs` asks.
fn is_linked<M: UserMemory>(
    memory: &M,
    layout: &Layout,
    walk: &mut FrameWalk,
    leaf: &RawFrame,
    buffer: &mut FrameBuffer,
) -> bool {
    let mut link = walk.leaf_is_linked(layout, leaf, None);
    let mut looks = 0;
    while looks < FrameWalk::CALLERS && link == Link::More {
        link = walk.look_at_callers(memory, layout, buffer);
        looks += 1;
    }
    link == Link::Linked
}
