//! Where in an evaluator's code the innermost frame may not be linked to its caller yet (x86-64; 3.11, 3.12).
//!
//! An inlined call stores the new frame into `cframe.current_frame`, and its `previous` before or after that, as the compiler
//! likes. Each store into `current_frame` is followed to the store into `previous`, in straight-line code; what is between is
//! such a place. If no such store comes before the next branch, the place reaches that far.

use std::collections::HashSet;
use std::ops::Range;

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, OpAccess, OpKind, Register};

/// Where the stores go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stores {
    /// `current_frame` of the evaluator's own `cframe`, as an offset from its stack pointer.
    pub(super) current_frame: u64,
    /// `_PyInterpreterFrame.previous`.
    pub(super) previous: u32,
}

/// All such places in the code that begins at `start`; `entered` is where a frame that C calls has been linked and stored, which
/// the search for the window has already followed.
pub(super) fn unlinked_places(code: &[u8], start: u64, entered: u64, stores: Stores) -> Vec<Range<u64>> {
    let instructions: Vec<Instruction> = Decoder::with_ip(64, code, start, DecoderOptions::NONE).iter().collect();
    let targets: HashSet<u64> = instructions.iter().filter_map(target).collect();
    let mut info = InstructionInfoFactory::new();
    let mut found = Vec::new();
    // In the current straight-line code: registers with the address of a frame whose `previous` has been stored, and the frame
    // that has been published without it: its registers, and since when.
    let mut linked: HashSet<Register> = HashSet::new();
    let mut open: Option<(HashSet<Register>, u64)> = None;
    for instruction in &instructions {
        if targets.contains(&instruction.ip()) {
            linked.clear();
        }
        if instruction.flow_control() != FlowControl::Next {
            found.extend(open.take().map(|(_, since)| since..instruction.next_ip()));
            linked.clear();
            continue;
        }
        let stored = stored(instruction);
        match stored {
            Some((Register::RSP, displacement, size, value))
                if instruction.ip() >= entered && covers(displacement, size, stores.current_frame) =>
            {
                found.extend(open.take().map(|(_, since)| since..instruction.next_ip()));
                if !value.is_some_and(|value| linked.contains(&value)) {
                    open = Some((value.into_iter().collect(), instruction.next_ip()));
                }
                continue;
            }
            Some((base, displacement, 8, _)) if displacement == u64::from(stores.previous) && base != Register::RSP => {
                linked.insert(base);
                if let Some((_, since)) = open.take_if(|(registers, _)| registers.contains(&base)) {
                    found.push(since..instruction.next_ip());
                }
            }
            _ => {}
        }
        let copied = (instruction.op_count() == 2 && stored.is_none() && is_copy(instruction))
            .then(|| (instruction.op0_register(), instruction.op1_register()));
        let writes = |access| {
            matches!(access, OpAccess::Write | OpAccess::ReadWrite | OpAccess::CondWrite | OpAccess::ReadCondWrite)
        };
        for register in info.info(instruction).used_registers().iter().filter(|register| writes(register.access())) {
            let register = register.register().full_register();
            linked.remove(&register);
            if let Some((registers, _)) = &mut open {
                registers.remove(&register);
            }
        }
        if let Some((into, from)) = copied {
            if linked.contains(&from) {
                linked.insert(into);
            }
            if let Some((registers, _)) = open.as_mut().filter(|(registers, _)| registers.contains(&from)) {
                registers.insert(into);
            }
        }
    }
    let end = start.wrapping_add(code.len() as u64);
    found.extend(open.map(|(_, since)| since..end));
    found
}

fn target(instruction: &Instruction) -> Option<u64> {
    let branches = matches!(
        instruction.flow_control(),
        FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch | FlowControl::Call
    );
    branches.then(|| instruction.near_branch_target())
}

/// `mov` between registers.
fn is_copy(instruction: &Instruction) -> bool {
    instruction.mnemonic() == iced_x86::Mnemonic::Mov
        && instruction.op0_kind() == OpKind::Register
        && instruction.op1_kind() == OpKind::Register
        && instruction.op0_register().is_gpr64()
}

