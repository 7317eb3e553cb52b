//! Where in `_PyEval_EvalFrameDefault` a thread's `cframe` is published but not filled yet (3.11 and 3.12).
//!
//! The evaluator puts the address of a `_PyCFrame` on its own stack into `tstate->cframe` and fills
//! `cframe.current_frame` some instructions later (CPython v3.12.1, `Python/ceval.c`, `_PyEval_EvalFrameDefault`). A
//! thread interrupted in between shows whatever was there before. Compilers order these stores as they like, so the
//! window is found in each binary by following the function from its start: which registers and stack slots hold
//! `tstate` and stack addresses, the store of a stack address into `tstate->cframe`, and the first store over that
//! slot's `current_frame`. Code that cannot be read so simply is an [`EnteringError`], never a guess.

pub(super) mod arm64;
mod unlinked;

use std::collections::HashMap;
use std::ops::Range;

use tachyon_common::layout::{Layout, UNLINKED};

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind,
    Register,
};

/// Instructions looked at before giving up: the window ends within the first 60 in all builds seen.
const MAX_INSTRUCTIONS: usize = 512;

/// Bytes of the longest instruction.
pub(super) const MAX_INSTRUCTION_BYTES: usize = 15;

/// Largest evaluator that is searched (3.12.1's has 51 kB, debug builds' more).
const MAX_EVALUATOR: u64 = 1 << 20;

/// Largest window that is believed, in bytes (3.12.1's has 118).
const MAX_WINDOW: u64 = 512;

/// Why the window is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnteringError {
    /// The file has no name for the evaluator.
    #[error("the file has no symbol _PyEval_EvalFrameDefault")]
    NoSymbol,
    /// Only x86-64 and arm64 code is decoded.
    #[error("its machine code is of neither x86-64 nor arm64")]
    Machine,
    /// No store of a stack address into `tstate->cframe` was found.
    #[error("no store into tstate->cframe was found at the start of _PyEval_EvalFrameDefault")]
    NotPublished,
    /// The store was found, but not the one that fills `current_frame`.
    #[error("no store into cframe.current_frame follows that into tstate->cframe at {0:#x}")]
    NotFilled(u64),
    /// The code between the two stores is not a straight line.
    #[error("code between the stores into tstate->cframe and cframe.current_frame branches at {0:#x}")]
    Branches(u64),
    /// The slot is filled before it is published: such a build needs no window.
    #[error("cframe.current_frame is filled before tstate->cframe is stored")]
    FilledBefore,
}

/// Offsets that the search needs, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct CframeOffsets {
    /// `PyThreadState.cframe`.
    pub(super) tstate_cframe: u32,
    /// `_PyCFrame.current_frame`.
    pub(super) current_frame: u32,
    /// `_PyInterpreterFrame.previous`.
    pub(super) previous: u32,
    /// `_PyInterpreterFrame.is_entry` (3.11).
    pub(super) is_entry: Option<u32>,
    /// `_PyInterpreterFrame.owner` of the evaluator's own entry frame (3.12).
    pub(super) owner: u32,
}

/// What is known about a register or a stack slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Value {
    /// The address `offset` bytes from a fixed place in the stack frame (place 0 is where the function was entered).
    Stack { place: u32, offset: i64 },
    /// The first argument plus this many bytes.
    Tstate(i64),
    /// The second argument plus this many bytes.
    Frame(i64),
}

/// How far one path through the code has got.
#[derive(Clone, Debug)]
struct Path {
    ip: u64,
    registers: HashMap<Register, Value>,
    slots: HashMap<Value, Value>,
    /// Stores into the stack and the frame so far: place and size.
    stored: Vec<(Value, u64)>,
    /// What was stored into the frame's `previous`.
    linked_to: Option<Value>,
    /// End of the publishing store, and the slot's `current_frame`.
    published: Option<(u64, Value)>,
    /// Offset of that `cframe` from the stack pointer.
    cframe_offset: Option<u32>,
}

/// Where `cframe` is published but not filled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnteringWindow {
    /// From the end of the publishing store to the end of the filling store.
    pub addresses: Range<u64>,
    /// Where the evaluator keeps its `cframe`: bytes from its stack pointer.
    pub cframe_offset: Option<u32>,
    /// Addresses of the evaluator's code, as far as its symbol shows them.
    pub evaluator: Range<u64>,
    /// Where in that code the innermost frame may not be linked to its caller. `None`: unknown, or not even a frame that C calls
    /// is linked at the end of the window.
    pub unlinked: Option<Vec<Range<u64>>>,
}

