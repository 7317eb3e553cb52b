//! The profiler's walk over compiled rows, judged by a library that reads `.eh_frame` directly: at random moments the
//! kernel copies registers and stack of a busy thread, and both unwind the copy.

use framehop::x86_64::{CacheX86_64, UnwindRegsX86_64, UnwinderX86_64};
use framehop::{Error, ExplicitModuleSectionInfo, Module, Unwinder as _};
use object::{Object as _, ObjectSection as _, ObjectSegment as _};
use perf_event::data::Record;
use perf_event::events::Software;
use perf_event::{Builder, SampleFlag, Sampler};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use tachyon::remote::RemoteProcess;
use tachyon::remote::elf::ReadAt as _;
use tachyon::types::{Pid, RemoteAddr};
use tachyon::unwind::UnwindTables;
use tachyon_common::stop::StopReason;
use tachyon_common::unwind::{NativeWalk, Rule, Space, StackBuffer, kind, saved};
use tachyon_common::walk::{Unreadable, UserMemory};
use tachyon_tests::unwind::{Addresses, PlainTables};
use tachyon_tests::{Interpreter, Target, on_each_interpreter};

on_each_interpreter!(on [pyenv_3_13 debian_3_11] long [pyenv_3_8 sid_3_15]: another_unwinder_finds_the_same_frames);

/// Moments compared for each interpreter.
const MOMENTS: usize = 1_200;

/// Bytes of stack that are copied: the kernel subtracts what the rest of the record needs, whose length has 16 bits.
const STACK_BYTES: u32 = 65_528;

/// `PERF_REG_X86_*` from `AX` to `IP`, and `R8` to `R15`.
const REGISTERS: u64 = 0xff_01ff;

/// Where DWARF's registers are among those: rax, rdx, rcx, rbx, rsi, rdi, rbp, rsp, r8 to r15.
const DWARF_ORDER: [usize; 16] = [0, 3, 2, 1, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16];

/// Where the instruction pointer is.
const IP: usize = 8;

/// A thread at one moment.
struct Moment {
    ip: u64,
    /// As DWARF numbers them.
    registers: [u64; 16],
    /// From the stack pointer on.
    stack: Vec<u8>,
}

impl Moment {
    fn sp(&self) -> u64 {
        self.registers[7]
    }

    fn fp(&self) -> u64 {
        self.registers[6]
    }

    /// Whether a rule of the interrupted instruction takes `rbp` from below the stack pointer.
    fn saved_below(&self, rule: Rule) -> bool {
        let base = match rule.kind() {
            kind::SP => self.sp(),
            kind::FP => self.fp(),
            _ => return false,
        };
        let on_the_stack = (1..=saved::MAX).contains(&rule.saved());
        let cfa = base.wrapping_add_signed(rule.words() * 8);
        on_the_stack && cfa.wrapping_sub(u64::from(rule.saved()) * 8) < self.sp()
    }
}

impl UserMemory for Moment {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let at = usize::try_from(addr.wrapping_sub(self.sp())).map_err(|_| Unreadable)?;
        let end = at.checked_add(into.len()).ok_or(Unreadable)?;
        into.copy_from_slice(self.stack.get(at..end).ok_or(Unreadable)?);
        Ok(())
    }
}

/// Copies of a thread, taken by the kernel each millisecond of its time on a CPU.
fn moments(pid: u32) -> Vec<Moment> {
    let mut builder = Builder::new(Software::CPU_CLOCK);
    builder.observe_pid(i32::try_from(pid).expect("pids are positive")).any_cpu().exclude_kernel(false);
    builder.sample(SampleFlag::REGS_USER | SampleFlag::STACK_USER);
    builder.sample_regs_user(REGISTERS).sample_stack_user(STACK_BYTES).sample_period(1_003_001);
    let counter = builder.build().expect("the event opens");
    let mut ring: Sampler = counter.sampled(8 << 20).expect("the ring is mapped");
    ring.as_counter_mut().enable().expect("the event can be enabled");
    let mut taken = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(60);
    while taken.len() < MOMENTS {
        assert!(Instant::now() < deadline, "only {} moments", taken.len());
        std::thread::sleep(Duration::from_millis(20));
        while let Some(record) = ring.next_record() {
            let Ok(Record::Sample(sample)) = record.parse_record() else { continue };
            let (Some(registers), Some(stack)) = (sample.regs_user(), sample.stack_user()) else { continue };
            // A thread about to end has none.
            if registers.regs.len() != 17 {
                continue;
            }
            taken.push(Moment {
                ip: registers.regs[IP],
                registers: DWARF_ORDER.map(|at| registers.regs[at]),
                stack: stack.to_vec(),
            });
        }
    }
    taken
}

