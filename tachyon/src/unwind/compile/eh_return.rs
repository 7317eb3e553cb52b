//! libgcc's functions that end in `__builtin_eh_return`: `_Unwind_RaiseException`, `_Unwind_Resume` and their like.
//!
//! At the end (`uw_install_context` in GCC's `libgcc/unwind.inc`) they overwrite the registers that they saved themselves,
//! including the return address, with those of the catching frame, and continue there. Their own rules, which the compiler wrote
//! for the frame that called them, then lead somewhere else: some frames appear twice, others are skipped. But their frame
//! records where the throw leads, and the frames in between are finished: so a stack that is met there goes on with the frame
//! that catches, or that cleans up. The last few instructions, which move the stack pointer, have no rule, nor do functions that
//! do not look like GCC's: such a stack is cut, and labelled as such.
//!
//! The functions are recognised by their rules, because libgcc is linked into many libraries without symbols: no other
//! function saves `rax` and `rdx`, the registers that carry the exception to its handler. They leave through `rcx`.

pub(super) mod arm64;

use super::{Piece, RuleRow};
use crate::remote::elf::{Elf, ReadAt};
use gimli::{CfaRule, Register, RegisterRule, X86_64};
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind};
use std::ops::Range;
use tachyon_common::unwind::{Rule, UNWIND_CONTEXT};

/// Longest of these functions that is decoded; they have half a kilobyte.
const MAX_FUNCTION: u64 = 16 << 10;

/// What is known about one function so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EhReturn {
    /// It saves `rax` and `rdx`.
    saves: bool,
    /// Where its frame is given up for the one that catches.
    leaves: Option<u64>,
    leaving: bool,
}

impl EhReturn {
    /// Takes the next row of the function. True: its rule would lead astray.
    pub fn take(&mut self, row: &RuleRow) -> bool {
        let saved = |register| matches!(row.register(register), RegisterRule::Offset(_));
        self.saves |= saved(X86_64::RAX) && saved(X86_64::RDX);
        let cfa: Option<Register> = match *row.cfa() {
            CfaRule::RegisterAndOffset { register, .. } => Some(register),
            CfaRule::Expression(_) => None,
        };
        match cfa {
            Some(X86_64::RCX) if self.saves => {
                self.leaves.get_or_insert(row.start_address());
                self.leaving = true;
            }
            // `mov rsp, rcx; pop rcx; jmp *rcx`, or a `ret`: after that comes other code of the function.
            Some(X86_64::RSP) => {}
            _ => self.leaving = false,
        }
        self.leaving
    }

    /// The part of the function from `start` on where the saved registers are no longer its own, except what
    /// [`EhReturn::take`] reported, with its rule.
    pub fn installed<R: ReadAt>(&self, elf: &Elf<R>, start: u64) -> Option<Piece> {
        let leaves = self.leaves?;
        let code = function(elf, start..leaves)?;
        let code: Vec<Instruction> = Decoder::with_ip(64, &code, start, DecoderOptions::NONE).into_iter().collect();
        let mut calls =
            code.iter().enumerate().filter(|(_, at)| at.flow_control() == FlowControl::Call).map(|(at, _)| at);
        // The last is `_Unwind_DebugHook`, the one before `uw_install_context_1`. During the call, rules are looked up by
        // the return address less 1; before it nothing is written yet.
        let (hook, install) = (calls.next_back(), calls.next_back());
        let Some((install, hook)) = install.zip(hook) else {
            return Some(Piece { start, end: leaves, rule: Rule::UNSUPPORTED });
        };
        let cfa = arguments(&code[install + 1..hook]).filter(|cfa| has_context(&code[..install], *cfa));
        let cfa = cfa.filter(|_| is_way_out(&code, install));
        let rule = cfa.and_then(Rule::throw).unwrap_or(Rule::UNSUPPORTED);
        Some(Piece { start: code[install].ip() + 1, end: leaves, rule })
    }
}

/// The instructions of a function that is not too long.
pub(super) fn function<R: ReadAt>(elf: &Elf<R>, at: Range<u64>) -> Option<Vec<u8>> {
    let len = at.end.checked_sub(at.start).filter(|len| *len <= MAX_FUNCTION)?;
    let mut code = vec![0; usize::try_from(len).ok()?];
    elf.read_vaddr(at.start, &mut code).ok()?;
    Some(code)
}

/// How far from `rbp` the operand in memory lies, if it is in the frame.
fn in_the_frame(instruction: &Instruction) -> Option<i64> {
    let place = (instruction.memory_base(), instruction.memory_index());
    let is_there =
        instruction.op1_kind() == OpKind::Memory && place == (iced_x86::Register::RBP, iced_x86::Register::None);
    is_there.then_some(instruction.memory_displacement64().cast_signed())
}

/// Where the frame keeps `cfa` of the context that it installs, in bytes from `rbp`: `_Unwind_DebugHook (cfa, ra)` is called with
/// both, which lie side by side.
fn arguments(before_the_call: &[Instruction]) -> Option<i64> {
    let loaded = |register| {
        let load = before_the_call.iter().rfind(|at| at.op0_register() == register)?;
        in_the_frame(load).filter(|_| load.mnemonic() == Mnemonic::Mov)
    };
    let (cfa, handler) = (loaded(iced_x86::Register::RDI)?, loaded(iced_x86::Register::RSI)?);
    (cfa.checked_add(8) == Some(handler)).then_some(cfa)
}

/// Whether a context whose `cfa` lies this far from `rbp` begins where [`Rule::throw`] assumes: the function takes its address.
fn has_context(code: &[Instruction], cfa: i64) -> bool {
    let begin = cfa.checked_sub_unsigned(UNWIND_CONTEXT.sp);
    begin.is_some() && code.iter().any(|at| at.mnemonic() == Mnemonic::Lea && in_the_frame(at) == begin)
}

/// Whether the code after an instruction is reached only from it, and leads only to the end.
fn is_way_out(code: &[Instruction], from: usize) -> bool {
    let (Some(last), first) = (code.last(), code[from].next_ip()) else { return false };
    let behind = |address| (first..=last.ip()).contains(&address);
    code.iter().all(|at| match at.flow_control() {
        FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch => {
            behind(at.ip()) == behind(at.near_branch_target())
        }
        FlowControl::Return | FlowControl::IndirectBranch => !behind(at.ip()),
        _ => true,
    })
}
