//! Requests to helpers, and where their answers go.

use super::message::{CHUNK, FOUND, Found, Kind, MAX_PAGES, MAX_PATHS, PAGE, Request};
use super::{For, Refused, aside};
use crate::types::Pid;
use nix::errno::Errno;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Where an answer goes.
pub(super) trait Into {
    /// Where the next packet's bytes go.
    fn room(&mut self) -> &mut [u8];
    /// This many bytes came.
    fn took(&mut self, len: usize);
}

/// Into memory of a known length.
struct Filled<'a> {
    bytes: &'a mut [u8],
    len: usize,
}

impl Into for Filled<'_> {
    fn room(&mut self) -> &mut [u8] {
        &mut self.bytes[self.len..]
    }

    fn took(&mut self, len: usize) {
        self.len = (self.len + len).min(self.bytes.len());
    }
}

/// Into a vector that grows. Its room is memory that is already zero: filling 64 KiB for each answer took a third of the
/// work that an unoptimised build does for a process that starts.
struct Grown {
    bytes: Vec<u8>,
    len: usize,
}

impl Grown {
    fn with_room(len: usize) -> Self {
        Self { bytes: vec![0; len.max(CHUNK)], len: 0 }
    }

    fn into_bytes(mut self) -> Vec<u8> {
        self.bytes.truncate(self.len);
        self.bytes
    }
}

impl Into for Grown {
    fn room(&mut self) -> &mut [u8] {
        if self.bytes.len() < self.len + CHUNK {
            let mut larger = vec![0; 2 * (self.len + CHUNK)];
            larger[..self.len].copy_from_slice(&self.bytes[..self.len]);
            self.bytes = larger;
        }
        &mut self.bytes[self.len..][..CHUNK]
    }

    fn took(&mut self, len: usize) {
        self.len += len.min(CHUNK);
    }
}

/// Reads a process's memory; returns how much of it could be read.
pub(in crate::remote) fn memory(pid: Pid, addr: u64, into: &mut [u8]) -> Result<usize, Refused> {
    let request = Request { kind: Kind::Memory, pid: pid.as_raw(), addr, len: into.len() as u64 };
    let mut filled = Filled { bytes: into, len: 0 };
    aside().ask(For::process(pid), &request, (&[], None), &mut filled)?;
    Ok(filled.len)
}

/// Reads pages of a process's memory, by their numbers, one after the other, up to the first that cannot be read.
pub(in crate::remote) fn pages(pid: Pid, numbers: &[u64]) -> Result<Vec<Box<[u8; PAGE]>>, Refused> {
    let mut pages = Vec::with_capacity(numbers.len());
    for numbers in numbers.chunks(MAX_PAGES) {
        let request = Request { kind: Kind::Pages, pid: pid.as_raw(), addr: 0, len: numbers.len() as u64 };
        let listed: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        let mut grown = Grown::with_room(numbers.len() * PAGE + CHUNK);
        aside().ask(For::process(pid), &request, (&listed, None), &mut grown)?;
        pages.extend(grown.into_bytes().as_chunks::<PAGE>().0.iter().map(|page| Box::new(*page)));
        if pages.len() % MAX_PAGES != 0 {
            break;
        }
    }
    Ok(pages)
}

/// Reads a whole file of `/proc/PID`, up to `most` bytes: such a file's length is not known in advance.
pub(in crate::remote) fn whole(pid: Pid, path: &str, most: u64) -> Result<Vec<u8>, Refused> {
    let request = Request { kind: Kind::Whole, pid: 0, addr: 0, len: most };
    let mut grown = Grown::with_room(0);
    aside().ask(For::process(pid), &request, (&paths(&[path.as_bytes()])?, None), &mut grown)?;
    Ok(grown.into_bytes())
}

/// Finds what is at a path, or at one below a root directory that symbolic links cannot leave, without opening it.
pub(in crate::remote) fn find(whose: For, root_and_path: &[&[u8]]) -> Result<(Found, OwnedFd), Refused> {
    let request = Request { kind: Kind::Find, pid: 0, addr: 0, len: 0 };
    let mut bytes = [0; FOUND];
    let mut filled = Filled { bytes: &mut bytes, len: 0 };
    let handle = aside().ask(whose, &request, (&paths(root_and_path)?, None), &mut filled)?;
    let found = Found::parse(&bytes).zip(handle);
    found.ok_or(Refused::Errno(Errno::EIO))
}

/// Reads a part of a file that was found; returns how much of it there is.
pub(in crate::remote) fn file(
    whose: For,
    handle: BorrowedFd<'_>,
    offset: u64,
    into: &mut [u8],
) -> Result<usize, Refused> {
    let request = Request { kind: Kind::File, pid: 0, addr: offset, len: into.len() as u64 };
    let mut filled = Filled { bytes: into, len: 0 };
    aside().ask(whose, &request, (&[], Some(handle)), &mut filled)?;
    Ok(filled.len)
}

/// Paths in the form of a request.
fn paths(paths: &[&[u8]]) -> Result<Vec<u8>, Errno> {
    let bytes = paths.iter().flat_map(|path| path.iter().copied().chain([0])).collect::<Vec<u8>>();
    if bytes.iter().filter(|&&byte| byte == 0).count() > paths.len() {
        return Err(Errno::EINVAL);
    }
    if bytes.len() > MAX_PATHS { Err(Errno::ENAMETOOLONG) } else { Ok(bytes) }
}
