//! The `jitdump` file of a process, followed as it grows.

use crate::remote::elf::ReadAt as _;
use crate::remote::{MappedFile, Mapping, RemoteProcess, TargetFile};
use crate::symbolize::native::MadeFunctions;
use crate::symbolize::native::jitdump::{MAX_HEADER, first_record, first_size};

/// Bytes that are read at a time. A function with more code gets no name: its name comes before its code, but nothing is known to
/// write functions that large.
const CHUNK: usize = 1 << 20;
/// Most bytes that are read in one look: the next look goes on from there.
const MOST: usize = 16 << 20;

/// What has been read of one such file.
#[derive(Debug, Default)]
pub(super) struct JitDump {
    /// Which file it is, and where its first unread record begins.
    at: Option<Place>,
    functions: MadeFunctions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    dev: u64,
    inode: u64,
    next: u64,
}

/// The file that a process has mapped for `perf` to find, wherever it lies: mapped executable, and named after the pid that the
/// process has in its own namespace (`jit_detect()`, tools/perf/util/jitdump.c). A child has its parent's file mapped as well,
/// which the parent goes on writing.
pub(super) fn file_of(process: &RemoteProcess, maps: &[Mapping]) -> Option<MappedFile> {
    let told = |mapping: &&Mapping| mapping.executable && mapping.name().starts_with("jit-");
    let mut candidates = maps.iter().filter(told).peekable();
    candidates.peek()?;
    let name = format!("jit-{}.dump", process.ns_pids().ok()?.last()?);
    let mapping = candidates.find(|mapping| mapping.name() == name)?;
    process.mapped_file(mapping).ok()
}

impl JitDump {
    /// Reads what has been added. Nothing is forgotten when the file is gone: the code that it describes is still there.
    pub fn follow(&mut self, file: Option<&MappedFile>) {
        let Some(file) = file else { return };
        let identity = file.identity();
        let known = self.at.filter(|at| (at.dev, at.inode) == (identity.dev, identity.inode));
        // Shorter than before: it was rewritten.
        let known = known.filter(|at| at.next <= identity.size);
        if known.is_some_and(|at| at.next == identity.size) {
            return;
        }
        let Ok(file) = file.open() else { return };
        let next = match known {
            Some(at) => at.next,
            None => {
                self.functions = MadeFunctions::default();
                let mut header = [0; MAX_HEADER];
                let got = file.read_at(&mut header, 0).unwrap_or(0);
                let Some(first) = first_record(&header[..got]) else { return };
                first as u64
            }
        };
        let next = read_records(&file, next, identity.size, &mut self.functions);
        self.at = Some(Place { dev: identity.dev, inode: identity.inode, next });
    }

    /// A value that changes whenever something new was read.
    pub fn place(&self) -> Option<Place> {
        self.at
    }

    pub fn functions(&self) -> &MadeFunctions {
        &self.functions
    }
}

/// Reads the records between two places of a file, and returns where the first unread one begins.
fn read_records(file: &TargetFile, mut next: u64, end: u64, functions: &mut MadeFunctions) -> u64 {
    let most = next.saturating_add(MOST as u64).min(end);
    let mut chunk = vec![0; usize::try_from(end.saturating_sub(next)).map_or(CHUNK, |all| all.min(CHUNK))];
    while next < most {
        let len = usize::try_from(end - next).map_or(chunk.len(), |left| left.min(chunk.len()));
        if file.read_exact_at(next, &mut chunk[..len]).is_err() {
            break;
        }
        let done = match functions.add_jitdump(&chunk[..len]) {
            // Still incomplete, unless it is too long.
            0 => match first_size(&chunk[..len]) {
                Some(size) if size > CHUNK && next.saturating_add(size as u64) <= end => size,
                _ => break,
            },
            done => done,
        };
        next += done as u64;
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::symbolize::native::jitdump::tests::load;
    use std::io::Write as _;

    fn record(name: &str, start: u64, code: usize) -> Vec<u8> {
        load(start, code as u64, name.as_bytes(), code)
    }

    #[test]
    fn records_are_read_as_they_come() {
        let mut written = tempfile::tempfile().unwrap();
        let file = TargetFile::from(written.try_clone().unwrap());
        let mut functions = MadeFunctions::default();
        let (first, second) = (record("first", 0x1000, 16), record("second", 0x2000, 16));
        written.write_all(&first).unwrap();
        written.write_all(&second[..20]).unwrap();
        let next = read_records(&file, 0, (first.len() + 20) as u64, &mut functions);
        assert_eq!((next, functions.name(0x2000)), (first.len() as u64, None));
        assert_eq!(functions.name(0x1000), Some(&b"first"[..]));
        written.write_all(&second[20..]).unwrap();
        let end = (first.len() + second.len()) as u64;
        assert_eq!(read_records(&file, next, end, &mut functions), end);
        assert_eq!(functions.name(0x2000), Some(&b"second"[..]));
    }

    #[test]
    fn one_that_is_too_long_is_passed_over() {
        let mut written = tempfile::tempfile().unwrap();
        let file = TargetFile::from(written.try_clone().unwrap());
        let mut functions = MadeFunctions::default();
        let bytes = [record("long", 0x10_0000, 2 * CHUNK), record("short", 0x2000, 16)].concat();
        written.write_all(&bytes).unwrap();
        assert_eq!(read_records(&file, 0, bytes.len() as u64, &mut functions), bytes.len() as u64);
        assert_eq!((functions.name(0x10_0000), functions.name(0x2000)), (None, Some(&b"short"[..])));
    }

    /// However large a file is, no more than so much of it is read at a time.
    #[test]
    fn a_look_has_an_end() {
        let mut written = tempfile::tempfile().unwrap();
        let file = TargetFile::from(written.try_clone().unwrap());
        let one = record("again", 0x1000, CHUNK / 2);
        for _ in 0..64 {
            written.write_all(&one).unwrap();
        }
        let end = 64 * one.len() as u64;
        let next = read_records(&file, 0, end, &mut MadeFunctions::default());
        assert!(next >= MOST as u64 && next < MOST as u64 + CHUNK as u64, "{next} of {end}");
    }
}