impl EnteringWindow {
    /// [`Layout::unlinked`], if all of it is known and fits.
    pub(super) fn unlinked_places(&self) -> Option<[u32; UNLINKED]> {
        let found = self.unlinked.as_ref()?;
        let mut places = [0; UNLINKED];
        for (at, range) in found.iter().enumerate() {
            let start = range.start.checked_sub(self.evaluator.start)?;
            *places.get_mut(at)? = Layout::unlinked_place(start, range.end.checked_sub(range.start)?)?;
        }
        Some(places)
    }

    /// The same at a process's addresses.
    #[must_use]
    pub(super) fn moved(&self, at: impl Fn(u64) -> u64) -> Self {
        let moved = |range: &Range<u64>| at(range.start)..at(range.end);
        Self {
            addresses: moved(&self.addresses),
            evaluator: moved(&self.evaluator),
            unlinked: self.unlinked.as_ref().map(|places| places.iter().map(moved).collect()),
            ..*self
        }
    }
}

/// Finds the window: instruction addresses from the end of the publishing store to the end of the filling store. A
/// thread whose next instruction is inside must not be walked.
///
/// `fetch` gives the bytes at an address of the file; it returns false if there are none.
///
/// # Errors
/// When the code is not as expected.
pub(super) fn entering_window(
    evaluator: Range<u64>,
    offsets: CframeOffsets,
    mut fetch: impl FnMut(u64, &mut [u8]) -> bool,
) -> Result<EnteringWindow, EnteringError> {
    let registers = HashMap::from([
        (Register::RSP, Value::Stack { place: 0, offset: 0 }),
        (Register::RDI, Value::Tstate(0)),
        (Register::RSI, Value::Frame(0)),
    ]);
    let start = Path {
        ip: evaluator.start,
        registers,
        slots: HashMap::new(),
        stored: Vec::new(),
        linked_to: None,
        published: None,
        cframe_offset: None,
    };
    let mut open = vec![start];
    let mut budget = MAX_INSTRUCTIONS;
    let mut info = InstructionInfoFactory::new();
    let mut error = EnteringError::NotPublished;
    while let Some(mut path) = open.pop() {
        let mut detours = Vec::new();
        let ended = loop {
            if budget == 0 {
                return Err(path.unfinished());
            }
            budget -= 1;
            let mut bytes = [0; MAX_INSTRUCTION_BYTES];
            if !fetch(path.ip, &mut bytes) {
                break path.unfinished();
            }
            let instruction = Decoder::with_ip(64, &bytes, path.ip, DecoderOptions::NONE).decode();
            if instruction.code() == Code::INVALID {
                break path.unfinished();
            }
            if let Some(outcome) = path.step(&instruction, offsets, &mut info) {
                match outcome {
                    Ok(addresses) => {
                        let unlinked =
                            path.links(offsets).then(|| path.unlinked(&evaluator, &addresses, offsets, fetch));
                        let unlinked = unlinked.flatten();
                        return Ok(EnteringWindow {
                            addresses,
                            cframe_offset: path.cframe_offset,
                            evaluator,
                            unlinked,
                        });
                    }
                    Err(found) => break found,
                }
            }
            match path.follow(&instruction) {
                Ok(None) => {}
                Ok(Some(target)) => detours.push(Path { ip: target, ..path.clone() }),
                Err(found) => break found,
            }
        };
        if ended != EnteringError::NotPublished {
            return Err(ended);
        }
        error = ended;
        open.extend(detours);
    }
    Err(error)
}

impl Path {
    /// Why a path that cannot be followed any further has no window.
    fn unfinished(&self) -> EnteringError {
        self.published.map_or(EnteringError::NotPublished, |(end, _)| EnteringError::NotFilled(end))
    }

    /// Whether the frame has been linked, and what it is linked to is complete.
    fn links(&self, offsets: CframeOffsets) -> bool {
        let stored = |slot, width| self.stored.iter().any(|&(at, size)| covers_all(at, size, slot, width));
        let frame = Value::Frame(0);
        match (offsets.is_entry, self.linked_to) {
            (Some(is_entry), _) => {
                stored(frame.plus(i64::from(is_entry)), 1) && stored(frame.plus(i64::from(offsets.previous)), 8)
            }
            (None, Some(entry @ Value::Stack { .. })) => {
                stored(entry.plus(i64::from(offsets.previous)), 8) && stored(entry.plus(i64::from(offsets.owner)), 1)
            }
            (None, _) => false,
        }
    }

