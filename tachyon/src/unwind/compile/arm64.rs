//! Rules of arm64: the CFA, and where `x29` and `x30` were saved, if they were.

use super::{Piece, RuleRow, Slice, Table};
use crate::remote::elf::{Elf, ReadAt};
use gimli::{AArch64, BaseAddresses, CallFrameInstruction, CfaRule, EhFrame, FrameDescriptionEntry, RegisterRule};
use tachyon_common::unwind::arm64::{self, saved};
use tachyon_common::unwind::{Row, Rule, kind};

/// Most bytes of the vdso's code; it has some 2 KiB.
const MAX_VDSO_CODE: u64 = 64 << 10;

/// The compact form of one row. `outermost` is the result of [`is_outermost`] for its function.
pub(super) fn compact(row: &RuleRow, signal: bool, outermost: bool) -> Rule {
    let place = |register| match row.register(register) {
        RegisterRule::Undefined | RegisterRule::SameValue => Some(None),
        RegisterRule::Offset(offset) => Some(Some(offset)),
        _ => None,
    };
    let (Some(fp), Some(link)) = (place(AArch64::X29), place(AArch64::X30)) else { return Rule::UNSUPPORTED };
    let CfaRule::RegisterAndOffset { register, offset } = *row.cfa() else { return Rule::UNSUPPORTED };
    if signal {
        // The kernel's trampoline (`arch/arm64/kernel/vdso/sigreturn.S`): its rules describe a frame record below the
        // interrupted function; all registers of that function lie at `sp`.
        let kernel = (register, offset, fp, link) == (AArch64::X29, 0, Some(0), Some(8));
        return if kernel { Rule::SIGNAL } else { Rule::UNSUPPORTED };
    }
    if outermost && link.is_none() {
        return Rule::END;
    }
    let kind = match register {
        AArch64::SP => kind::SP,
        AArch64::X29 => kind::FP,
        _ => return Rule::UNSUPPORTED,
    };
    let rule = match (fp, link) {
        (None, None) => arm64::Rule::new(kind, offset, saved::NOTHING, 0),
        (None, Some(link)) => arm64::Rule::new(kind, offset, saved::LINK, link),
        (Some(fp), None) => arm64::Rule::new(kind, offset, saved::FP, fp),
        (Some(fp), Some(link)) if fp.checked_add(8) == Some(link) => arm64::Rule::new(kind, offset, saved::PAIR, fp),
        _ => None,
    };
    rule.map_or(Rule::UNSUPPORTED, |rule| rule.0)
}

/// Whether a function says that it has no caller (`.cfi_undefined x30`). A row cannot distinguish that from an `x30` that
/// still holds the caller's, which is how every arm64 function begins.
#[must_use]
pub fn is_outermost(
    fde: &FrameDescriptionEntry<Slice<'_>>,
    section: &EhFrame<Slice<'_>>,
    bases: &BaseAddresses,
) -> bool {
    let mut instructions = fde.instructions(section, bases);
    let undefined = |instruction: &CallFrameInstruction<usize>| {
        matches!(instruction, CallFrameInstruction::Undefined { register: AArch64::X30 })
    };
    std::iter::from_fn(|| instructions.next().ok().flatten()).any(|instruction| undefined(&instruction))
}

/// The slots of the procedure linkage table, for which linkers write no rules: each is a jump that touches neither the stack
/// pointer nor `x30`. The 32 bytes before the first slot (`elf64-aarch64`'s `PLT0`), which bind lazily, do.
pub(super) fn linkage_table<R: ReadAt>(elf: &Elf<R>) -> Option<Piece> {
    let section = elf.section(".plt")?;
    let (start, end) = (section.vaddr.checked_add(32)?, section.vaddr.checked_add(section.size)?);
    let code = elf
        .loads()
        .iter()
        .any(|load| load.executable && start >= load.vaddr && end <= load.vaddr.saturating_add(load.mem_size));
    (code && start < end).then_some(Piece { start, end, rule: arm64::Rule::LEAF.0 })
}

/// Linux ships its vdso without rules, so the signal trampoline is recognised by its instructions, as other unwinders do:
/// `mov x8, #__NR_rt_sigreturn` and `svc #0`, after a `nop` that contains the handler's return address less 1
/// (`arch/arm64/kernel/vdso/sigreturn.S`). The rest is assumed to keep frame pointers.
pub(super) fn vdso<R: ReadAt>(elf: &Elf<R>) -> Option<Table> {
    const TRAMPOLINE: [u8; 8] = [0x68, 0x11, 0x80, 0xd2, 0x01, 0x00, 0x00, 0xd4];
    let code = elf.loads().iter().find(|load| load.executable)?;
    let mut bytes = vec![0; usize::try_from(code.file_size.min(MAX_VDSO_CODE)).ok()?];
    elf.read_vaddr(code.vaddr, &mut bytes).ok()?;
    let words = bytes.as_chunks::<4>().0;
    let at = words.windows(2).position(|pair| pair.as_flattened() == TRAMPOLINE)?;
    let start = u32::try_from(at).ok()?.checked_mul(4)?;
    // During that system call the thread's address is the one after it, where no function begins: the code ends there, or
    // padding follows, a `nop` in either byte order (`vdso.lds.S` fills with 0xd503201f, which the linker writes big-endian).
    const NOP: [u8; 4] = [0x1f, 0x20, 0x03, 0xd5];
    const FILL: [u8; 4] = [0xd5, 0x03, 0x20, 0x1f];
    let behind = code.vaddr.wrapping_add(u64::from(start) + 8);
    let last = elf.section(".text").is_some_and(|text| text.vaddr.checked_add(text.size) == Some(behind));
    let padding = last || matches!(words.get(at + 2), None | Some(&NOP | &FILL));
    let end = start + if padding { 12 } else { 8 };
    let chain = (start > 4).then_some(Row::new(0, Rule::CHAIN));
    let rows = [Row::new(start.saturating_sub(4), Rule::SIGNAL), Row::new(end, Rule::CHAIN)];
    Some(Table { base: code.vaddr, rows: chain.into_iter().chain(rows).collect(), ..Table::default() })
}
