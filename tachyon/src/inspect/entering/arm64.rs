//! The same search in arm64 code, whose instructions all have the same size: those that compilers use here are decoded; a
//! register that any other instruction changes counts as unknown.

use std::collections::HashMap;
use std::ops::Range;

use super::{CframeOffsets, EnteringError, EnteringWindow, MAX_INSTRUCTIONS, MAX_WINDOW};

/// Number of the stack pointer where an instruction expects an address.
const SP: u32 = 31;

/// What is known about a register or a stack slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    /// The address this many bytes from where the stack pointer was when the function was entered.
    Stack(i64),
    /// The first argument plus this many bytes.
    Tstate(i64),
}

impl Value {
    fn plus(self, bytes: i64) -> Self {
        match self {
            Self::Stack(offset) => Self::Stack(offset.wrapping_add(bytes)),
            Self::Tstate(offset) => Self::Tstate(offset.wrapping_add(bytes)),
        }
    }
}

/// A load or store of one or two registers (Arm Architecture Reference Manual, C4.1.94).
#[derive(Clone, Copy, Debug)]
struct Access {
    store: bool,
    base: u32,
    /// From the base, in bytes.
    offset: i64,
    /// What is added to the base afterwards.
    write_back: i64,
    /// Bytes of each register.
    size: u64,
    /// General registers; vector registers are not followed.
    registers: [Option<u32>; 2],
    count: u64,
}

/// `width` bits of a word, from bit `lowest` on, signed.
fn signed(word: u32, lowest: u32, width: u32) -> i64 {
    i64::from((word << (32 - lowest - width)).cast_signed() >> (32 - width))
}

/// A branch to a place given in the instruction: how far, in bytes, and whether it may fall through (Arm Architecture
/// Reference Manual, C4.1.65: `b`, `b.cond`, `cbz` and `cbnz`, `tbz` and `tbnz`, whose offsets count instructions).
pub(in crate::inspect) fn branch(word: u32) -> Option<(i64, bool)> {
    let (lowest, width, conditional) = match word {
        word if word & 0xfc00_0000 == 0x1400_0000 => (0, 26, false),
        word if word & 0xff00_0000 == 0x5400_0000 || word & 0x7e00_0000 == 0x3400_0000 => (5, 19, true),
        word if word & 0x7e00_0000 == 0x3600_0000 => (5, 14, true),
        _ => return None,
    };
    Some((signed(word, lowest, width) * 4, conditional))
}

fn access(word: u32) -> Option<Access> {
    let (base, first) = ((word >> 5) & 31, word & 31);
    let vector = word & (1 << 26) != 0;
    let general = |register: u32| (!vector).then_some(register);
    if word & 0x3a00_0000 == 0x2800_0000 {
        let size = if vector { 4 << (word >> 30) } else { 4 << ((word >> 31) & 1) };
        let offset = signed(word, 15, 7) * size;
        let (offset, write_back) = match (word >> 23) & 3 {
            1 => (0, offset),
            3 => (offset, offset),
            _ => (offset, 0),
        };
        let registers = [general(first), general((word >> 10) & 31)];
        let store = word & (1 << 22) == 0;
        return Some(Access { store, base, offset, write_back, size: size.cast_unsigned(), registers, count: 2 });
    }
    let opc = (word >> 22) & 3;
    let scale = if vector { (word >> 30) | (opc >> 1) << 2 } else { word >> 30 };
    let store = if vector { opc & 1 == 0 } else { opc == 0 };
    let (offset, write_back) = if word & 0x3b00_0000 == 0x3900_0000 {
        (i64::from((word >> 10) & 0xfff) << scale, 0)
    } else if word & 0x3b20_0000 == 0x3800_0000 {
        let offset = signed(word, 12, 9);
        match (word >> 10) & 3 {
            1 => (0, offset),
            3 => (offset, offset),
            _ => (offset, 0),
        }
    } else {
        return None;
    };
    Some(Access { store, base, offset, write_back, size: 1 << scale, registers: [general(first), None], count: 1 })
}

