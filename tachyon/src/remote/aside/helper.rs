//! What the helper processes do. They are forked from a program with threads: nothing here allocates, panics or returns.

use std::ffi::CStr;
use std::io::{IoSlice, IoSliceMut, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::stat::{Mode, fstat};
use nix::sys::statfs::fstatfs;
use nix::sys::uio::{RemoteIoVec, pread, process_vm_readv};
use nix::unistd::{ForkResult, Pid, chdir, fork, read};

use super::super::open_files;
use super::message::{self, CHUNK, Found, Kind, MAX_PATHS, PAGE, REQUEST, Reply, Request};
use crate::types::KtimeNs;

/// Most helpers that one recorder makes in its life: all but a few of them will have been left behind in a read that
/// never returned.
const MAX_HELPERS: usize = 256;

/// Forks the process that makes helpers. It is small, because it is forked early, and has one thread.
///
/// # Errors
/// When the process cannot be made.
pub(super) fn start_nursery() -> Result<OwnedFd, Errno> {
    let (ours, theirs) = pair()?;
    // No signal handler of this program may run in a child.
    let mask = SigSet::all().thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_SETMASK)?;
    // SAFETY: the children only use data on their stacks and system calls, and leave through `_exit`.
    let forked = unsafe { fork() };
    if let Ok(ForkResult::Child) = forked {
        // Forked once more, so that code that waits for the caller's children never sees it. SAFETY: as above.
        if let Ok(ForkResult::Child) = unsafe { fork() } {
            nursery(theirs.as_raw_fd());
        }
        exit();
    }
    let restored = mask.thread_set_mask();
    if let ForkResult::Parent { child } = forked? {
        // The caller may itself be waiting for any child to end.
        let _waited_for = nix::sys::wait::waitpid(child, None);
    }
    restored?;
    Ok(ours)
}

fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
}

fn exit() -> ! {
    // SAFETY: it does not return, and runs no handler.
    unsafe { libc::_exit(0) }
}

/// Makes helpers until the recorder is gone, then kills those that can be killed.
fn nursery(socket: RawFd) -> ! {
    become_helper(socket);
    // From here on, descriptor and children belong to this process. SAFETY: it is open, and nothing else in this
    // process owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let mut helpers = [None; MAX_HELPERS];
    let mut word = [0; 1];
    for slot in &mut helpers {
        if !message::receive(socket.as_fd(), &mut word).is_ok_and(|(len, _)| len > 0) {
            break;
        }
        let Ok((ours, theirs)) = pair() else { break };
        // SAFETY: as in `start_nursery`; this process has one thread.
        match unsafe { fork() } {
            Ok(ForkResult::Child) => {
                drop((ours, socket));
                serve(&theirs);
            }
            Ok(ForkResult::Parent { child }) => {
                // It is never waited for, so that its pid stays its own until this process ends.
                *slot = Some(child);
                let word = child.as_raw().to_ne_bytes();
                if message::send(socket.as_fd(), &[IoSlice::new(&word)], Some(ours.as_fd())).is_err() {
                    break;
                }
            }
            Err(_) => break,
        }
    }
    // When no more can be made, the existing ones go on.
    while message::receive(socket.as_fd(), &mut word).is_ok_and(|(len, _)| len > 0) {
        let none = 0_i32.to_ne_bytes();
        let _gone = message::send(socket.as_fd(), &[IoSlice::new(&none)], None);
    }
    for helper in helpers.into_iter().flatten() {
        // This may not reach one that waits in the kernel for a page: it is left behind.
        let _ended = kill(helper, Signal::SIGKILL);
    }
    exit();
}

/// Closes everything that a helper inherited from its recorder and does not need: above all standard output, whose reader
/// waits for its end.
fn become_helper(socket: RawFd) {
    let _named = nix::sys::prctl::set_name(c"tachyon-reader-");
    let _moved = chdir(c"/");
    // If the kernel refuses, they stay open.
    // SAFETY: nothing in this process uses the others any more.
    let _refused = unsafe { open_files::close_all_but(&[socket]) };
    // The asking thread keeps its CPU meanwhile: if all CPUs are busy, each answer would otherwise come a time slice
    // later. Helpers do only a little at a time.
    let lowest: libc::c_int = 1;
    // SAFETY: the parameter, the kernel's `struct sched_param`, outlives the call; 0 means the calling thread. If it is
    // refused, answers come later.
    unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, libc::SCHED_RR, &raw const lowest) };
    // If this fails, the helper merely has more rights than it needs.
    let _kept = keep_rights();
}