/// The library, with `.eh_frame` of every file that the process has mapped, and of the vdso.
fn library(process: &RemoteProcess) -> UnwinderX86_64<Vec<u8>> {
    let mut unwinder = UnwinderX86_64::new();
    for mapping in process.maps().expect("the target runs").iter().filter(|mapping| mapping.executable) {
        let mut bytes = Vec::new();
        if mapping.file_path().is_some() {
            let file = process.mapped_file(mapping).expect("it is there");
            bytes.resize(file.identity().size as usize, 0);
            file.open().expect("it can be opened").read_exact_at(0, &mut bytes).expect("it can be read");
        } else if mapping.path == tachyon::remote::MappedPath::Special(b"[vdso]".to_vec()) {
            bytes.resize((mapping.end - mapping.start) as usize, 0);
            process.read_memory(RemoteAddr(mapping.start), &mut bytes).expect("it is mapped");
        } else {
            continue;
        }
        let file = object::File::parse(&*bytes).expect("code lies in ELF files");
        let holds = |segment: &object::Segment<'_, '_>| {
            let (offset, size) = segment.file_range();
            (offset & !0xfff..offset + size).contains(&mapping.offset)
        };
        let segment = file.segments().filter(holds).last().expect("a mapping is of a segment");
        let bias = mapping.start - mapping.offset + segment.file_range().0 - segment.address();
        let section = |name| {
            let section = file.section_by_name(name)?;
            let start = section.address();
            Some((start..start + section.size(), section.data().ok()?.to_vec()))
        };
        let (eh_frame, eh_frame_hdr) = (section(".eh_frame"), section(".eh_frame_hdr"));
        let info = ExplicitModuleSectionInfo {
            eh_frame_svma: eh_frame.as_ref().map(|(range, _)| range.clone()),
            eh_frame: eh_frame.map(|(_, data)| data),
            eh_frame_hdr_svma: eh_frame_hdr.as_ref().map(|(range, _)| range.clone()),
            eh_frame_hdr: eh_frame_hdr.map(|(_, data)| data),
            text_svma: section(".text").map(|(range, _)| range),
            got_svma: section(".got").map(|(range, _)| range),
            ..ExplicitModuleSectionInfo::default()
        };
        unwinder.add_module(Module::new(format!("{:?}", mapping.path), mapping.start..mapping.end, bias, info));
    }
    unwinder
}

/// The library's walk of a moment: addresses as the profiler stores them, and how it ended.
fn by_library(
    unwinder: &UnwinderX86_64<Vec<u8>>,
    cache: &mut CacheX86_64,
    moment: &Moment,
) -> (Vec<u64>, Result<(), Error>) {
    let mut read = |address| {
        let mut word = [0; 8];
        moment.read(address, &mut word).map(|()| u64::from_ne_bytes(word)).map_err(|Unreadable| ())
    };
    let registers = UnwindRegsX86_64::new(moment.ip, moment.sp(), moment.fp());
    let mut frames = unwinder.iter_frames(moment.ip, registers, cache, &mut read);
    let mut found = Vec::new();
    loop {
        match frames.next() {
            Ok(Some(frame)) => found.push(frame.address_for_lookup()),
            Ok(None) => return (found, Ok(())),
            Err(error) => return (found, Err(error)),
        }
    }
}

/// The profiler's walk of it.
fn by_us(tables: &PlainTables, space: Space, moment: &Moment) -> (Vec<u64>, StopReason) {
    let mut walk = NativeWalk::start(moment.ip, moment.sp(), moment.fp());
    walk.leaf = moment.registers;
    walk.leaf_known = 1;
    let (mut addresses, mut stack) = (Addresses::default(), StackBuffer::default());
    let stop = (0..=16).find_map(|_| walk.step(moment, tables, space, &mut stack, &mut addresses));
    (addresses.0, stop.expect("16 steps are 512 frames"))
}