/// Whether an instruction may write the stack pointer: `add` and `sub` of an immediate or an extended register, and logical
/// operations with an immediate; in this form none of them sets flags.
fn writes_sp(word: u32) -> bool {
    let arithmetic = word & 0x3f80_0000 == 0x1100_0000 || word & 0x3fe0_0000 == 0x0b20_0000;
    arithmetic || (word & 0x1f80_0000 == 0x1200_0000 && word & 0x6000_0000 != 0x6000_0000)
}

/// How far one path through the code has got.
#[derive(Clone, Debug)]
struct Path {
    ip: u64,
    registers: HashMap<u32, Value>,
    slots: HashMap<i64, Value>,
    /// Stores into the stack so far: place and size.
    stored: Vec<(i64, u64)>,
    /// End of the publishing store, the slot's `current_frame`, and the `cframe`'s offset from the stack pointer.
    published: Option<(u64, i64, Option<u32>)>,
}

/// Like [`super::entering_window`], in arm64 code; `fetch` gives the instruction at an address of the file.
pub(in crate::inspect) fn entering_window(
    evaluator: Range<u64>,
    offsets: CframeOffsets,
    mut fetch: impl FnMut(u64) -> Option<[u8; 4]>,
) -> Result<EnteringWindow, EnteringError> {
    let mut open = vec![Path {
        ip: evaluator.start,
        registers: HashMap::from([(SP, Value::Stack(0)), (0, Value::Tstate(0))]),
        slots: HashMap::new(),
        stored: Vec::new(),
        published: None,
    }];
    let mut budget = MAX_INSTRUCTIONS;
    while let Some(mut path) = open.pop() {
        let mut detours = Vec::new();
        let ended = loop {
            let Some(word) = fetch(path.ip).map(u32::from_le_bytes).filter(|_| budget > 0) else {
                break path.unfinished();
            };
            budget -= 1;
            match path.step(word, offsets) {
                Ok(None) => {}
                Ok(Some((addresses, cframe_offset))) => {
                    return Ok(EnteringWindow { addresses, cframe_offset, evaluator, unlinked: None });
                }
                Err(error) => break error,
            }
            match path.follow(word) {
                Ok(None) => {}
                Ok(Some(target)) => detours.push(Path { ip: target, ..path.clone() }),
                Err(error) => break error,
            }
        };
        if ended != EnteringError::NotPublished || budget == 0 {
            return Err(ended);
        }
        open.extend(detours);
    }
    Err(EnteringError::NotPublished)
}

/// The window, and where the evaluator keeps its `cframe`.
type Found = (Range<u64>, Option<u32>);

impl Path {
    fn unfinished(&self) -> EnteringError {
        self.published.map_or(EnteringError::NotPublished, |(end, ..)| EnteringError::NotFilled(end))
    }

    /// Takes the effect of one instruction on memory and registers. `Some` is the end of the search.
    fn step(&mut self, word: u32, offsets: CframeOffsets) -> Result<Option<Found>, EnteringError> {
        let (into, from) = (word & 31, (word >> 5) & 31);
        if let Some(access) = access(word) {
            return self.access(access, offsets);
        }
        // Branches write no register that is followed here; of the system instructions only `mrs` does.
        if word & 0x1c00_0000 == 0x1400_0000 && word & 0xfff0_0000 != 0xd530_0000 {
            return Ok(None);
        }
        let value = if word & 0xbf80_0000 == 0x9100_0000 {
            // `add` and `sub` of an immediate, possibly shifted by 12; `mov` from and to the stack pointer is such an `add`.
            let immediate = i64::from((word >> 10) & 0xfff) << if word & (1 << 22) == 0 { 0 } else { 12 };
            let by = if word & (1 << 30) == 0 { immediate } else { -immediate };
            self.registers.get(&from).map(|value| value.plus(by))
        } else if word & 0xffe0_ffe0 == 0xaa00_03e0 {
            // `mov` between registers, where 31 is the zero register.
            self.registers.get(&((word >> 16) & 31)).copied().filter(|_| (word >> 16) & 31 != SP)
        } else {
            None
        };
        match value {
            Some(value) => self.registers.insert(into, value),
            // In most instructions 31 is no register or the zero register.
            None if into == SP && !writes_sp(word) => None,
            None => self.registers.remove(&into),
        };
        Ok(None)
    }

