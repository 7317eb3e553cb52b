//! The native stack of a sleeping thread, from `.eh_frame`, over its memory.
//!
//! Of a thread that is not stopped only two registers are known: the instruction pointer and the stack pointer. The others
//! become known once an inner function has saved them on the stack; where finding a function's frame needs a register that
//! is not known, the stack is cut, never guessed. (That is why this is not a library's unwinder: those want all registers.)

use std::collections::HashMap;

use gimli::{
    BaseAddresses, CfaRule, EhFrame, EhFrameHdr, Encoding, Evaluation, EvaluationResult, Format, FrameDescriptionEntry,
    LittleEndian, Register, RegisterRule, UnwindContext, UnwindExpression, UnwindSection as _, UnwindTableRow, Value,
};
use tachyon_common::walk::{UserMemory, read_u64};

use crate::remote::elf::{Elf, Load};
use crate::remote::{FileIdentity, MappedFile, Mapping, RemoteProcess, TargetFile};

/// Most native frames of a stack.
const MAX_FRAMES: usize = 4096;

/// Most bytes of one file's unwind tables, and of all files'. libtorch has 30 MB of them.
const MAX_TABLE: u64 = 64 << 20;
const MAX_TABLES: u64 = 160 << 20;

/// Most steps of one expression: those of the C library's PLT have ten.
const MAX_STEPS: u32 = 256;

/// DWARF numbers of the stack pointer and the return address, and of those that a function leaves as it found them
/// (System V ABI, x86-64: figure 3.36; AArch64 DWARF ABI: 4.1).
#[cfg(target_arch = "x86_64")]
mod registers {
    pub(super) const STACK: u16 = 7;
    pub(super) const RETURN: u16 = 16;
    pub(super) const KEPT: &[u16] = &[3, 6, 12, 13, 14, 15];
    pub(super) const COUNT: usize = 17;
    pub(super) const VENDOR: gimli::Vendor = gimli::Vendor::Default;
    pub(super) const CODE_MASK: u64 = u64::MAX;
}
#[cfg(not(target_arch = "x86_64"))]
mod registers {
    pub(super) const STACK: u16 = 31;
    pub(super) const RETURN: u16 = 30;
    pub(super) const KEPT: &[u16] = &[19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29];
    pub(super) const COUNT: usize = 35;
    pub(super) const VENDOR: gimli::Vendor = gimli::Vendor::AArch64;
    /// The bits above user-space addresses may hold a return address's signature.
    pub(super) const CODE_MASK: u64 = (1 << 48) - 1;
}

type Slice<'a> = gimli::EndianSlice<'a, LittleEndian>;
type Row = UnwindTableRow<usize>;

/// A native stack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NativeStack {
    /// Where the thread will go on, then the address after each call; leaf first.
    pub(super) frames: Vec<NativeAddress>,
    /// It reaches the thread's first function.
    pub(super) whole: bool,
}

/// One frame's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NativeAddress {
    pub(super) address: u64,
    /// It is the address after a call: the call itself is before it.
    pub(super) after_call: bool,
}

impl NativeAddress {
    /// An address inside the instruction in question.
    pub(super) fn lookup(self) -> u64 {
        self.address.wrapping_sub(u64::from(self.after_call))
    }
}

/// One file's unwind tables.
struct Tables {
    frames: Vec<u8>,
    header: Vec<u8>,
    frames_vaddr: u64,
    header_vaddr: u64,
    loads: Vec<Load>,
}

/// Unwinds the threads of one process.
pub(super) struct Unwinder<'a> {
    process: &'a RemoteProcess,
    maps: &'a [Mapping],
    files: HashMap<(u64, u64), Option<FileIdentity>>,
    tables: HashMap<FileIdentity, Option<Tables>>,
    left: u64,
}

/// What is known about the registers.
#[derive(Clone, Copy, Debug)]
struct Registers([Option<u64>; registers::COUNT]);

impl Registers {
    fn get(&self, register: Register) -> Option<u64> {
        self.0.get(usize::from(register.0)).copied().flatten()
    }

    fn set(&mut self, register: u16, value: Option<u64>) {
        if let Some(place) = self.0.get_mut(usize::from(register)) {
            *place = value;
        }
    }
}