/// How two walks of one moment compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    /// Complete, and every frame the same.
    Same,
    /// The same as far as the copy, or the profiler's limit of frames, lets both see.
    SameUntilCut,
    /// A register is about to be taken from below the stack pointer, or has just been taken from there: a `pop` whose rule
    /// still says where it was, and libffi's `ffi_call_unix64`, which releases its frame before it reads `rbp` from it.
    /// The kernel side can read that, but it is not copied.
    BelowTheCopy,
    /// A frame's place is read from memory, or is in a register that the library does not use: it cannot step from
    /// there, and guesses.
    TooHardForTheLibrary,
    /// No rule covers the code: the profiler says so, the library guesses.
    NoRule,
    /// Nothing explains it.
    Different,
}

impl Outcome {
    /// `rules` are those of the profiler's frames.
    fn of(
        moment: &Moment,
        (ours, stop): (&[u64], StopReason),
        (theirs, end): (&[u64], Result<(), Error>),
        rules: &[Rule],
    ) -> Self {
        let common = ours.iter().zip(theirs).take_while(|(our, their)| our == their).count();
        let begins_the_same = common == ours.len().min(theirs.len());
        let too_hard =
            |rule: &Rule| matches!(rule.kind(), kind::REGISTER | kind::DEREF_SP | kind::DEREF_FP | kind::SIGNAL);
        match (stop, end) {
            (StopReason::Complete, Ok(())) if ours == theirs => Self::Same,
            (StopReason::UnreadableStack | StopReason::TooDeep, Err(Error::CouldNotReadStack(_)))
                if begins_the_same =>
            {
                Self::SameUntilCut
            }
            (StopReason::TooDeep, Ok(())) if begins_the_same => Self::SameUntilCut,
            (StopReason::UnreadableStack, _) if ours.len() == 1 && moment.saved_below(rules[0]) => Self::BelowTheCopy,
            (StopReason::NoUnwindRule | StopReason::NoFramePointer, _) if begins_the_same => Self::NoRule,
            _ if rules[..common].iter().any(too_hard) => Self::TooHardForTheLibrary,
            _ => Self::Different,
        }
    }
}

fn another_unwinder_finds_the_same_frames(python: &Interpreter) {
    let target = Target::start(python, "callbacks.py");
    let process = RemoteProcess::open(Pid(target.pid())).expect("the target runs");
    let mut tables = PlainTables::default();
    let mut all = UnwindTables::new(1 << 20, 1 << 12);
    let maps = process.maps().expect("the target runs");
    let space = all.map(&process, &maps, 0, &mut tables).expect("its files have tables");
    let (unwinder, mut cache) = (library(&process), CacheX86_64::new());
    let moments = moments(target.pid());
    let (mut outcomes, mut frames, mut leaves) = (BTreeMap::<Outcome, usize>::new(), 0, BTreeSet::new());
    for moment in &moments {
        let (ours, stop) = by_us(&tables, space, moment);
        let (theirs, end) = by_library(&unwinder, &mut cache, moment);
        let rules: Vec<_> =
            if ours == theirs { Vec::new() } else { ours.iter().map(|&address| tables.rule(space, address)).collect() };
        let outcome = Outcome::of(moment, (&ours, stop), (&theirs, end), &rules);
        assert_ne!(outcome, Outcome::Different, "{stop:?} {ours:x?}\nlibrary: {end:?} {theirs:x?}\n{rules:x?}");
        *outcomes.entry(outcome).or_default() += 1;
        frames += ours.len();
        leaves.insert(moment.ip);
    }
    let total = moments.len();
    println!("{}: {total} moments at {} instructions, {frames} frames: {outcomes:?}", python.name, leaves.len());
    let share = |outcome| outcomes.get(&outcome).copied().unwrap_or(0) as f64 / total as f64;
    assert!(outcomes.get(&Outcome::Same) >= Some(&1_000), "{outcomes:?}");
    assert!(share(Outcome::BelowTheCopy) < 0.04, "{outcomes:?}");
    assert!(share(Outcome::TooHardForTheLibrary) < 0.04, "{outcomes:?}");
    assert!(share(Outcome::NoRule) < 0.01, "{outcomes:?}");
    assert!(leaves.len() > 300, "these are not random moments: {}", leaves.len());
}
