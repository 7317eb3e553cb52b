//! Where a function keeps its caller's registers, instruction by instruction.
//!
//! At its first instruction the ABI says what the registers hold (System V, x86-64): `rsp` points to the return address, and `rbx`,
//! `rbp` and `r12` to `r15` belong to the caller, which must find them unchanged when the function returns. These are tracked, as are
//! addresses relative to the CFA and to a stack pointer that was aligned; everything else is unknown. Whatever two meeting paths
//! disagree on is unknown, too. One thing is assumed, not proven: stores through other pointers do not reach what the function saved.

use iced_x86::{FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register};
use tachyon_common::unwind::{Rule, kind, saved};

/// Most words of the stack that are remembered.
const MAX_SLOTS: usize = 32;

/// Registers that a call preserves.
const KEPT: [Register; 6] = [Register::RBX, Register::RBP, Register::R12, Register::R13, Register::R14, Register::R15];

/// DWARF's register numbers, in the order of the processor's numbers: `rax`, `rcx`, `rdx`, `rbx`, `rsp`, `rbp`, `rsi`, `rdi`.
/// Others are the same.
const DWARF: [u16; 8] = [0, 2, 1, 3, 7, 6, 4, 5];

/// What a register or a word of the stack holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    Unknown,
    /// What this register held when the function was entered.
    Callers(u8),
    Address(Base, i32),
}

/// What an address is relative to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Base {
    Cfa,
    /// The stack pointer when it was last aligned.
    Aligned,
}

/// What is known before an instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct State {
    /// Registers, by the processor's numbers.
    registers: [Value; 16],
    /// Words of the stack.
    slots: Vec<(Base, i32, Value)>,
}

/// Where an instruction leads.
pub(super) enum Next {
    Behind,
    Branch(u64),
    /// Either.
    Both(u64),
    /// To the caller.
    Return,
    /// To an address in a register or in memory.
    Away,
    /// Nowhere: it traps.
    Nowhere,
}

/// The processor's number of a register of 64 bits.
fn number(register: Register) -> Option<usize> {
    register.is_gpr64().then(|| register.number())
}

/// Whether it writes nothing that is tracked, as with most instructions: they compute with vectors. (Asking a library about each takes
/// several times as long as everything else.)
fn has_no_effect(instruction: &Instruction) -> bool {
    let to = instruction.op0_register();
    let vector = to.is_xmm() || to.is_ymm() || to.is_zmm() || to.is_mm();
    match instruction.mnemonic() {
        // Their result is `ecx`.
        Mnemonic::Pcmpestri | Mnemonic::Pcmpistri | Mnemonic::Vpcmpestri | Mnemonic::Vpcmpistri => false,
        Mnemonic::Cmp | Mnemonic::Test | Mnemonic::Nop => true,
        Mnemonic::Prefetcht0
        | Mnemonic::Prefetcht1
        | Mnemonic::Prefetcht2
        | Mnemonic::Prefetchnta
        | Mnemonic::Prefetchw => true,
        _ => vector,
    }
}

impl State {
    pub fn entered() -> Self {
        let mut registers = [Value::Unknown; 16];
        for (at, value) in registers.iter_mut().enumerate() {
            *value = Value::Callers(at as u8);
        }
        registers[Register::RSP.number()] = Value::Address(Base::Cfa, -8);
        Self { registers, slots: Vec::new() }
    }

    fn get(&self, register: Register) -> Value {
        number(register).map_or(Value::Unknown, |at| self.registers[at])
    }

    fn set(&mut self, register: Register, value: Value) {
        if let Some(at) = number(register.full_register()) {
            self.registers[at] = value;
        }
    }

    /// Keeps only what another path agrees on. True if that is less than before.
    pub fn meet(&mut self, other: &Self) -> bool {
        let mut less = false;
        for (mine, others) in self.registers.iter_mut().zip(&other.registers) {
            if mine != others && *mine != Value::Unknown {
                (*mine, less) = (Value::Unknown, true);
            }
        }
        let slots = self.slots.len();
        self.slots.retain(|slot| other.slots.contains(slot));
        less || self.slots.len() < slots
    }

    /// Whether the caller's registers are in place, so that the function may be left.
    pub fn is_left(&self) -> bool {
        self.get(Register::RSP) == Value::Address(Base::Cfa, -8)
            && KEPT.iter().all(|&kept| self.get(kept) == Value::Callers(kept.number() as u8))
    }

    /// Where an operand in memory lies, if that is a known place on the stack.
    fn place(&self, instruction: &Instruction) -> Option<(Base, i32)> {
        if instruction.memory_index() != Register::None {
            return None;
        }
        self.relative(instruction.memory_base(), instruction.memory_displacement64().cast_signed())
    }