/// The capabilities that helpers use: for other users' memory and files, and the files behind mappings.
const NEEDED: u64 = 1 << CAP_DAC_READ_SEARCH | 1 << CAP_SYS_PTRACE | 1 << CAP_CHECKPOINT_RESTORE;
/// Numbers of include/uapi/linux/capability.h.
const CAP_DAC_READ_SEARCH: u32 = 2;
const CAP_SYS_PTRACE: u32 = 19;
const CAP_CHECKPOINT_RESTORE: u32 = 40;

/// Drops all other capabilities. (The crate for this allocates.)
fn keep_rights() -> Result<(), Errno> {
    // `_LINUX_CAPABILITY_VERSION_3`, and the calling thread.
    let mut header = [0x2008_0522_u32, 0];
    // Effective, permitted and inheritable; their lower halves, then the upper ones.
    let mut sets = [[0_u32; 3]; 2];
    // SAFETY: both have the kernel's layout and outlive the call.
    let got = unsafe { libc::syscall(libc::SYS_capget, header.as_mut_ptr(), sets.as_mut_ptr()) };
    Errno::result(got)?;
    for ([effective, permitted, inheritable], needed) in sets.iter_mut().zip([NEEDED as u32, (NEEDED >> 32) as u32]) {
        (*effective, *permitted, *inheritable) = (*effective & needed, *permitted & needed, 0);
    }
    // SAFETY: as above.
    let set = unsafe { libc::syscall(libc::SYS_capset, header.as_mut_ptr(), sets.as_ptr()) };
    Errno::result(set).map(drop)
}

/// Answers requests until the other side is gone.
fn serve(socket: &OwnedFd) -> ! {
    let mut request = [0; REQUEST + MAX_PATHS];
    let mut chunk = [0; CHUNK];
    loop {
        let (len, file) = match message::receive(socket.as_fd(), &mut request) {
            Ok((0, _)) | Err(_) => exit(),
            Ok(received) => received,
        };
        let Some((asked, paths)) = request.get(..len).and_then(Request::parse) else { exit() };
        let mut answer = Answer { socket: socket.as_fd(), waited: 0 };
        let result = match asked.kind {
            Kind::Memory => answer.memory(&asked, &mut chunk),
            Kind::Whole => answer.whole(&asked, paths, &mut chunk),
            Kind::Find => answer.find(paths),
            Kind::File => answer.file(&asked, file, &mut chunk),
            Kind::Pages => answer.pages(&asked, paths, &mut chunk),
        };
        // If the recorder is gone, the next receive shows the end.
        let _gone = match result {
            Ok(()) => Ok(()),
            Err(errno) => answer.send(errno as i32, true, &[], None),
        };
    }
}

/// An answer under way.
struct Answer<'a> {
    socket: BorrowedFd<'a>,
    /// Microseconds for which the reads so far slept, waiting for what they needed.
    waited: u32,
}

