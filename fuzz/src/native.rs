//! Native stacks: `.eh_frame` to tables, the walk over hostile tables and stacks, and the joining of two stacks.

use std::cell::Cell;

use tachyon::merge::{Boundaries, Joined, Keep, Native, NativeKind, Python, PythonFrame, Quality, join};
use tachyon::remote::elf::Elf;
use tachyon::unwind;
use tachyon_common::config::machine;
use tachyon_common::limits::{MAX_NATIVE_FRAMES, NATIVE_FRAMES_PER_STEP};
use tachyon_common::stop::StopReason;
use tachyon_common::unwind::{AddressSink, NativeWalk, Range, Row, Slices, Space, StackBuffer, no_table, pages};
use tachyon_common::walk::{Unreadable, UserMemory, mix};

use crate::input::Rng;
use crate::targets::{here, seed_files};

/// Whole ELF files with unwind rules, of a few pages each, for both architectures.
pub(crate) fn elf_files() -> Vec<Vec<u8>> {
    seed_files("so")
}

pub(crate) fn compile_rules(bytes: &[u8], rng: &mut Rng) -> bool {
    let Ok(elf) = Elf::parse(bytes) else { return false };
    let Ok(table) = unwind::compile_vdso(&elf) else { return false };
    assert!(table.rows.len() <= 2 * unwind::MAX_ROWS);
    assert!(table.rows.is_sorted_by_key(|row| row.pc()), "a search needs them sorted");
    let _rule = table.rule(table.base.wrapping_add(rng.odd() & 0xffff));
    true
}

/// Tables as bytes, 8 per row: those of the files above.
pub(crate) fn tables() -> Vec<Vec<u8>> {
    let tables = elf_files().into_iter().filter_map(|bytes| unwind::compile_vdso(&Elf::parse(&bytes[..]).ok()?).ok());
    let bytes = |table: unwind::Table| table.rows.iter().flat_map(|row| row.0.to_le_bytes()).collect();
    tables.map(bytes).collect()
}

const CODE: u64 = 0x7f00_0000_0000;
const STACK: u64 = 0x7ffc_0000_0000;

/// A process whose stack contains lies.
struct Liar {
    seed: u64,
    reads: Cell<u32>,
}

impl UserMemory for Liar {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        self.reads.set(self.reads.get() + 1);
        if mix(self.seed, addr).is_multiple_of(16) {
            return Err(Unreadable);
        }
        for (at, bytes) in (0..).step_by(8).zip(into.chunks_mut(8)) {
            let word = self.word(addr.wrapping_add(at)).to_ne_bytes();
            bytes.copy_from_slice(&word[..bytes.len()]);
        }
        Ok(())
    }
}

impl Liar {
    fn word(&self, addr: u64) -> u64 {
        let dice = mix(self.seed, addr);
        match dice % 16 {
            1 => 0,
            2 => dice,
            // Places in the stack, usually further up; and in code, maybe signed.
            3..=7 => addr.wrapping_add((dice >> 8) & 0xfff8),
            8 => addr.wrapping_sub((dice >> 8) & 0xfff8),
            _ => (CODE + ((dice >> 8) & 0x1fff)) | if dice & (1 << 40) == 0 { 0 } else { 0x5a << 48 },
        }
    }
}

#[derive(Default)]
struct Addresses(usize);

impl AddressSink for Addresses {
    fn store(&mut self, index: usize, _: u64) {
        assert!(index == self.0 && index < MAX_NATIVE_FRAMES, "addresses are stored in their order, in bounds");
        self.0 += 1;
    }
}

/// The kernel side's walk over tables and a stack with arbitrary contents: it ends, within its bounds.
pub(crate) fn walk_hostile(bytes: &[u8], rng: &mut Rng) -> bool {
    let mut rows: Vec<Row> = bytes.as_chunks().0.iter().map(|row| Row(u64::from_le_bytes(*row))).collect();
    if rng.below(4) != 0 {
        rows.sort_by_key(|row| row.pc());
    }
    rows.truncate(usize::from(u16::MAX));
    let count = rows.len() as u16;
    // A correct index, or what the bytes say.
    let pages = if rng.below(4) == 0 { rng.odd() as u16 } else { 0x20 };
    if rng.below(4) != 0 {
        rows.extend(pages::index(&rows).take(0x20).collect::<Vec<_>>());
    }
    let mut ranges = vec![
        Range { start: CODE, end: CODE + 0x2000, bias: CODE, first_row: 0, rows: count, pages },
        Range { start: CODE + 0x2000, end: CODE + 0x3000, first_row: no_table::FRAME_POINTERS, ..Range::default() },
    ];
    if rng.below(8) == 0 {
        let odd = |rng: &mut Rng| rng.odd();
        let (start, end, bias) = (odd(rng), odd(rng), odd(rng));
        let (first_row, rows, pages) = (odd(rng) as u32, odd(rng) as u16, odd(rng) as u16);
        let lie = Range { start, end, bias, first_row, rows, pages };
        ranges.insert(rng.below(3), lie);
    }
    let machine = *rng.of(&[machine::X86_64, machine::ARM64]);
    let count = if rng.below(16) == 0 { rng.odd() as u32 } else { ranges.len() as u32 };
    let space = Space { count, ..Space::default() };
    let liar = Liar { seed: rng.next(), reads: Cell::new(0) };
    let tables = Slices { ranges: &ranges, rows: &rows, machine };
    let mut stack = StackBuffer::default();
    let ip = CODE + rng.below(0x3000) as u64;
    let fp = if rng.below(2) == 0 { STACK + 0x100 } else { rng.odd() };
    let mut walk = NativeWalk::start(ip, STACK, fp);
    walk.link = CODE + rng.below(0x3000) as u64;
    walk.leaf_known = rng.below(2) as u32;
    let mut addresses = Addresses::default();
    let most = MAX_NATIVE_FRAMES / NATIVE_FRAMES_PER_STEP + 1;
    let stop = (0..most).find_map(|_| walk.step(&liar, &tables, space, &mut stack, &mut addresses));
    assert!(stop.is_some(), "a walk ends within its steps");
    assert!(liar.reads.get() as usize <= 6 * MAX_NATIVE_FRAMES, "{} reads", liar.reads.get());
    addresses.0 > 1
}

