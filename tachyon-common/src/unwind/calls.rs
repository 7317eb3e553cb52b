//! What lies before a return address.

/// Whether these last bytes before an address may be an instruction that calls, as before every return address; by chance, one in a
/// hundred others may, too.
///
/// x86-64: `E8` with 4 bytes, or `FF /2` with 1 to 6 bytes of operand (Intel's manual, volume 2, "CALL"). Arm64: `BL`, or `BLR` in all its
/// forms (Arm's manual, C6.2).
#[inline(always)]
#[must_use]
pub const fn may_call(before: u64, is_arm64: bool) -> bool {
    if is_arm64 {
        let word = (before >> 32) as u32;
        return word & 0xfc00_0000 == 0x9400_0000 || word & 0xfeff_f000 == 0xd63f_0000;
    }
    // In memory order: the last byte before the address is the highest.
    let mut found = (before >> 24) & 0xff == 0xe8;
    let mut at = 1;
    while at < 7 {
        let pair = before >> (at * 8);
        found |= pair & 0x38ff == 0x10ff;
        at += 1;
    }
    found
}
