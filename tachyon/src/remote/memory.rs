//! The target's memory, through `process_vm_readv` in a process that may be left behind.

use std::io::{self, IoSliceMut};

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd;
use tachyon_common::walk::{Unreadable, UserMemory};

use super::aside::{self, PAGE, Refused};
use super::{RemoteError, RemoteProcess};
use crate::types::RemoteAddr;

impl RemoteProcess {
    /// Fills `into` from the target's memory, completely or not at all.
    ///
    /// # Errors
    /// When any byte of it cannot be read; needs ptrace rights on the target.
    pub fn read_memory(&self, addr: RemoteAddr, into: &mut [u8]) -> Result<(), RemoteError> {
        let len = into.len();
        if len == 0 {
            return Ok(());
        }
        let error = |source: io::Error| RemoteError::Memory { pid: self.pid(), addr, len, source };
        let got = match aside::memory(self.pid(), addr.0, into) {
            // A security module may let only a process's ancestor look into it (Yama).
            Err(Refused::Errno(Errno::EPERM) | Refused::NoHelper) => self.read_memory_here(addr, into),
            Err(Refused::Errno(errno)) => Err(errno),
            Err(refused @ Refused::NotWaitedFor) => return Err(error(refused.into())),
            Ok(got) => Ok(got),
        };
        let got = got.map_err(|errno| match errno {
            Errno::ESRCH => RemoteError::NoSuchProcess(self.pid()),
            _ => error(errno.into()),
        })?;
        if got == len { Ok(()) } else { Err(RemoteError::Short { pid: self.pid(), addr, len, got }) }
    }

    /// Reads whole pages by their numbers (address / [`PAGE`]), one after the other, up to the first that cannot be read. All are
    /// from nearly the same moment.
    #[must_use]
    pub fn read_pages(&self, numbers: &[u64]) -> Vec<Box<[u8; PAGE]>> {
        let here = |number: &u64| {
            let mut page = Box::new([0; PAGE]);
            let got = self.read_memory_here(RemoteAddr(number.wrapping_mul(PAGE as u64)), &mut page[..]);
            (got == Ok(PAGE)).then_some(page)
        };
        match aside::pages(self.pid(), numbers) {
            Ok(pages) => pages,
            // As in `read_memory`.
            Err(Refused::Errno(Errno::EPERM) | Refused::NoHelper) => numbers.iter().map_while(here).collect(),
            Err(_) => Vec::new(),
        }
    }

    /// The same, done by this thread itself, which blocks until it is done.
    fn read_memory_here(&self, addr: RemoteAddr, into: &mut [u8]) -> Result<usize, Errno> {
        // An address beyond the pointer's width cannot be mapped.
        let base = usize::try_from(addr.0).map_err(|_| Errno::EFAULT)?;
        let remote = [RemoteIoVec { base, len: into.len() }];
        process_vm_readv(unistd::Pid::from_raw(self.pid().as_raw()), &mut [IoSliceMut::new(into)], &remote)
    }

    /// Reads a fixed number of bytes.
    ///
    /// # Errors
    /// As [`RemoteProcess::read_memory`].
    pub fn read_array<const N: usize>(&self, addr: RemoteAddr) -> Result<[u8; N], RemoteError> {
        let mut bytes = [0; N];
        self.read_memory(addr, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads a 64-bit word, e.g. a pointer.
    ///
    /// # Errors
    /// As [`RemoteProcess::read_memory`].
    pub fn read_u64(&self, addr: RemoteAddr) -> Result<u64, RemoteError> {
        self.read_array(addr).map(u64::from_ne_bytes)
    }

    /// Reads a 32-bit word.
    ///
    /// # Errors
    /// As [`RemoteProcess::read_memory`].
    pub fn read_u32(&self, addr: RemoteAddr) -> Result<u32, RemoteError> {
        self.read_array(addr).map(u32::from_ne_bytes)
    }
}

impl UserMemory for RemoteProcess {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        self.read_memory(RemoteAddr(addr), into).map_err(|_| Unreadable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Pid;

    fn myself() -> RemoteProcess {
        RemoteProcess::open(Pid(std::process::id())).expect("this process exists")
    }

    #[test]
    fn reads_what_is_there() {
        let here = 0x1122_3344_5566_7788_u64;
        let addr = RemoteAddr(std::ptr::from_ref(&here) as u64);
        assert_eq!(myself().read_u64(addr).expect("our own stack can be read"), here);
    }

    #[test]
    fn unmapped_noncanonical_and_huge_reads_are_errors() {
        let process = myself();
        for addr in [0, 8, 0x8000_0000_0000, 1 << 63, u64::MAX - 7, u64::MAX] {
            assert!(process.read_u64(RemoteAddr(addr)).is_err(), "{addr:#x}");
            assert_eq!(process.read(addr, &mut [0; 16]), Err(Unreadable));
        }
    }

    #[test]
    fn a_read_past_the_end_of_a_mapping_is_short() {
        let last = myself().maps().expect("own maps");
        let stack = last.iter().find(|map| map.path == crate::remote::MappedPath::Special(b"[stack]".to_vec()));
        let end = stack.expect("a process has a stack").end;
        let error = myself().read_array::<{ 1 << 14 }>(RemoteAddr(end - 4096)).expect_err("the end is in between");
        assert!(matches!(error, RemoteError::Short { got: 4096, .. }), "{error}");
    }

    #[test]
    fn pages_are_read_up_to_the_first_that_is_not_there() {
        let bytes: Vec<u8> = (0..64 * PAGE).map(|at| (at / PAGE) as u8).collect();
        let first = (bytes.as_ptr() as u64).div_ceil(PAGE as u64);
        let shift = (first * PAGE as u64 - bytes.as_ptr() as u64) as usize;
        let expected = |page: u64| &bytes[shift + page as usize * PAGE..][..PAGE];
        // Out of order, and more than fit into one packet.
        let mut wanted: Vec<u64> = (0..60).rev().collect();
        wanted.extend([7, 7]);
        let numbers = |wanted: &[u64]| wanted.iter().map(|page| first + page).collect::<Vec<u64>>();
        let read = myself().read_pages(&numbers(&wanted));
        assert_eq!(read.len(), wanted.len());
        assert!(wanted.iter().zip(&read).all(|(&page, read)| read[..] == *expected(page)));
        for gap in [0, 5, 16, 40] {
            let mut with_gap = numbers(&wanted);
            with_gap.insert(gap, 0);
            assert_eq!(myself().read_pages(&with_gap).len(), gap);
        }
        let many: Vec<u64> = wanted.iter().cycle().take(2500).copied().collect();
        assert_eq!(myself().read_pages(&numbers(&many)).len(), 2500);
        assert!(myself().read_pages(&[]).is_empty());
    }

    #[test]
    fn a_process_that_is_gone_says_so() {
        let mut child = std::process::Command::new("true").spawn().expect("true runs");
        let process = RemoteProcess::open(Pid(child.id())).expect("not waited for yet");
        child.wait().expect("true ends");
        assert!(process.read_u64(RemoteAddr(4096)).expect_err("gone").is_gone());
        assert!(process.maps().expect_err("gone").is_gone());
        assert!(RemoteProcess::open(process.pid()).is_err());
    }
}