    fn relative(&self, register: Register, offset: i64) -> Option<(Base, i32)> {
        match self.get(register) {
            // Far from any overflow.
            Value::Address(base, at) => {
                let at = i32::try_from(offset).ok().and_then(|offset| at.checked_add(offset))?;
                (at.abs() < 1 << 30).then_some((base, at))
            }
            Value::Unknown | Value::Callers(_) => None,
        }
    }

    fn load(&self, place: Option<(Base, i32)>) -> Value {
        let slot = self.slots.iter().find(|slot| Some((slot.0, slot.1)) == place);
        slot.map_or(Value::Unknown, |slot| slot.2)
    }

    /// Forgets what so many bytes of the stack held.
    fn overwrite(&mut self, (base, at): (Base, i32), len: i32) {
        self.slots.retain(|slot| slot.0 != base || slot.1 + 8 <= at || at + len <= slot.1);
    }

    fn store(&mut self, place: (Base, i32), value: Value) {
        self.overwrite(place, 8);
        if value != Value::Unknown && self.slots.len() < MAX_SLOTS {
            self.slots.push((place.0, place.1, value));
            // So that two paths that saved the same compare equal.
            self.slots.sort_by_key(|slot| (slot.0 == Base::Aligned, slot.1));
        }
    }

    /// The stack pointer is computed: from now on, whatever is below it is relative to it.
    fn align(&mut self) {
        for value in &mut self.registers {
            if matches!(value, Value::Address(Base::Aligned, _)) {
                *value = Value::Unknown;
            }
        }
        self.slots.retain(|slot| slot.0 == Base::Cfa && !matches!(slot.2, Value::Address(Base::Aligned, _)));
        self.set(Register::RSP, Value::Address(Base::Aligned, 0));
    }

    fn push(&mut self, value: Value) {
        let top = self.relative(Register::RSP, -8);
        self.set(Register::RSP, top.map_or(Value::Unknown, |(base, at)| Value::Address(base, at)));
        if let Some(top) = top {
            self.store(top, value);
        }
    }

    fn pop(&mut self) -> Value {
        let top = self.relative(Register::RSP, 0);
        let above = top.map_or(Value::Unknown, |(base, at)| Value::Address(base, at + 8));
        let value = self.load(top);
        self.set(Register::RSP, above);
        value
    }

    /// Another function has run: it preserves the registers that it must, and has used the stack below.
    fn call(&mut self) {
        for (at, value) in self.registers.iter_mut().enumerate() {
            if at != Register::RSP.number() && KEPT.iter().all(|kept| kept.number() != at) {
                *value = Value::Unknown;
            }
        }
        let Value::Address(base, top) = self.get(Register::RSP) else { return self.slots.clear() };
        // Slots relative to an aligned stack pointer lie below the rest.
        self.slots.retain(|slot| if slot.0 == base { slot.1 >= top } else { base == Base::Aligned });
    }

    /// Follows one instruction. `None`: it cannot be followed.
    pub fn step(&mut self, instruction: &Instruction, info: &mut InstructionInfoFactory) -> Option<Next> {
        let next = match instruction.flow_control() {
            FlowControl::Next => Next::Behind,
            FlowControl::ConditionalBranch => Next::Both(instruction.near_branch_target()),
            FlowControl::UnconditionalBranch => Next::Branch(instruction.near_branch_target()),
            FlowControl::Return if instruction.mnemonic() == Mnemonic::Ret && instruction.op_count() == 0 => {
                Next::Return
            }
            FlowControl::IndirectBranch => Next::Away,
            FlowControl::Call | FlowControl::IndirectCall => Next::Behind,
            FlowControl::Interrupt | FlowControl::Exception => Next::Nowhere,
            FlowControl::Return | FlowControl::XbeginXabortXend => return None,
        };
        if matches!(instruction.flow_control(), FlowControl::Call | FlowControl::IndirectCall) {
            let is_call = instruction.mnemonic() == Mnemonic::Call;
            if is_call && instruction.near_branch_target() == instruction.next_ip() {
                return None;
            }
            self.call();
            return Some(next);
        }
        if matches!(instruction.mnemonic(), Mnemonic::Loop | Mnemonic::Loope | Mnemonic::Loopne) {
            self.set(Register::RCX, Value::Unknown);
        }
        if matches!(next, Next::Behind) && !has_no_effect(instruction) && !self.known_effect(instruction) {
            self.other_effect(instruction, info)?;
        }
        Some(next)
    }

