//! The records of a `jitdump` file: what `perf inject --jit` reads about code that a program generated at run time
//! (tools/perf/Documentation/jitdump-specification.txt of the kernel's sources). CPython's `-X perf_jit` writes such files, LLVM's listener
//! for `perf`, and others.
//!
//! The file belongs to the process and grows while it is read: an incomplete record is left for the next time.

use super::made::MadeFunctions;
use linux_perf_data::Endianness;
use linux_perf_data::jitdump::{
    JitCodeLoadRecord, JitCodeMoveRecord, JitDumpHeader, JitDumpRecordHeader, JitDumpRecordType,
};
use linux_perf_data::linux_perf_event_reader::RawData;

/// Most bytes of the file's header: 40 today.
pub const MAX_HEADER: usize = 4 << 10;

/// Only programs with this machine's byte order are profiled.
const ORDER: Endianness = Endianness::LittleEndian;

/// Where the first record begins, given the first [`MAX_HEADER`] bytes of a file. `None`: it is not such a file, has another byte
/// order, or its header is incomplete.
#[must_use]
pub fn first_record(bytes: &[u8]) -> Option<usize> {
    let header = JitDumpHeader::parse(RawData::Single(bytes)).ok().filter(|header| &header.magic == b"DTiJ")?;
    usize::try_from(header.total_size).ok()
}

impl MadeFunctions {
    /// Adds what the records of a `jitdump` say, in order, and returns how many bytes the complete ones took. A record longer than all
    /// of `bytes` is not complete: its size is [`first_size`].
    pub fn add_jitdump(&mut self, bytes: &[u8]) -> usize {
        let mut at = 0;
        while let Some((kind, size)) = first_of(&bytes[at..])
            && let Some(record) = bytes[at..].get(..size)
        {
            self.add_record(kind, &record[JitDumpRecordHeader::SIZE..]);
            at += size;
        }
        at
    }

    fn add_record(&mut self, kind: JitDumpRecordType, body: &[u8]) {
        let body = RawData::Single(body);
        match kind {
            JitDumpRecordType::JIT_CODE_LOAD => {
                let Ok(load) = JitCodeLoadRecord::parse(ORDER, body) else { return };
                let size = load.code_bytes.len() as u64;
                if let Some(end) = load.code_addr.checked_add(size) {
                    self.add(load.code_addr..end, &load.function_name.as_slice());
                }
            }
            JitDumpRecordType::JIT_CODE_MOVE => {
                let Ok(moved) = JitCodeMoveRecord::parse(ORDER, body) else { return };
                if let Some(name) = self.remove(moved.old_code_addr)
                    && let Some(end) = moved.new_code_addr.checked_add(moved.code_size)
                {
                    self.add(moved.new_code_addr..end, &name);
                }
            }
            // Lines, unwind rules, and what later versions of the format add.
            _ => {}
        }
    }
}

/// Size of the first record, according to its header. `None`: the header is incomplete, or gives less than its own size, in which case
/// nothing that follows can be read either.
#[must_use]
pub fn first_size(bytes: &[u8]) -> Option<usize> {
    Some(first_of(bytes)?.1)
}

fn first_of(bytes: &[u8]) -> Option<(JitDumpRecordType, usize)> {
    let header = JitDumpRecordHeader::parse(ORDER, RawData::Single(bytes)).ok()?;
    let size = usize::try_from(header.total_size).ok().filter(|&size| size >= JitDumpRecordHeader::SIZE)?;
    Some((header.record_type, size))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn record(kind: u32, body: &[u8]) -> Vec<u8> {
        let size = u32::try_from(16 + body.len()).unwrap();
        [&kind.to_le_bytes()[..], &size.to_le_bytes(), &7_u64.to_le_bytes(), body].concat()
    }

    fn words(words: &[u64]) -> Vec<u8> {
        [&[0; 8][..], &words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>()].concat()
    }

    /// A record of a function, with that many bytes of its code.
    pub(crate) fn load(start: u64, size: u64, name: &[u8], code: usize) -> Vec<u8> {
        record(0, &[&words(&[start, start, size, 1])[..], name, b"\0", &vec![0xc3; code]].concat())
    }

    fn moved(from: u64, to: u64, size: u64) -> Vec<u8> {
        record(1, &words(&[to, from, to, size, 1]))
    }

    #[test]
    fn functions_are_loaded_and_moved() {
        let bytes = [
            load(0x1000, 16, b"first", 16),
            record(4, &[0; 40]),
            load(0x2000, 8, b"second", 8),
            moved(0x1000, 0x3000, 16),
            moved(0x9000, 0x2000, 8),
            load(0x2004, 8, b"third", 8),
            load(u64::MAX, 8, b"nowhere", 8),
            load(0x4000, 9, b"more than there is", 8),
            record(77, &[1; 5]),
        ]
        .concat();
        let mut made = MadeFunctions::default();
        assert_eq!(made.add_jitdump(&bytes), bytes.len());
        let names =
            [0x1000, 0x2000, 0x2004, 0x3000, 0x300f, 0x3010, 0x4000].map(|at| made.name(at).map(<[u8]>::to_vec));
        let (first, third) = (Some(b"first".to_vec()), Some(b"third".to_vec()));
        assert_eq!(names, [None, None, third, first.clone(), first, None, None]);
    }

    #[test]
    fn what_is_not_whole_is_left() {
        let (first, second) = (load(0x1000, 16, b"first", 16), load(0x2000, 8, b"second", 8));
        let bytes = [&first[..], &second].concat();
        for cut in 0..=bytes.len() {
            let mut made = MadeFunctions::default();
            let whole = if cut == bytes.len() { cut } else { first.len() * usize::from(cut >= first.len()) };
            assert_eq!(made.add_jitdump(&bytes[..cut]), whole, "{cut}");
        }
        assert_eq!(first_size(&bytes), Some(first.len()));
    }

    #[test]
    fn a_record_that_is_smaller_than_its_header_ends_the_file() {
        for size in [0_u32, 15] {
            let bytes = [&0_u32.to_le_bytes()[..], &size.to_le_bytes(), &[0; 64]].concat();
            assert_eq!((MadeFunctions::default().add_jitdump(&bytes), first_size(&bytes)), (0, None));
        }
    }

    #[test]
    fn a_header_tells_where_records_begin() {
        let header = |magic: &[u8], size: u32| {
            [magic, &1_u32.to_le_bytes(), &size.to_le_bytes(), &62_u32.to_le_bytes(), &[0; 24], &[0xff; 24]].concat()
        };
        assert_eq!(first_record(&header(b"DTiJ", 40)), Some(40));
        assert_eq!(first_record(&header(b"DTiJ", 64)), Some(64));
        for broken in [header(b"JiTD", 40), header(b"\x7fELF", 40), header(b"DTiJ", 39), header(b"DTiJ", u32::MAX)] {
            assert_eq!(first_record(&broken), None, "{broken:?}");
        }
        assert_eq!((first_record(b""), first_record(&header(b"DTiJ", 40)[..39])), (None, None));
    }
}