/// Where one step led.
enum Step {
    Caller { address: u64, after_call: bool },
    Root,
}

impl<'a> Unwinder<'a> {
    /// An unwinder that has read nothing yet. `maps` are sorted, as the kernel lists them.
    pub(super) fn new(process: &'a RemoteProcess, maps: &'a [Mapping]) -> Self {
        Self { process, maps, files: HashMap::new(), tables: HashMap::new(), left: MAX_TABLES }
    }

    /// The stack of a thread that goes on at `pc` with the stack pointer `sp`.
    pub(super) fn unwind<M: UserMemory + ?Sized>(&mut self, memory: &M, pc: u64, sp: u64) -> NativeStack {
        let mut registers = Registers([None; registers::COUNT]);
        registers.set(registers::STACK, Some(sp));
        let mut here = NativeAddress { address: pc, after_call: false };
        let mut stack = NativeStack::default();
        let mut context = UnwindContext::new();
        while stack.frames.len() < MAX_FRAMES {
            stack.frames.push(here);
            match self.step(memory, here, &mut registers, &mut context) {
                Some(Step::Caller { address, after_call }) => here = NativeAddress { address, after_call },
                Some(Step::Root) => {
                    stack.whole = true;
                    break;
                }
                None => break,
            }
        }
        stack
    }

    fn step<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        here: NativeAddress,
        registers: &mut Registers,
        context: &mut UnwindContext<usize>,
    ) -> Option<Step> {
        let lookup = here.lookup();
        let at = self.maps.partition_point(|mapping| mapping.end <= lookup);
        let mapping = self.maps.get(at).filter(|mapping| mapping.contains(lookup) && mapping.executable)?;
        let tables = self.tables(mapping)?;
        let vaddr = Load::code_vaddr(&tables.loads, lookup - mapping.start + mapping.offset)?;
        tables.step(memory, vaddr, registers, context)
    }

    /// The tables of the file behind a mapping.
    fn tables(&mut self, mapping: &Mapping) -> Option<&Tables> {
        let key = (mapping.start, mapping.end);
        let known = self.files.get(&key).copied();
        let identity = match known {
            Some(identity) => identity?,
            None => {
                let file = self.process.mapped_file(mapping).ok();
                let identity = file.as_ref().map(MappedFile::identity);
                self.files.insert(key, identity);
                let (file, identity) = (file?, identity?);
                if !self.tables.contains_key(&identity) {
                    let tables = file.open().ok().and_then(|file| Tables::read(&file, self.left));
                    self.left -= tables.as_ref().map_or(0, |tables| (tables.frames.len() + tables.header.len()) as u64);
                    self.tables.insert(identity, tables);
                }
                identity
            }
        };
        self.tables.get(&identity)?.as_ref()
    }
}

impl Tables {
    fn read(file: &TargetFile, left: u64) -> Option<Self> {
        let elf = Elf::parse(file).ok()?;
        let frames = elf.section(".eh_frame")?;
        let header = elf.section(".eh_frame_hdr")?;
        let most = MAX_TABLE.min(left / 2);
        Some(Self {
            frames: elf.section_bytes(frames, most).ok()?,
            header: elf.section_bytes(header, most).ok()?,
            frames_vaddr: frames.vaddr,
            header_vaddr: header.vaddr,
            loads: elf.loads().to_vec(),
        })
    }

    /// Goes one frame outwards.
    fn step<M: UserMemory + ?Sized>(
        &self,
        memory: &M,
        vaddr: u64,
        registers: &mut Registers,
        context: &mut UnwindContext<usize>,
    ) -> Option<Step> {
        let mut frames = EhFrame::new(&self.frames, LittleEndian);
        frames.set_vendor(registers::VENDOR);
        let bases = BaseAddresses::default().set_eh_frame(self.frames_vaddr).set_eh_frame_hdr(self.header_vaddr);
        let header = EhFrameHdr::new(&self.header, LittleEndian).parse(&bases, 8).ok()?;
        let entry = header.table()?.fde_for_address(&frames, &bases, vaddr, EhFrame::cie_from_offset);
        let entry = entry.ok().filter(|entry| entry.contains(vaddr))?;
        let row = entry.unwind_info_for_address(&frames, &bases, context, vaddr).ok()?;
        let frame = Frame { memory, frames: &frames, bases: &bases, entry: &entry };
        frame.caller(row, registers)
    }
}