    /// Handles the instructions with which functions save, restore and move the stack. False: it is another instruction.
    fn known_effect(&mut self, instruction: &Instruction) -> bool {
        let (to, from) = (instruction.op0_register(), instruction.op1_register());
        let kinds = (instruction.op_count(), instruction.op0_kind(), instruction.op1_kind());
        let wide = number(to).is_some();
        let immediate = instruction.try_immediate(1).ok().map(u64::cast_signed);
        match (instruction.mnemonic(), kinds) {
            (Mnemonic::Push, (1, OpKind::Register, _)) if wide => self.push(self.get(to)),
            (Mnemonic::Push, (1, OpKind::Immediate8to64 | OpKind::Immediate32to64, _)) => self.push(Value::Unknown),
            (Mnemonic::Pop, (1, OpKind::Register, _)) if wide => {
                let value = self.pop();
                self.set(to, value);
            }
            (Mnemonic::Leave, _) => {
                self.set(Register::RSP, self.get(Register::RBP));
                let value = self.pop();
                self.set(Register::RBP, value);
            }
            (Mnemonic::Mov, (2, OpKind::Register, OpKind::Register)) if wide => self.set(to, self.get(from)),
            (Mnemonic::Mov, (2, OpKind::Register, OpKind::Memory)) if wide => {
                self.set(to, self.load(self.place(instruction)));
            }
            (Mnemonic::Mov, (2, OpKind::Memory, OpKind::Register)) if number(from).is_some() => {
                match self.place(instruction) {
                    Some(place) => self.store(place, self.get(from)),
                    None => return true,
                }
            }
            (Mnemonic::Lea, (2, OpKind::Register, OpKind::Memory)) if wide => {
                let place = self.place(instruction);
                self.set(to, place.map_or(Value::Unknown, |(base, at)| Value::Address(base, at)));
            }
            (Mnemonic::Add | Mnemonic::Sub, (2, OpKind::Register, _)) if wide && immediate.is_some() => {
                let by = immediate.unwrap_or_default();
                let by = if instruction.mnemonic() == Mnemonic::Add { by } else { by.wrapping_neg() };
                let moved = self.relative(to, by);
                self.set(to, moved.map_or(Value::Unknown, |(base, at)| Value::Address(base, at)));
            }
            (Mnemonic::And | Mnemonic::Sub, (2, OpKind::Register, _)) if to == Register::RSP => self.align(),
            _ => return false,
        }
        true
    }

    /// For all others, whatever they write becomes unknown.
    fn other_effect(&mut self, instruction: &Instruction, info: &mut InstructionInfoFactory) -> Option<()> {
        let info = info.info(instruction);
        let writes = |access: OpAccess| {
            matches!(access, OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite)
        };
        for memory in info.used_memory().iter().filter(|memory| writes(memory.access())) {
            let offset = memory.displacement().cast_signed();
            let place = self.relative(memory.base(), offset).filter(|_| memory.index() == Register::None);
            if let Some(place) = place {
                self.overwrite(place, (memory.memory_size().size() as i32).max(8));
            }
        }
        for used in info.used_registers().iter().filter(|used| writes(used.access())) {
            if used.register().full_register() == Register::RSP {
                return None;
            }
            self.set(used.register(), Value::Unknown);
        }
        Some(())
    }

    /// The rule that holds before the instruction.
    pub fn rule(&self) -> Rule {
        self.compact().unwrap_or(Rule::UNSUPPORTED)
    }

    fn compact(&self) -> Option<Rule> {
        let (sp, fp) = (self.get(Register::RSP), self.get(Register::RBP));
        let callers_fp = Value::Callers(Register::RBP.number() as u8);
        let saved = if fp == callers_fp {
            saved::UNCHANGED
        } else {
            let slot = self.slots.iter().find(|slot| slot.0 == Base::Cfa && slot.2 == callers_fp)?;
            u32::try_from(slot.1 / -8).ok().filter(|words| slot.1 % 8 == 0 && (1..=saved::MAX).contains(words))?
        };
        if let Value::Address(Base::Cfa, at) = sp {
            return Rule::new(kind::SP, i64::from(-at), saved);
        }
        if let Value::Address(Base::Cfa, at) = fp {
            return Rule::new(kind::FP, i64::from(-at), saved);
        }
        // A word below the aligned stack pointer that leads back to the caller's stack.
        let back = |value: Value, kind: u32| {
            let Value::Address(Base::Aligned, at) = value else { return None };
            self.slots.iter().find_map(|slot| match *slot {
                (Base::Aligned, place, Value::Address(Base::Cfa, cfa)) => {
                    Rule::deref(kind, i64::from(place - at), i64::from(-cfa), saved)
                }
                _ => None,
            })
        };
        back(fp, kind::DEREF_FP).or_else(|| back(sp, kind::DEREF_SP)).or_else(|| {
            self.registers.iter().enumerate().find_map(|(at, value)| match *value {
                Value::Address(Base::Cfa, cfa) => {
                    Rule::register(DWARF.get(at).copied().unwrap_or(at as u16), i64::from(-cfa), saved)
                }
                _ => None,
            })
        })
    }
}