impl Answer<'_> {
    fn send(&self, errno: i32, last: bool, bytes: &[u8], file: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        let reply = Reply { errno, last: u32::from(last), waited_us: self.waited };
        message::send(self.socket, &[IoSlice::new(&reply.bytes()), IoSlice::new(bytes)], file)
    }

    /// Runs `act`, and notes how long it slept. Time spent waiting for a CPU does not count.
    fn timed<T>(&mut self, act: impl FnOnce() -> T) -> T {
        let slept = || getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.voluntary_context_switches());
        let (before, start) = (slept(), KtimeNs::now().0);
        let result = act();
        if slept() > before {
            let took = KtimeNs::now().0.saturating_sub(start) / 1000;
            self.waited = self.waited.saturating_add(u32::try_from(took).unwrap_or(u32::MAX));
        }
        result
    }

    fn memory(&mut self, asked: &Request, chunk: &mut [u8; CHUNK]) -> Result<(), Errno> {
        let pid = Pid::from_raw(asked.pid);
        let (mut base, mut left) = (asked.addr as usize, asked.len as usize);
        loop {
            let len = left.min(CHUNK);
            let Some(into) = chunk.get_mut(..len) else { return Err(Errno::EINVAL) };
            let from = [RemoteIoVec { base, len }];
            let got = self.timed(|| process_vm_readv(pid, &mut [IoSliceMut::new(into)], &from));
            let got = match got {
                // Returns what was read before, and that there is no more.
                Err(_) if left < asked.len as usize => 0,
                got => got?,
            };
            (base, left) = (base.wrapping_add(got), left.saturating_sub(got));
            let last = got < len || left == 0;
            self.send(0, last, chunk.get(..got).unwrap_or_default(), None)?;
            if last {
                return Ok(());
            }
        }
    }

    /// Pages of a process's memory, by their numbers, up to the first that cannot be read.
    fn pages(&mut self, asked: &Request, numbers: &[u8], chunk: &mut [u8; CHUNK]) -> Result<(), Errno> {
        const AT_ONCE: usize = CHUNK / PAGE;
        let pid = Pid::from_raw(asked.pid);
        let mut groups = numbers.as_chunks::<8>().0.chunks(AT_ONCE).peekable();
        while let Some(numbers) = groups.next() {
            let mut from = [RemoteIoVec { base: 0, len: 0 }; AT_ONCE];
            for (from, number) in from.iter_mut().zip(numbers) {
                let base = u64::from_ne_bytes(*number).wrapping_mul(PAGE as u64) as usize;
                *from = RemoteIoVec { base, len: PAGE };
            }
            let (Some(from), Some(into)) = (from.get(..numbers.len()), chunk.get_mut(..numbers.len() * PAGE)) else {
                return Err(Errno::EINVAL);
            };
            let got = self.timed(|| process_vm_readv(pid, &mut [IoSliceMut::new(into)], from));
            // The first one of them cannot be read.
            let got = got.or_else(|errno| if errno == Errno::EFAULT { Ok(0) } else { Err(errno) })?;
            let last = got < numbers.len() * PAGE || groups.peek().is_none();
            self.send(0, last, chunk.get(..got).unwrap_or_default(), None)?;
            if last {
                return Ok(());
            }
        }
        self.send(0, true, &[], None)
    }

    /// A whole file of `/proc`, up to `len` bytes.
    fn whole(&mut self, asked: &Request, paths: &[u8], chunk: &mut [u8; CHUNK]) -> Result<(), Errno> {
        let path = CStr::from_bytes_until_nul(paths).map_err(|_| Errno::EINVAL)?;
        let file = self.timed(|| open(path, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty()))?;
        let mut left = asked.len as usize;
        loop {
            let (mut filled, mut last) = (0, false);
            // The kernel returns a page at a time.
            while filled < left.min(CHUNK) && !last {
                let Some(into) = chunk.get_mut(filled..left.min(CHUNK)) else { return Err(Errno::EINVAL) };
                let got = self.timed(|| read(&file, into))?;
                (filled, last) = (filled + got, got == 0);
            }
            left = left.saturating_sub(filled);
            last |= left == 0;
            self.send(0, last, chunk.get(..filled).unwrap_or_default(), None)?;
            if last {
                return Ok(());
            }
        }
    }

    /// What is at a path, or at one below a root directory.
    fn find(&mut self, paths: &[u8]) -> Result<(), Errno> {
        let first = CStr::from_bytes_until_nul(paths).map_err(|_| Errno::EINVAL)?;
        let rest = paths.get(first.count_bytes() + 1..).unwrap_or_default();
        let handle = match CStr::from_bytes_until_nul(rest) {
            Err(_) => self.timed(|| open(first, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()))?,
            Ok(below) => self.timed(|| {
                let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
                let root = open(first, flags, Mode::empty())?;
                let how = OpenHow::new()
                    .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
                    .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
                openat2(&root, below, how)
            })?,
        };
        let (stat, system) = self.timed(|| (fstat(&handle), fstatfs(&handle)));
        let (stat, system) = (stat?, system?);
        #[allow(clippy::unnecessary_cast, reason = "musl has another type")]
        let system = system.filesystem_type().0 as i64;
        let found = Found {
            dev: stat.st_dev,
            inode: stat.st_ino,
            mtime_s: stat.st_mtime,
            mtime_ns: stat.st_mtime_nsec,
            size: stat.st_size.unsigned_abs(),
            regular: u64::from(stat.st_mode & libc::S_IFMT == libc::S_IFREG),
            system,
            owner: u64::from(stat.st_uid),
        };
        self.send(0, true, &found.bytes(), Some(handle.as_fd()))
    }

    /// A part of a file that was found.
    fn file(&mut self, asked: &Request, handle: Option<OwnedFd>, chunk: &mut [u8; CHUNK]) -> Result<(), Errno> {
        let handle = handle.ok_or(Errno::EBADF)?;
        let mut path = [0; 32];
        let written = write!(&mut path[..], "/proc/self/fd/{}\0", handle.as_raw_fd());
        let path = CStr::from_bytes_until_nul(&path).ok().filter(|_| written.is_ok()).ok_or(Errno::EINVAL)?;
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let file = self.timed(|| open(path, flags, Mode::empty()))?;
        let (mut at, mut left) = (asked.addr as i64, asked.len as usize);
        loop {
            let Some(into) = chunk.get_mut(..left.min(CHUNK)) else { return Err(Errno::EINVAL) };
            let got = if into.is_empty() { 0 } else { self.timed(|| pread(&file, into, at))? };
            (at, left) = (at.saturating_add(got as i64), left.saturating_sub(got));
            self.send(0, got == 0 || left == 0, chunk.get(..got).unwrap_or_default(), None)?;
            if got == 0 || left == 0 {
                return Ok(());
            }
        }
    }
}