    fn access(&mut self, access: Access, offsets: CframeOffsets) -> Result<Option<Found>, EnteringError> {
        let end = self.ip.wrapping_add(4);
        let place = self.registers.get(&access.base).map(|base| base.plus(access.offset));
        for (number, register) in (0..access.count).zip(access.registers) {
            let value = register.filter(|&register| register != SP);
            let value = value.and_then(|register| self.registers.get(&register)).copied().filter(|_| access.size == 8);
            match place.map(|place| place.plus((number * access.size).cast_signed())) {
                Some(Value::Tstate(at)) if access.store && at == i64::from(offsets.tstate_cframe) => {
                    let Some(Value::Stack(cframe)) = value else { continue };
                    let slot = cframe.wrapping_add(i64::from(offsets.current_frame));
                    if self.stored.iter().any(|&(at, size)| covers(at, size, slot)) {
                        return Err(EnteringError::FilledBefore);
                    }
                    let cframe = match self.registers.get(&SP) {
                        Some(Value::Stack(sp)) => cframe.checked_sub(*sp).and_then(|offset| u32::try_from(offset).ok()),
                        _ => None,
                    };
                    self.published = Some((end, slot, cframe));
                }
                Some(Value::Stack(at)) if access.store => {
                    if let Some((start, slot, cframe)) = self.published
                        && covers(at, access.size, slot)
                    {
                        let small = end.checked_sub(start).is_some_and(|len| len <= MAX_WINDOW);
                        return if small {
                            Ok(Some((start..end, cframe)))
                        } else {
                            Err(EnteringError::NotFilled(start))
                        };
                    }
                    self.stored.push((at, access.size));
                    match value {
                        Some(value) => self.slots.insert(at, value),
                        None => self.slots.remove(&at),
                    };
                }
                Some(Value::Stack(at)) => {
                    self.load(register, self.slots.get(&at).copied().filter(|_| access.size == 8));
                }
                _ if !access.store => self.load(register, None),
                _ => {}
            }
        }
        if access.write_back != 0
            && let Some(base) = self.registers.get_mut(&access.base)
        {
            *base = base.plus(access.write_back);
        }
        Ok(None)
    }

    fn load(&mut self, register: Option<u32>, value: Option<Value>) {
        // As the target of a load, 31 means none.
        let Some(register) = register.filter(|&register| register != SP) else { return };
        match value {
            Some(value) => self.registers.insert(register, value),
            None => self.registers.remove(&register),
        };
    }

    /// Goes to the next instruction. At a conditional branch it goes straight on and returns the target as a detour.
    fn follow(&mut self, word: u32) -> Result<Option<u64>, EnteringError> {
        let (target, conditional) = match branch(word) {
            Some((offset, conditional)) => (Some(self.ip.wrapping_add_signed(offset)), conditional),
            // `bl`, then `br`, `blr` and `ret`.
            None if word & 0xfc00_0000 == 0x9400_0000 => (None, true),
            None if word & 0xfe00_0000 == 0xd600_0000 => (None, word & 0x00e0_0000 == 0x0020_0000),
            None => {
                self.ip = self.ip.wrapping_add(4);
                return Ok(None);
            }
        };
        if self.published.is_some() {
            return Err(EnteringError::Branches(self.ip));
        }
        match (target, conditional) {
            (Some(target), true) => {
                self.ip = self.ip.wrapping_add(4);
                Ok(Some(target))
            }
            (Some(target), false) => {
                self.ip = target;
                Ok(None)
            }
            (None, true) => {
                // AAPCS64: a callee may change x0 to x18, and x30.
                self.registers.retain(|&register, _| register > 18 && register != 30);
                self.ip = self.ip.wrapping_add(4);
                Ok(None)
            }
            (None, false) => Err(self.unfinished()),
        }
    }
}