/// What the rules of one frame are applied to.
struct Frame<'f, 'd, M: ?Sized> {
    memory: &'f M,
    frames: &'f EhFrame<Slice<'d>>,
    bases: &'f BaseAddresses,
    entry: &'f FrameDescriptionEntry<Slice<'d>>,
}

impl<M: UserMemory + ?Sized> Frame<'_, '_, M> {
    fn caller(&self, row: &Row, registers: &mut Registers) -> Option<Step> {
        let cfa = match row.cfa() {
            CfaRule::RegisterAndOffset { register, offset } => registers.get(*register)?.checked_add_signed(*offset)?,
            CfaRule::Expression(expression) => self.evaluate(expression, None, registers)?,
        };
        // A caller's frame is further up (a signal's may be on another stack).
        let signal = self.entry.is_signal_trampoline();
        if !signal && cfa <= registers.get(Register(registers::STACK))? {
            return None;
        }
        let value = |rule: &RegisterRule<usize>, own: Option<u64>| match rule {
            RegisterRule::SameValue => own,
            RegisterRule::Offset(offset) => read_u64(self.memory, cfa.checked_add_signed(*offset)?, 0).ok(),
            RegisterRule::ValOffset(offset) => cfa.checked_add_signed(*offset),
            RegisterRule::Register(register) => registers.get(*register),
            RegisterRule::Expression(expression) => {
                read_u64(self.memory, self.evaluate(expression, Some(cfa), registers)?, 0).ok()
            }
            RegisterRule::ValExpression(expression) => self.evaluate(expression, Some(cfa), registers),
            _ => None,
        };
        let column = self.entry.cie().return_address_register();
        let returns = match row.register(column) {
            // The first function of a thread says that it is.
            RegisterRule::Undefined if self.is_outermost(column) => return Some(Step::Root),
            RegisterRule::Undefined => registers.get(column),
            rule => value(&rule, registers.get(column)),
        };
        let mut caller = Registers([None; registers::COUNT]);
        for &kept in registers::KEPT {
            caller.set(kept, registers.get(Register(kept)));
        }
        caller.set(registers::STACK, Some(cfa));
        for (register, rule) in row.registers() {
            caller.set(register.0, value(rule, registers.get(*register)));
        }
        let returns = returns? & registers::CODE_MASK;
        if returns == 0 {
            return Some(Step::Root);
        }
        *registers = caller;
        // The kernel calls a signal handler between any two instructions.
        Some(Step::Caller { address: returns, after_call: !signal })
    }

    /// Whether a return address without a rule means that there is none. On arm64 it may still be in its register.
    fn is_outermost(&self, column: Register) -> bool {
        let no_other_place = cfg!(target_arch = "x86_64");
        column.0 == registers::RETURN
            && (no_other_place || crate::unwind::is_outermost(self.entry, self.frames, self.bases))
    }

    fn evaluate(&self, expression: &UnwindExpression<usize>, cfa: Option<u64>, registers: &Registers) -> Option<u64> {
        let encoding = Encoding { address_size: 8, format: Format::Dwarf32, version: 4 };
        let expression = expression.get(self.frames).ok()?;
        let mut evaluation: Evaluation<Slice<'_>> = expression.evaluation(encoding);
        evaluation.set_max_iterations(MAX_STEPS);
        if let Some(cfa) = cfa {
            evaluation.set_initial_value(cfa);
        }
        let mut result = evaluation.evaluate().ok()?;
        loop {
            result = match result {
                EvaluationResult::Complete => break,
                EvaluationResult::RequiresRegister { register, .. } => {
                    evaluation.resume_with_register(Value::Generic(registers.get(register)?)).ok()?
                }
                EvaluationResult::RequiresMemory { address, size: 8, .. } => {
                    let word = read_u64(self.memory, address, 0).ok()?;
                    evaluation.resume_with_memory(Value::Generic(word)).ok()?
                }
                _ => return None,
            };
        }
        match evaluation.as_result().last()?.location {
            gimli::Location::Address { address } => Some(address),
            _ => None,
        }
    }
}