/// What live recordings had: `tests/kernel/known_stack.py` on CPython 3.8 to 3.13, with `--interpreter-frames`. A line has how
/// activations are told apart, the native stack and Python's, leaf first, in the letters of `merge/mixed/tests.rs`.
pub(crate) fn stacks() -> Vec<Vec<u8>> {
    let text = std::fs::read(here().join("seeds/mixed.txt")).expect("a file of the project is readable");
    let lines: Vec<Vec<u8>> =
        text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).map(Into::into).collect();
    for line in &lines {
        let stacks = Stacks::of(line);
        assert_eq!(
            stacks.join(true, StopReason::Complete, None).0,
            Quality::Exact,
            "{}",
            String::from_utf8_lossy(line)
        );
    }
    lines
}

/// Both stacks of a line, whatever it contains.
struct Stacks {
    boundaries: Boundaries,
    native: Vec<NativeKind>,
    python: Vec<PythonFrame>,
    root_shims: u16,
}

impl Stacks {
    fn of(line: &[u8]) -> Self {
        let mut words = line.splitn(3, |&byte| byte == b' ');
        let boundaries = match words.next().unwrap_or_default() {
            b"every" => Boundaries::EveryFrame,
            b"entry" => Boundaries::EntryFrame,
            _ => Boundaries::Shim,
        };
        let kind = |letter: &u8| match letter {
            b'E' => NativeKind::Evaluator { entering: false },
            b'e' => NativeKind::Evaluator { entering: true },
            b'h' => NativeKind::Handler,
            b'p' => NativeKind::Plumbing,
            b'i' => NativeKind::Interpreter,
            _ => NativeKind::Other,
        };
        let native = words.next().unwrap_or_default().iter().map(kind).collect();
        let (mut python, mut shims) = (Vec::new(), 0_u16);
        for letter in words.next().unwrap_or_default() {
            match letter {
                b'S' => shims = shims.saturating_add(1),
                // A count that none of our programs has had.
                0x80.. => shims = u16::MAX,
                _ => {
                    python.push(PythonFrame { entry: *letter == b'F', shims });
                    shims = 0;
                }
            }
        }
        Self { boundaries, native, python, root_shims: shims }
    }

    fn join(&self, whole: bool, stop: StopReason, entered: Option<usize>) -> (Quality, Vec<Joined>) {
        let native = Native { frames: &self.native, whole, foreign: false, switching: None, entered };
        let python = Python { frames: &self.python, root_shims: self.root_shims, stop, boundaries: self.boundaries };
        let mut joined = Vec::new();
        (join(&native, &python, Keep { interpreter: true, roots: true }, &mut joined), joined)
    }
}

/// Two stacks of one thread that may be unrelated: every Python frame comes out once and in its place, and so does every
/// native one, unless they were found to contradict each other, or the native stack was cut.
pub(crate) fn join_stacks(bytes: &[u8], rng: &mut Rng) -> bool {
    let stacks = Stacks::of(bytes);
    let stops = [StopReason::Complete, StopReason::NoFrame, StopReason::TooDeep, StopReason::EnteringEval];
    let stop = if rng.below(2) == 0 { StopReason::Complete } else { *rng.of(&stops) };
    let whole = rng.below(4) != 0;
    let entered = (rng.below(2) == 0).then(|| rng.below(stacks.native.len() + 1));
    let (quality, joined) = stacks.join(whole, stop, entered);
    let of_python: Vec<usize> =
        joined.iter().filter_map(|frame| if let Joined::Python(at) = frame { Some(*at) } else { None }).collect();
    let of_native: Vec<usize> =
        joined.iter().filter_map(|frame| if let Joined::Native(at) = frame { Some(*at) } else { None }).collect();
    assert!(of_python.into_iter().eq(0..stacks.python.len()), "Python frames are lost, doubled or out of order");
    if quality != Quality::Failed {
        // If the stack was cut, what follows the outermost Python frame may be left out: it may belong to an inner call.
        let kept = of_native.len();
        assert!(of_native.into_iter().eq(0..kept), "native frames are lost, doubled or out of order");
        assert!(kept == stacks.native.len() || !whole, "native frames of a whole stack are lost");
    }
    quality == Quality::Exact
}
