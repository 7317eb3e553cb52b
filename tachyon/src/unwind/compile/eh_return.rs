//! libgcc's functions that end in `__builtin_eh_return`: `_Unwind_RaiseException`, `_Unwind_Resume` and their like.
//!
//! What they do at the end (`uw_install_context` in GCC's `libgcc/unwind.inc`) is to write the registers of the frame that
//! catches over those that they saved themselves, and to leave for it. From then on their own rules, which the compiler wrote
//! for the frame that called them, lead somewhere else: to frames that are there twice, and past others. So rows of that part are
//! taken away: a stack that was met there is cut, and says so.
//!
//! The functions are known by their rules, for libgcc is linked into many a library that has no names: no other function
//! saves `rax` and `rdx`, the registers that carry the exception to its handler. They leave by `rcx`.

use crate::remote::elf::{Elf, ReadAt};
use gimli::{CfaRule, Register, RegisterRule, UnwindTableRow, X86_64};
use iced_x86::{Decoder, DecoderOptions, FlowControl};

/// Longest of these functions that is decoded; they have half a kilobyte.
const MAX_FUNCTION: u64 = 16 << 10;

/// What is known of one function so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EhReturn {
    /// It saves `rax` and `rdx`.
    saves: bool,
    /// Where its frame is given up for the one that catches.
    leaves: Option<u64>,
    leaving: bool,
}

impl EhReturn {
    /// Takes the next row of the function. True: what it says leads astray.
    pub fn take(&mut self, row: &UnwindTableRow<usize>) -> bool {
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
            // `mov rsp, rcx; pop rcx; jmp *rcx`, or a `ret`: what follows is other code of the function.
            Some(X86_64::RSP) => {}
            _ => self.leaving = false,
        }
        self.leaving
    }

    /// Addresses of the function from `start` on at which the saved registers are no more its own, but for those that
    /// [`EhReturn::take`] told.
    pub fn installed<R: ReadAt>(&self, elf: &Elf<R>, start: u64) -> Option<std::ops::Range<u64>> {
        let leaves = self.leaves?;
        let len = leaves.checked_sub(start).filter(|len| *len <= MAX_FUNCTION)?;
        let mut code = vec![0; usize::try_from(len).ok()?];
        elf.read_vaddr(start, &mut code).ok()?;
        let calls: Vec<u64> = Decoder::with_ip(64, &code, start, DecoderOptions::NONE)
            .into_iter()
            .filter(|instruction| instruction.flow_control() == FlowControl::Call)
            .map(|instruction| instruction.ip())
            .collect();
        // The last is `_Unwind_DebugHook`, the one before `uw_install_context_1`. In the call the return address, less 1, is
        // what a rule is looked up by; before it nothing is written yet.
        let install = calls.len().checked_sub(2).map_or(start, |at| calls[at]);
        Some(install + 1..leaves)
    }
}
