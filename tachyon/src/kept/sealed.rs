//! Bytes with a header that shows whether they are whole.
//!
//! ```text
//! 0   8  seven letters that say what it is, and the version of the format
//! 8   4  CRC-32 of all that follows
//! 12  4  bytes after unpacking
//! 16     what it is about, packed with Zstandard
//! ```
//!
//! What is read may be damaged, or another program's: nothing is unpacked before its checksum is right, nor beyond a limit. Columns of
//! numbers lie in it as they are in memory, little endian, so that reading them costs no more than copying them.

use prost::bytes::Bytes;

/// Most bytes of a file.
pub const MAX_PACKED: usize = 4 << 20;
/// Most bytes of what is in it, unpacked.
pub const MAX_UNPACKED: usize = 8 << 20;

const HEADER: usize = 16;

/// Seals bytes; `None`: they are too many.
#[must_use]
pub fn seal(magic: [u8; 8], bytes: &[u8]) -> Option<Vec<u8>> {
    if bytes.len() > MAX_UNPACKED {
        return None;
    }
    let packed = zstd::bulk::compress(bytes, 1).ok()?;
    let mut rest = u32::try_from(bytes.len()).ok()?.to_le_bytes().to_vec();
    rest.extend(packed);
    let content = [&magic[..], &crc32fast::hash(&rest).to_le_bytes(), &rest].concat();
    (content.len() <= MAX_PACKED).then_some(content)
}

/// The bytes that were sealed; `None`: they are something else, or damaged.
#[must_use]
pub fn open(magic: [u8; 8], content: &[u8]) -> Option<Bytes> {
    let (header, packed) = content.split_at_checked(HEADER).filter(|_| content.len() <= MAX_PACKED)?;
    let word = |at: usize| Some(u32::from_le_bytes(*header.get(at..)?.first_chunk()?));
    if header[..8] != magic || word(8)? != crc32fast::hash(&content[12..]) {
        return None;
    }
    let len = usize::try_from(word(12)?).ok().filter(|len| *len <= MAX_UNPACKED)?;
    let bytes = zstd::bulk::decompress(packed, len).ok().filter(|bytes| bytes.len() == len)?;
    Some(bytes.into())
}

/// A column of numbers.
pub fn column(numbers: impl Iterator<Item = u32>) -> Bytes {
    numbers.flat_map(u32::to_le_bytes).collect()
}

/// The numbers of a column; `None`: it is none.
pub fn numbers(column: &[u8]) -> Option<impl ExactSizeIterator<Item = u32> + '_> {
    let (words, rest) = column.as_chunks::<4>();
    rest.is_empty().then(|| words.iter().map(|word| u32::from_le_bytes(*word)))
}

/// The same for numbers of 64 bits.
pub fn wide_column(numbers: impl Iterator<Item = u64>) -> Bytes {
    numbers.flat_map(u64::to_le_bytes).collect()
}

/// The numbers of a column of 64 bits each; `None`: it is none.
pub fn wide_numbers(column: &[u8]) -> Option<impl ExactSizeIterator<Item = u64> + '_> {
    let (words, rest) = column.as_chunks::<8>();
    rest.is_empty().then(|| words.iter().map(|word| u64::from_le_bytes(*word)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_damaged_is_not_opened() {
        let bytes: Vec<u8> = (0..2_000).map(|at: u32| ((at * at) >> 3) as u8).collect();
        let content = seal(*b"example\x01", &bytes).expect("small enough");
        assert_eq!(open(*b"example\x01", &content).as_deref(), Some(&bytes[..]));
        assert_eq!(open(*b"example\x02", &content), None);
        for at in 0..content.len() {
            for change in [1, 0x80, 0xff] {
                let mut damaged = content.clone();
                damaged[at] ^= change;
                assert_eq!(open(*b"example\x01", &damaged), None, "byte {at}");
            }
            assert_eq!(open(*b"example\x01", &content[..at]), None);
        }
        assert_eq!(seal(*b"example\x01", &vec![0; MAX_UNPACKED + 1]), None);
    }

    #[test]
    fn columns_come_back() {
        let (narrow, wide) = ([0, 1, u32::MAX], [u64::MAX, 7]);
        let (narrow_column, wide_column) = (column(narrow.into_iter()), wide_column(wide.into_iter()));
        assert!(numbers(&narrow_column).expect("whole numbers").eq(narrow));
        assert!(wide_numbers(&wide_column).expect("whole numbers").eq(wide));
        assert!(numbers(&narrow_column[1..]).is_none() && wide_numbers(&wide_column[4..]).is_none());
    }
}
