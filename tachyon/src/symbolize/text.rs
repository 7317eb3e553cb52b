//! Turns CPython's string storage into Rust strings.
//!
//! In: the bytes of a `str` object in its own kind (PEP 393), as the kernel side copied them, or a live process's
//! memory. Out: the text, verbatim: control characters and NULs are kept, escaping is left to whoever shows it. A code
//! point that is not a Unicode scalar value (a lone surrogate, as `surrogateescape` makes of a file name that is not
//! UTF-8) is written as an escape, `\udcff`; one that no string can have becomes U+FFFD.

use tachyon_common::layout::Layout;
use tachyon_common::limits::MAX_TEXT_BYTES;
use tachyon_common::walk::{UserMemory, read_u32, read_u64};

/// Most bytes read of one string in a live process. A longer one is cut there, as the kernel side cuts it.
pub(super) const MAX_LIVE_TEXT_BYTES: usize = MAX_TEXT_BYTES;

/// Marks the end of a text that was cut.
pub const CUT_MARK: char = '…';

/// Why bytes are not a valid string.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadText {
    /// CPython does not use this number of bytes per code point.
    #[error("string has {0} bytes a code point, expected 1, 2 or 4")]
    Kind(u8),
    /// The text ends inside a code point.
    #[error("string of {bytes} bytes does not hold whole code points of {kind} bytes")]
    Length {
        /// Bytes a code point has.
        kind: u8,
        /// Bytes of the text.
        bytes: usize,
    },
    /// The string object is not stored in one piece, which no name in a code object is.
    #[error("string object at {0:#x} is not compact")]
    NotCompact(u64),
    /// The memory could not be read.
    #[error("cannot read string object at {0:#x}")]
    Unreadable(u64),
}

/// Decodes text of `kind` bytes a code point: latin-1, UCS-2 or UCS-4, in this machine's byte order.
///
/// `cut` says that the string goes on after `bytes`: an incomplete last code point is dropped, and a [`CUT_MARK`] shows
/// the cut.
///
/// # Errors
/// [`BadText::Kind`] and [`BadText::Length`].
pub fn decode(kind: u8, bytes: &[u8], cut: bool) -> Result<String, BadText> {
    if !matches!(kind, 1 | 2 | 4) {
        return Err(BadText::Kind(kind));
    }
    if !cut && !bytes.len().is_multiple_of(usize::from(kind)) {
        return Err(BadText::Length { kind, bytes: bytes.len() });
    }
    let mut text = String::with_capacity(bytes.len() / usize::from(kind));
    match kind {
        1 => text.extend(bytes.iter().copied().map(char::from)),
        2 => bytes.as_chunks().0.iter().for_each(|unit| push(&mut text, u16::from_ne_bytes(*unit).into())),
        _ => bytes.as_chunks().0.iter().for_each(|unit| push(&mut text, u32::from_ne_bytes(*unit))),
    }
    if cut {
        text.push(CUT_MARK);
    }
    Ok(text)
}

/// Adds a code point. A surrogate is not a Unicode scalar value, and is written as by CPython's error handler
/// `backslashreplace` (`PyCodec_BackslashReplaceErrors` in `Python/codecs.c`): two file names that differ in one stay
/// distinct.
fn push(text: &mut String, code_point: u32) {
    use std::fmt::Write as _;
    match (char::from_u32(code_point), code_point) {
        (Some(scalar), _) => text.push(scalar),
        // Writing to a string does not fail.
        (None, 0xd800..=0xdfff) => drop(write!(text, "\\u{code_point:04x}")),
        (None, _) => text.push(char::REPLACEMENT_CHARACTER),
    }
}

/// Reads the `str` object at `address` of a live process.
///
/// # Errors
/// [`BadText`], when it is not a string or cannot be read.
pub(crate) fn read<M: UserMemory + ?Sized>(memory: &M, layout: &Layout, address: u64) -> Result<String, BadText> {
    let unreadable = |_| BadText::Unreadable(address);
    let state = read_u32(memory, address, layout.unicode_state).map_err(unreadable)?;
    let length = read_u64(memory, address, layout.unicode_length).map_err(unreadable)?;
    if state & layout.unicode_compact_bit == 0 {
        return Err(BadText::NotCompact(address));
    }
    let ascii = state & layout.unicode_ascii_bit != 0;
    // Three bits; decode() refuses invalid kinds.
    let kind = ((state >> layout.unicode_kind_shift) & 7) as u8;
    let head = if ascii { layout.unicode_ascii_size } else { layout.unicode_compact_size };
    let whole = length.saturating_mul(u64::from(kind));
    let cut = whole > MAX_LIVE_TEXT_BYTES as u64;
    let mut bytes = vec![0; usize::try_from(whole).map_or(MAX_LIVE_TEXT_BYTES, |len| len.min(MAX_LIVE_TEXT_BYTES))];
    memory.read(address.wrapping_add(u64::from(head)), &mut bytes).map_err(unreadable)?;
    decode(kind, &bytes, cut)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ucs2(units: &[u16]) -> Vec<u8> {
        units.iter().flat_map(|unit| unit.to_ne_bytes()).collect()
    }

    fn ucs4(units: &[u32]) -> Vec<u8> {
        units.iter().flat_map(|unit| unit.to_ne_bytes()).collect()
    }

    #[test]
    fn every_kind_decodes() {
        let cases: &[(&str, u8, Vec<u8>, bool, &str)] = &[
            ("empty", 1, vec![], false, ""),
            ("ascii", 1, b"f.<locals>.<lambda>".to_vec(), false, "f.<locals>.<lambda>"),
            ("latin-1", 1, vec![b'n', 0xe4, 0xff, 0x80], false, "nä\u{ff}\u{80}"),
            ("controls and NUL are kept", 1, b"a\0\x1b[31m\n".to_vec(), false, "a\0\x1b[31m\n"),
            ("UCS-2", 2, ucs2(&[0x3b1, 0x66, 0xfffd]), false, "αf\u{fffd}"),
            ("UCS-2 lone surrogates, also in pairs", 2, ucs2(&[0xd83d, 0xde00, 0x61]), false, "\\ud83d\\ude00a"),
            ("surrogateescape", 2, ucs2(&[0x2f, 0xdcff]), false, "/\\udcff"),
            ("UCS-4", 4, ucs4(&[0x1f600, 0x61]), false, "😀a"),
            ("UCS-4 out of range", 4, ucs4(&[0x11_0000, u32::MAX, 0xd800]), false, "\u{fffd}\u{fffd}\\ud800"),
            ("cut", 1, b"abc".to_vec(), true, "abc…"),
            ("cut inside a code point", 4, [ucs4(&[0x61]), vec![1, 2]].concat(), true, "a…"),
        ];
        for (what, kind, bytes, cut, expected) in cases {
            assert_eq!(decode(*kind, bytes, *cut).as_deref(), Ok(*expected), "{what}");
        }
    }

    #[test]
    fn what_is_no_string_is_refused() {
        for kind in [0, 3, 5, 8, 255] {
            assert_eq!(decode(kind, b"abcd", true), Err(BadText::Kind(kind)));
        }
        assert_eq!(decode(2, b"abc", false), Err(BadText::Length { kind: 2, bytes: 3 }));
        assert_eq!(decode(4, b"ab", false), Err(BadText::Length { kind: 4, bytes: 2 }));
    }
}