/// Whether a store of `size` bytes at `at` covers the eight bytes of `slot`.
fn covers(at: i64, size: u64, slot: i64) -> bool {
    let within = slot.checked_sub(at).and_then(|within| u64::try_from(within).ok());
    within.is_some_and(|within| within.saturating_add(8) <= size)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFSETS: CframeOffsets =
        CframeOffsets { tstate_cframe: 56, current_frame: 8, previous: 8, is_entry: None, owner: 70 };

    fn window(code: &[u32]) -> Result<EnteringWindow, EnteringError> {
        entering_window(0x1000..0x2000, OFFSETS, |vaddr| {
            let at = usize::try_from(vaddr.checked_sub(0x1000)?).ok()? / 4;
            Some(code.get(at)?.to_le_bytes())
        })
    }

    /// stp x29, x30, [sp, #-352]!; mov x29, sp; add x7, sp, #0x100.
    const BEGIN: [u32; 3] = [0xa9aa_7bfd, 0x9100_03fd, 0x9104_03e7];
    /// str x7, [x0, #56].
    const PUBLISH: u32 = 0xf900_1c07;
    /// str x4, [x27, #48]; strb w5, [sp, #256].
    const OTHERS: [u32; 2] = [0xf900_1b64, 0x3904_03e5];
    /// stp x27, x1, [sp, #264].
    const FILL: u32 = 0xa910_87fb;

    /// As in Debian's 3.11.
    #[test]
    fn the_window_lies_between_the_two_stores() {
        let code = [&BEGIN[..], &[PUBLISH], &OTHERS, &[FILL]].concat();
        let found = window(&code).expect("found");
        assert_eq!((found.addresses, found.cframe_offset), (0x1010..0x101c, Some(0x100)));
        // str x27, [x29, #264] is the same place.
        let code = [&BEGIN[..], &[PUBLISH, 0xf900_87bb]].concat();
        assert_eq!(window(&code).expect("found").addresses, 0x1010..0x1014);
        // str x7, [x29, #24]; ldr x8, [sp, #24]; str x8, [x0, #56]; stur x27, [x29, #255], which is not aligned; then the fill.
        let code = [&BEGIN[..], &[0xf900_0fa7, 0xf940_0fe8, 0xf900_1c08, 0xf80f_f3bb, FILL]].concat();
        assert_eq!(window(&code).expect("found").addresses, 0x1018..0x1020);
    }

    #[test]
    fn a_branch_before_is_followed_one_inside_is_refused() {
        // cbz x0, .+8; ret; then the window, which only the detour reaches.
        let code = [&[0xb400_0040, 0xd65f_03c0][..], &BEGIN, &[PUBLISH, FILL]].concat();
        assert_eq!(window(&code).expect("found").addresses, 0x1018..0x101c);
        for branch in [0x1400_0001, 0x5400_0020, 0x9400_0001, 0xd63f_0100, 0x3700_0020] {
            let code = [&BEGIN[..], &[PUBLISH, branch, FILL]].concat();
            assert_eq!(window(&code), Err(EnteringError::Branches(0x1010)), "{branch:x}");
        }
    }

    #[test]
    fn code_without_the_stores_is_refused_in_bounded_time() {
        assert_eq!(window(&[]), Err(EnteringError::NotPublished));
        assert_eq!(window(&[0xd65f_03c0]), Err(EnteringError::NotPublished));
        assert_eq!(window(&[0x1400_0000]), Err(EnteringError::NotPublished), "jumps to itself");
        assert_eq!(window(&[0x3400_0000; 1000]), Err(EnteringError::NotPublished), "branches to itself");
        let code = [&BEGIN[..], &[PUBLISH]].concat();
        assert_eq!(window(&code), Err(EnteringError::NotFilled(0x1010)));
        let code = [&BEGIN[..], &[FILL, PUBLISH]].concat();
        assert_eq!(window(&code), Err(EnteringError::FilledBefore));
        // paciasp and cmp x5, #1 do not change the stack pointer; and sp, x9, #-32 does.
        let signed = [&[0xd503_233f][..], &BEGIN, &[0xf100_04bf, PUBLISH, FILL]].concat();
        assert_eq!(window(&signed).expect("found").cframe_offset, Some(0x100));
        let aligned = [&BEGIN[..], &[0x927b_e93f, PUBLISH, FILL]].concat();
        assert_eq!(
            window(&aligned),
            Err(EnteringError::NotFilled(0x1014)),
            "the fill is counted from the stack pointer"
        );
        // A callee may have changed x0 and x7: bl .+4.
        let code = [&BEGIN[..], &[0x9400_0001, PUBLISH, FILL]].concat();
        assert_eq!(window(&code), Err(EnteringError::NotPublished));
    }
}