/// For a store to an address given by one register: that register, the displacement, the size, and the general register stored.
fn stored(instruction: &Instruction) -> Option<(Register, u64, u64, Option<Register>)> {
    let plain = instruction.op_count() == 2
        && instruction.op0_kind() == OpKind::Memory
        && instruction.memory_index() == Register::None
        && instruction.segment_prefix() == Register::None;
    if !plain || matches!(instruction.mnemonic(), iced_x86::Mnemonic::Cmp | iced_x86::Mnemonic::Test) {
        return None;
    }
    let value = (instruction.mnemonic() == iced_x86::Mnemonic::Mov && instruction.op1_kind() == OpKind::Register)
        .then(|| instruction.op1_register());
    let size = instruction.memory_size().size() as u64;
    Some((instruction.memory_base(), instruction.memory_displacement64(), size, value))
}

/// Whether `size` bytes at `at` cover the eight bytes at `slot`.
fn covers(at: u64, size: u64, slot: u64) -> bool {
    slot.checked_sub(at).is_some_and(|within| within.saturating_add(8) <= size)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STORES: Stores = Stores { current_frame: 0x80, previous: 8 };

    fn places(code: &[&[u8]]) -> Vec<(u64, u64)> {
        unlinked_places(&code.concat(), 0x1000, 0, STORES).into_iter().map(|place| (place.start, place.end)).collect()
    }

    /// mov [rsp+0x80], rdx
    const PUBLISH: &[u8] = &[0x48, 0x89, 0x94, 0x24, 0x80, 0, 0, 0];
    /// mov [rdx+8], rbx
    const LINK: &[u8] = &[0x48, 0x89, 0x5a, 0x08];
    /// mov [rbx+0x40], eax
    const OTHER: &[u8] = &[0x89, 0x43, 0x40];
    /// jmp .+2
    const JUMP: &[u8] = &[0xeb, 0];

    #[test]
    fn what_is_linked_first_has_no_place() {
        assert_eq!(places(&[LINK, PUBLISH, JUMP]), []);
        assert_eq!(places(&[LINK, OTHER, PUBLISH, JUMP]), []);
        // mov r12, rdx in between: the same frame. mov rdx, r12: another one.
        assert_eq!(places(&[LINK, &[0x49, 0x89, 0xd4], &[0x4c, 0x89, 0xa4, 0x24, 0x80, 0, 0, 0], JUMP]), []);
        assert_eq!(places(&[LINK, &[0x4c, 0x89, 0xe2], PUBLISH, JUMP]).len(), 1);
    }

    #[test]
    fn what_is_linked_later_has_one_up_to_there() {
        assert_eq!(places(&[PUBLISH, OTHER, LINK, OTHER, JUMP]), [(0x1008, 0x100f)]);
        // As in 3.12.1: the copy of a copy is linked.
        let copies = [&[0x48, 0x89, 0xd3][..], &[0x48, 0x89, 0x5b, 0x08]];
        assert_eq!(places(&[PUBLISH, copies[0], copies[1], JUMP]), [(0x1008, 0x100f)]);
        // If it is never linked, the place reaches to the branch.
        assert_eq!(places(&[PUBLISH, OTHER, JUMP, LINK]), [(0x1008, 0x100d)]);
        assert_eq!(places(&[PUBLISH, OTHER]), [(0x1008, 0x100b)], "or to the end");
    }

    #[test]
    fn a_jump_into_the_middle_may_come_from_an_unlinked_frame() {
        // mov [rdx+8], rbx; then a place that a jump at the end leads to.
        let back: &[u8] = &[0xeb, 0xf2];
        assert_eq!(places(&[LINK, PUBLISH, JUMP, &[0xeb, 0xf4]]), [(0x100c, 0x100e)]);
        assert_eq!(places(&[LINK, PUBLISH, JUMP, back]), [], "to another place");
    }
}
