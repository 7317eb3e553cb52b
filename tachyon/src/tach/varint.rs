//! LEB128 numbers and zigzag, the writing side ([`super::bytes`] has the reading side).

/// Longest number: ten groups of seven bits hold a `u64`.
pub(super) const MAX_LEN: usize = 10;

/// Appends `value` in the shortest form.
pub(super) fn put_u64(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(low_bits(value) | 0x80);
        value >>= 7;
    }
    out.push(low_bits(value));
}

/// Appends `value` in the shortest form.
pub(super) fn put_u32(out: &mut Vec<u8>, value: u32) {
    put_u64(out, u64::from(value));
}

/// Appends a signed number: 0, -1, 1, -2 become 0, 1, 2, 3.
pub(super) fn put_i32(out: &mut Vec<u8>, value: i32) {
    put_u32(out, ((value << 1) ^ (value >> 31)).cast_unsigned());
}

/// Undoes zigzag.
pub(super) fn unzigzag(value: u32) -> i32 {
    (value >> 1).cast_signed() ^ -((value & 1).cast_signed())
}

fn low_bits(value: u64) -> u8 {
    u8::try_from(value & 0x7f).expect("seven bits fit a byte")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortest_forms() {
        for (value, bytes) in [
            (0, vec![0]),
            (127, vec![0x7f]),
            (128, vec![0x80, 1]),
            (0x3fff, vec![0xff, 0x7f]),
            (0x4000, vec![0x80, 0x80, 1]),
            (300, vec![0xac, 2]),
            (u64::MAX, [vec![0xff; 9], vec![1]].concat()),
        ] {
            let mut out = Vec::new();
            put_u64(&mut out, value);
            assert_eq!(out, bytes, "{value}");
        }
    }

    #[test]
    fn zigzag_goes_both_ways() {
        for (value, coded) in [(0, 0), (-1, 1), (1, 2), (-2, 3), (i32::MAX, u32::MAX - 1), (i32::MIN, u32::MAX)] {
            let mut out = Vec::new();
            put_i32(&mut out, value);
            let mut expected = Vec::new();
            put_u32(&mut expected, coded);
            assert_eq!(out, expected, "{value}");
            assert_eq!(unzigzag(coded), value);
        }
    }
}