    /// Where in the evaluator frames are linked after they are published.
    fn unlinked(
        &self,
        evaluator: &Range<u64>,
        window: &Range<u64>,
        offsets: CframeOffsets,
        mut fetch: impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Option<Vec<Range<u64>>> {
        let current_frame = u64::from(self.cframe_offset?) + u64::from(offsets.current_frame);
        let len = evaluator.end.checked_sub(evaluator.start).filter(|&len| len <= MAX_EVALUATOR)?;
        let mut code = vec![0; usize::try_from(len).ok()?];
        let stores = unlinked::Stores { current_frame, previous: offsets.previous };
        fetch(evaluator.start, &mut code).then(|| unlinked::unlinked_places(&code, evaluator.start, window.end, stores))
    }

    /// Takes the effect of one instruction on memory and registers. `Some` ends the search.
    fn step(
        &mut self,
        instruction: &Instruction,
        offsets: CframeOffsets,
        info: &mut InstructionInfoFactory,
    ) -> Option<Result<Range<u64>, EnteringError>> {
        let end = instruction.next_ip();
        let address = self.address(instruction);
        let stores = |access: OpAccess| {
            matches!(access, OpAccess::Write | OpAccess::ReadWrite | OpAccess::CondWrite | OpAccess::ReadCondWrite)
        };
        let info = info.info(instruction);
        let written = info.used_memory().iter().filter(|memory| stores(memory.access()));
        let size = written.map(|memory| memory.memory_size().size() as u64).max();
        let moved = (instruction.mnemonic() == Mnemonic::Mov && instruction.op1_kind() == OpKind::Register)
            .then(|| self.registers.get(&instruction.op1_register().full_register()).copied())
            .flatten();
        match (size, address) {
            (Some(8), Some(Value::Tstate(at))) if at == i64::from(offsets.tstate_cframe) => {
                if let Some(Value::Stack { place, offset }) = moved {
                    let slot = Value::Stack { place, offset: offset.wrapping_add(i64::from(offsets.current_frame)) };
                    if self.stored.iter().any(|&(at, size)| covers(at, size, slot)) {
                        return Some(Err(EnteringError::FilledBefore));
                    }
                    self.cframe_offset = match self.registers.get(&Register::RSP) {
                        Some(&Value::Stack { place: sp_place, offset: sp }) if sp_place == place => {
                            offset.checked_sub(sp).and_then(|offset| u32::try_from(offset).ok())
                        }
                        _ => None,
                    };
                    self.published = Some((end, slot));
                }
            }
            (Some(size), Some(at @ Value::Stack { .. })) if instruction.stack_pointer_increment() == 0 => {
                if let Some((start, slot)) = self.published
                    && covers(at, size, slot)
                {
                    let found = start..end;
                    let small = end.checked_sub(start).is_some_and(|len| len <= MAX_WINDOW);
                    return Some(if small { Ok(found) } else { Err(EnteringError::NotFilled(start)) });
                }
                self.stored.push((at, size));
                match moved {
                    Some(value) if size == 8 => self.slots.insert(at, value),
                    _ => self.slots.remove(&at),
                };
            }
            (Some(size), Some(at @ Value::Frame(offset))) => {
                if offset == i64::from(offsets.previous) && size == 8 {
                    self.linked_to = moved;
                }
                self.stored.push((at, size));
            }
            _ => {}
        }
        let result = self.result(instruction, address);
        let writes = info.used_registers().iter().filter(|register| stores(register.access()));
        let sp = self.registers.get(&Register::RSP).copied();
        for register in writes {
            self.registers.remove(&register.register().full_register());
        }
        if let Some((register, value)) = result {
            self.registers.insert(register, value);
        }
        // Pushes, pops and calls move the stack pointer by a known amount.
        let moved = i64::from(instruction.stack_pointer_increment());
        if moved != 0
            && let Some(Value::Stack { place, offset }) = sp
        {
            let after =
                if instruction.flow_control() == FlowControl::Next { offset.wrapping_add(moved) } else { offset };
            self.registers.insert(Register::RSP, Value::Stack { place, offset: after });
        }
        None
    }

    /// The value that an instruction leaves in a register, if it is a kind that is followed.
    fn result(&self, instruction: &Instruction, address: Option<Value>) -> Option<(Register, Value)> {
        if instruction.op_count() < 2 || instruction.op0_kind() != OpKind::Register {
            return None;
        }
        let into = instruction.op0_register();
        if !into.is_gpr64() {
            return None;
        }
        let value = match (instruction.mnemonic(), instruction.op1_kind()) {
            (Mnemonic::Mov, OpKind::Register) => self.registers.get(&instruction.op1_register()).copied()?,
            (Mnemonic::Mov, OpKind::Memory) => self.slots.get(&address?).copied()?,
            (Mnemonic::Lea, OpKind::Memory) => address?,
            (Mnemonic::Add | Mnemonic::Sub, kind) if is_immediate(kind) => {
                let by = instruction.immediate(1).cast_signed();
                let by = if instruction.mnemonic() == Mnemonic::Sub { by.wrapping_neg() } else { by };
                self.registers.get(&into)?.plus(by)
            }
            // An aligned stack frame: a new fixed place, an unknown distance from the old one.
            (Mnemonic::And, kind) if is_immediate(kind) && into == Register::RSP => match self.registers.get(&into)? {
                Value::Stack { place, .. } => Value::Stack { place: place.wrapping_add(1), offset: 0 },
                Value::Tstate(_) | Value::Frame(_) => return None,
            },
            _ => return None,
        };
        Some((into, value))
    }

    /// The address of the instruction's memory operand, if its base register is followed.
    fn address(&self, instruction: &Instruction) -> Option<Value> {
        let plain = instruction.memory_index() == Register::None && instruction.segment_prefix() == Register::None;
        let base = self.registers.get(&instruction.memory_base()).filter(|_| plain)?;
        Some(base.plus(instruction.memory_displacement64().cast_signed()))
    }

    /// Goes to the next instruction. At a conditional branch it goes straight on and returns the target as a detour.
    fn follow(&mut self, instruction: &Instruction) -> Result<Option<u64>, EnteringError> {
        let next = instruction.next_ip();
        let mut detour = None;
        match instruction.flow_control() {
            FlowControl::Next => {}
            _ if self.published.is_some() => return Err(EnteringError::Branches(instruction.ip())),
            FlowControl::ConditionalBranch => detour = Some(instruction.near_branch_target()),
            FlowControl::UnconditionalBranch => {
                self.ip = instruction.near_branch_target();
                return Ok(None);
            }
            FlowControl::Call | FlowControl::IndirectCall => {
                // System V ABI, x86-64: the registers that a callee may change.
                for register in [
                    Register::RAX,
                    Register::RCX,
                    Register::RDX,
                    Register::RSI,
                    Register::RDI,
                    Register::R8,
                    Register::R9,
                    Register::R10,
                    Register::R11,
                ] {
                    self.registers.remove(&register);
                }
            }
            _ => return Err(self.unfinished()),
        }
        self.ip = next;
        Ok(detour)
    }
}

impl Value {
    fn plus(self, bytes: i64) -> Self {
        match self {
            Self::Stack { place, offset } => Self::Stack { place, offset: offset.wrapping_add(bytes) },
            Self::Tstate(offset) => Self::Tstate(offset.wrapping_add(bytes)),
            Self::Frame(offset) => Self::Frame(offset.wrapping_add(bytes)),
        }
    }
}

fn is_immediate(kind: OpKind) -> bool {
    matches!(kind, OpKind::Immediate8to64 | OpKind::Immediate32to64)
}

/// Whether a store of `size` bytes at `at` covers the eight bytes of `slot`.
fn covers(at: Value, size: u64, slot: Value) -> bool {
    covers_all(at, size, slot, 8)
}

/// Whether a store of `size` bytes at `at` covers `width` bytes at `slot`.
fn covers_all(at: Value, size: u64, slot: Value, width: u64) -> bool {
    let distance = match (at, slot) {
        (Value::Stack { place, offset }, Value::Stack { place: slot_place, offset: slot_offset })
            if place == slot_place =>
        {
            slot_offset.checked_sub(offset)
        }
        (Value::Frame(offset), Value::Frame(slot_offset)) => slot_offset.checked_sub(offset),
        _ => None,
    };
    let within = distance.and_then(|within| u64::try_from(within).ok());
    within.is_some_and(|within| within.saturating_add(width) <= size)
}

#[cfg(test)]
mod tests;
