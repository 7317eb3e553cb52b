//! Rules of x86-64: the CFA, `rbp`, and that the return address lies below the CFA.

use super::{RuleRow, Slice, expression};
use gimli::{CfaRule, EhFrame, EndianSlice, LittleEndian, RegisterRule, X86_64};
use tachyon_common::unwind::{Rule, kind, saved};

/// The compact form of one row.
pub(super) fn compact(section: &EhFrame<Slice<'_>>, row: &RuleRow, signal: bool) -> Rule {
    if signal {
        return signal_return(section, row);
    }
    match row.register(X86_64::RA) {
        RegisterRule::Undefined => return Rule::END,
        RegisterRule::Offset(-8) => {}
        _ => return Rule::UNSUPPORTED,
    }
    let saved = match row.register(X86_64::RBP) {
        RegisterRule::Undefined | RegisterRule::SameValue => Some(saved::UNCHANGED),
        RegisterRule::Offset(offset) if offset < 0 && offset % 8 == 0 => {
            u32::try_from(offset / -8).ok().filter(|words| *words <= saved::MAX)
        }
        // `DW_OP_breg6 0`.
        RegisterRule::Expression(at) if expression(section, &at) == Some(&[0x76, 0]) => Some(saved::AT_FP),
        _ => None,
    };
    let Some(saved) = saved else { return Rule::UNSUPPORTED };
    let rule = match row.cfa() {
        CfaRule::RegisterAndOffset { register: X86_64::RSP, offset } => Rule::new(kind::SP, *offset, saved),
        CfaRule::RegisterAndOffset { register: X86_64::RBP, offset } => Rule::new(kind::FP, *offset, saved),
        CfaRule::RegisterAndOffset { register, offset } => Rule::register(register.0, *offset, saved),
        CfaRule::Expression(cfa) => expression(section, cfa).and_then(|bytes| cfa_expression(bytes, saved)),
    };
    rule.unwrap_or(Rule::UNSUPPORTED)
}

/// The two kinds of expression that compilers, assemblers and linkers write for a CFA.
fn cfa_expression(bytes: &[u8], saved: u32) -> Option<Rule> {
    // binutils, `bfd/elfxx-x86.c`: rsp + 8 + ((rip & 15) >= n) << 3.
    if let [0x77, 8, 0x80, 0, 0x3f, 0x1a, threshold @ 0x30..=0x3f, 0x2a, 0x33, 0x24, 0x22] = bytes {
        return Rule::new(kind::PLT, i64::from(threshold - 0x30) * 8, saved);
    }
    // `DW_OP_breg7` or `DW_OP_breg6`, an offset, `DW_OP_deref`, perhaps `DW_OP_plus_uconst`.
    let (&register, rest) = bytes.split_first()?;
    let kind = match register {
        0x77 => kind::DEREF_SP,
        0x76 => kind::DEREF_FP,
        _ => return None,
    };
    let mut rest = EndianSlice::new(rest, LittleEndian);
    let inner = gimli::Reader::read_sleb128(&mut rest).ok()?;
    let (&deref, rest) = rest.slice().split_first()?;
    if deref != 0x06 {
        return None;
    }
    let outer = match rest.split_first() {
        None => 0,
        Some((0x23, rest)) => {
            let mut rest = EndianSlice::new(rest, LittleEndian);
            let outer = gimli::Reader::read_uleb128(&mut rest).ok()?;
            if !rest.is_empty() {
                return None;
            }
            i64::try_from(outer).ok()?
        }
        Some(_) => return None,
    };
    Rule::deref(kind, inner, outer, saved)
}

/// A signal trampoline whose registers are where Linux puts them (`struct ucontext` at `rsp`).
fn signal_return(section: &EhFrame<Slice<'_>>, row: &RuleRow) -> Rule {
    // `DW_OP_breg7` and an offset as LEB128: 160, 168 and 120 in two bytes each.
    let at = |rule: RegisterRule<usize>, place: &[u8]| match rule {
        RegisterRule::Expression(found) => expression(section, &found) == Some(place),
        _ => false,
    };
    let cfa = match row.cfa() {
        CfaRule::Expression(cfa) => expression(section, cfa) == Some(&[0x77, 0xa0, 1, 0x06]),
        CfaRule::RegisterAndOffset { .. } => false,
    };
    let rip = at(row.register(X86_64::RA), &[0x77, 0xa8, 1]);
    let rbp = at(row.register(X86_64::RBP), &[0x77, 0xf8, 0]);
    if cfa && rip && rbp { Rule::SIGNAL } else { Rule::UNSUPPORTED }
}
