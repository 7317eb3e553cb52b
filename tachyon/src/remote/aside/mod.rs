//! Reads that may never return, done by processes that can be left behind.
//!
//! A page of a target's memory may belong to a file system whose server has stopped answering, or to a handler of page faults
//! that never fills it (`userfaultfd`), and so may any byte of a file that it has mapped. A thread that reads such a page
//! sleeps in the kernel, perhaps beyond the reach of signals, and a process with such a thread cannot end. No prior check can
//! rule that out: mappings change between the check and the read. So such reads are done by small helper processes. One that
//! does not answer in time is abandoned, another takes its place, and nothing more is read from the owner of that page
//! ([`ledger`](super::ledger)). A read takes some ten microseconds this way.

mod helper;
mod message;
mod reads;

use std::cell::RefCell;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike as _};

pub(super) use self::message::Found;
pub use self::message::PAGE;
use self::message::{Kind, REPLY, Reply, Request};
use self::reads::Into;
pub(super) use self::reads::{file, find, memory, pages, whole};
use super::ledger::{self, Debtor};
use super::status::parse_stat;
use crate::types::Pid;

/// How long to wait for an answer without giving up the CPU: most come within this.
const SPIN: Duration = Duration::from_micros(100);
/// How long to wait for a helper before checking what it does.
const SLICE: Duration = Duration::from_millis(20);
/// How long a page that is not in memory may take: a busy disk delivers it within this.
const MEMORY: Duration = Duration::from_millis(100);
/// How long a part of a file may take: servers of file systems are further away than disks.
const FILE: Duration = Duration::from_millis(500);
/// How long a thread waits if short-lived processes depend on its speed.
const SHORT: Duration = Duration::from_millis(40);
/// How long to wait for a helper that only lacks a CPU.
const STARVED: Duration = Duration::from_secs(5);
/// Total time for all waiting once a recording is over.
const AT_END: Duration = Duration::from_millis(400);
/// Total time for work for processes then: symbols of files that were first met at the last moment.
const WORK_AT_END: Duration = Duration::from_millis(if cfg!(debug_assertions) { 3_000 } else { 600 });
/// A read that waited for less is not charged.
const FREE: Duration = Duration::from_millis(1);

/// Signals that a recording is over: from then on its threads hardly wait for anything. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct End(Arc<EndState>);

#[derive(Debug, Default)]
struct EndState {
    over: AtomicBool,
    /// Time spent waiting since then, in microseconds.
    waited_us: AtomicU64,
    /// Time spent working for processes since then, likewise.
    worked_us: AtomicU64,
}

thread_local! {
    static END: RefCell<Option<(End, Patience)>> = const { RefCell::new(None) };
}

/// How long a thread waits for one read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// As long as a busy disk or server may take.
    Usual,
    /// Hardly longer than a process lives: for the thread that follows processes, which looks again later.
    Short,
}

impl End {
    /// From now on the recording's threads hardly wait for anything.
    pub fn come(&self) {
        self.0.over.store(true, Ordering::Release);
    }

    /// The calling thread works for this recording until the returned value is dropped.
    #[must_use]
    pub fn concerns_this_thread(&self, patience: Patience) -> Concerned {
        Concerned(END.with(|end| end.replace(Some((self.clone(), patience)))))
    }

    /// How much waiting is still allowed; `None` before the end.
    fn left(&self) -> Option<Duration> {
        let waited = || Duration::from_micros(self.0.waited_us.load(Ordering::Relaxed));
        self.0.over.load(Ordering::Acquire).then(|| AT_END.saturating_sub(waited()))
    }

    /// Whether the calling thread's recording is over and work of this cost would exceed its time.
    pub(super) fn is_worked_out(cost: Duration) -> bool {
        let of = |(end, _): &(Self, Patience)| {
            let worked = Duration::from_micros(end.0.worked_us.load(Ordering::Relaxed));
            end.0.over.load(Ordering::Acquire) && worked + cost > WORK_AT_END
        };
        END.with(|end| end.borrow().as_ref().is_some_and(of))
    }

    /// Notes that the calling thread has worked for a process.
    pub(super) fn work(took: Duration) {
        let add = |(end, _): &(Self, Patience)| {
            if end.0.over.load(Ordering::Acquire) {
                end.0.worked_us.fetch_add(took.as_micros() as u64, Ordering::Relaxed);
            }
        };
        END.with(|end| end.borrow().iter().for_each(add));
    }

    fn spend(&self, wait: Duration) {
        if self.0.over.load(Ordering::Acquire) {
            self.0.waited_us.fetch_add(wait.as_micros() as u64, Ordering::Relaxed);
        }
    }
}

/// Marks a thread as working for a recording.
#[derive(Debug)]
pub struct Concerned(Option<(End, Patience)>);

impl Drop for Concerned {
    fn drop(&mut self) {
        let before = self.0.take();
        END.with(|end| *end.borrow_mut() = before);
    }
}

/// For whom something is read.
#[derive(Clone, Copy, Debug)]
pub(super) struct For {
    /// The debtor who is charged for it.
    pub(super) debtor: Debtor,
    /// The process that led there.
    pub(super) pid: Pid,
}

impl For {
    /// A process's own memory.
    pub(super) fn process(pid: Pid) -> Self {
        Self { debtor: Debtor::Process(pid), pid }
    }
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Refused {
    /// What the kernel said to the helper.
    Errno(Errno),
    /// It did not come in time, or will never come.
    NotWaitedFor,
    /// There are no helpers: a seccomp filter or a limit forbids them.
    NoHelper,
}

impl From<Errno> for Refused {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl From<Refused> for io::Error {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Errno(errno) => errno.into(),
            Refused::NotWaitedFor => Self::new(io::ErrorKind::TimedOut, "it does not answer, and is not waited for"),
            Refused::NoHelper => Self::other("no process can be made that would read it"),
        }
    }
}

/// A helper, seen from here.
#[derive(Debug)]
struct Helper {
    socket: OwnedFd,
    pid: i32,
}

/// State that all threads of this process share.
struct Aside {
    /// Where helpers come from; `None`: there are none.
    nursery: Mutex<Option<OwnedFd>>,
    state: Mutex<State>,
}

struct State {
    idle: Vec<Helper>,
    /// Helpers that have not answered, each with the debtor it was reading for.
    behind: Vec<(Helper, Debtor)>,
    /// All helpers that there ever were, without the process that makes them.
    pids: Vec<i32>,
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn aside() -> &'static Aside {
    static ASIDE: OnceLock<Aside> = OnceLock::new();
    ASIDE.get_or_init(|| {
        let nursery = helper::start_nursery().ok().filter(|socket| times_out(socket, STARVED).is_ok());
        let state = State { idle: Vec::new(), behind: Vec::new(), pids: Vec::new() };
        Aside { nursery: Mutex::new(nursery), state: Mutex::new(state) }
    })
}

fn times_out(socket: &OwnedFd, after: Duration) -> Result<(), Errno> {
    setsockopt(socket, sockopt::ReceiveTimeout, &TimeVal::milliseconds(after.as_millis() as i64))
}

/// Forks the process that makes helpers, while this process is small and has few open files. Otherwise the first read does.
pub fn prepare_to_read() {
    aside();
}

/// CPU time that the helpers have used.
#[must_use]
pub fn helpers_cpu_time() -> Duration {
    let pids = lock(&aside().state).pids.clone();
    let time = |pid| {
        let clock = nix::time::clock_getcpuclockid(nix::unistd::Pid::from_raw(pid)).ok()?;
        nix::time::clock_gettime(clock).ok().map(Duration::from)
    };
    pids.into_iter().filter_map(time).sum()
}

impl Helper {
    fn new(aside: &Aside) -> Option<Self> {
        let mut nursery = lock(&aside.nursery);
        let socket = nursery.as_ref()?;
        let mut pid = [0; 4];
        let made = message::send(socket.as_fd(), &[IoSlice::new(&[1])], None)
            .and_then(|()| message::receive(socket.as_fd(), &mut pid));
        let made = made.ok().and_then(|(_, socket)| socket).filter(|socket| times_out(socket, SLICE).is_ok());
        let Some(socket) = made else {
            // It has ended, or has made as many as it is allowed to.
            *nursery = None;
            return None;
        };
        let pid = i32::from_ne_bytes(pid);
        lock(&aside.state).pids.push(pid);
        Some(Self { socket, pid })
    }

    /// Whether it could go on if it had a CPU.
    fn is_runnable(&self) -> bool {
        let stat = std::fs::read(format!("/proc/{}/stat", self.pid)).ok();
        stat.and_then(|text| parse_stat(&text)).is_some_and(|stat| stat.state == 'R')
    }

    /// Whether it has answered meanwhile, or ended.
    fn has_come(&self) -> bool {
        let mut polled = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        poll(&mut polled, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }
}

impl Aside {
    /// A helper for a read, if the read is allowed.
    fn helper(&self, debtor: Debtor) -> Result<Helper, Refused> {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        if !state.behind.is_empty() {
            let (come, behind) =
                std::mem::take(&mut state.behind).into_iter().partition(|(helper, _)| helper.has_come());
            let come: Vec<(Helper, Debtor)> = come;
            state.behind = behind;
            // The helper's receiver is gone, so it ends.
            come.into_iter().for_each(|(_, debtor)| ledger::open().waits.came(debtor));
        }
        if !ledger::open().waits.may(debtor) {
            return Err(Refused::NotWaitedFor);
        }
        if let Some(helper) = state.idle.pop() {
            return Ok(helper);
        }
        drop(guard);
        Helper::new(self).ok_or(Refused::NoHelper)
    }

    /// Sends a request, and takes the answer in parts until it is complete.
    fn ask(
        &self,
        whose: For,
        request: &Request,
        extra: (&[u8], Option<BorrowedFd<'_>>),
        into: &mut dyn Into,
    ) -> Result<Option<OwnedFd>, Refused> {
        let (end, patience) = END.with(|end| end.borrow().clone()).unzip();
        if end.as_ref().and_then(End::left).is_some_and(|left| left.is_zero()) {
            return Err(Refused::NotWaitedFor);
        }
        let ((paths, file), head) = (extra, request.bytes());
        let helper = loop {
            let helper = self.helper(whose.debtor)?;
            let parts = [IoSlice::new(&head), IoSlice::new(paths)];
            match message::send(helper.socket.as_fd(), &parts, file) {
                Ok(()) => break helper,
                // Something has killed it.
                Err(Errno::EPIPE | Errno::ECONNRESET) => {}
                Err(errno) => return Err(errno.into()),
            }
        };
        let usual = match request.kind {
            _ if patience == Some(Patience::Short) => SHORT,
            Kind::Memory | Kind::Whole | Kind::Pages => MEMORY,
            Kind::Find | Kind::File => FILE,
        };
        loop {
            let mut head = [0; REPLY];
            let mut wait = Wait::new();
            let (len, file) = loop {
                let parts = &mut [IoSliceMut::new(&mut head), IoSliceMut::new(into.room())];
                let flags = if wait.spins() { libc::MSG_DONTWAIT } else { 0 };
                match message::receive_parts(helper.socket.as_fd(), parts, flags) {
                    Ok(received) => break received,
                    Err(Errno::EAGAIN) if flags != 0 => std::hint::spin_loop(),
                    Err(Errno::EINTR) => {}
                    Err(Errno::EAGAIN) if wait.goes_on(whose, &helper, usual, end.as_ref()) => {}
                    Err(Errno::EAGAIN) => {
                        ledger::open().waits.given_up(whose.debtor, whose.pid, wait.blocked);
                        lock(&self.state).behind.push((helper, whose.debtor));
                        return Err(Refused::NotWaitedFor);
                    }
                    Err(errno) => return Err(errno.into()),
                }
            };
            let Some(len) = len.checked_sub(REPLY) else { return Err(Refused::Errno(Errno::EIO)) };
            let reply = Reply::parse(&head);
            into.took(len);
            if reply.last == 0 {
                continue;
            }
            let waited = Duration::from_micros(reply.waited_us.into());
            if waited >= FREE {
                ledger::open().waits.waited(whose.debtor, whose.pid, waited);
                if let Some(end) = &end {
                    end.spend(waited);
                }
            }
            lock(&self.state).idle.push(helper);
            return if reply.errno == 0 { Ok(file) } else { Err(Errno::from_raw(reply.errno).into()) };
        }
    }
}

/// Waiting for one packet.
struct Wait {
    since: Instant,
    /// How long the helper has been seen waiting for what it reads.
    blocked: Duration,
    patience: Option<Duration>,
}

impl Wait {
    fn new() -> Self {
        Self { since: Instant::now(), blocked: Duration::ZERO, patience: None }
    }

    fn spins(&self) -> bool {
        self.since.elapsed() < SPIN
    }

    /// Whether to wait for another slice.
    fn goes_on(&mut self, whose: For, helper: &Helper, usual: Duration, end: Option<&End>) -> bool {
        if helper.is_runnable() {
            return self.since.elapsed() < STARVED;
        }
        self.blocked += SLICE;
        if let Some(end) = end {
            end.spend(SLICE);
        }
        let patience =
            *self.patience.get_or_insert_with(|| ledger::open().waits.patience(whose.debtor, whose.pid, usual));
        self.blocked < end.and_then(End::left).map_or(patience, |left| patience.min(left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A FIFO that nobody writes to: whoever opens it waits, as for a page that never comes.
    fn never() -> (tempfile::TempDir, String) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("fifo");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
        let path = path.to_str().expect("text").to_owned();
        (folder, path)
    }

    #[test]
    fn what_does_not_come_is_left_behind_and_refused_until_it_comes() {
        let (_folder, path) = never();
        // A process of its own, because other tests of this process must not be refused.
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("it runs");
        let (pid, since) = (Pid(child.id()), Instant::now());
        let refused = whole(pid, &path, 100).expect_err("nobody writes");
        assert!(matches!(refused, Refused::NotWaitedFor), "{refused:?}");
        let other = Pid(std::process::id());
        assert!(!whole(other, "/proc/self/maps", 1 << 20).expect("others are read").is_empty());
        assert!(matches!(memory(pid, 4096, &mut [0; 8]), Err(Refused::NotWaitedFor)), "nothing more is asked of it");
        assert!(ledger::refused(since).iter().any(|note| note.contains(&format!("pid {pid} "))));
        std::fs::write(&path, "text").expect("the helper reads it");
        let deadline = Instant::now() + Duration::from_secs(20);
        while matches!(memory(pid, 4096, &mut [0; 8]), Err(Refused::NotWaitedFor)) {
            assert!(Instant::now() < deadline, "it has come, and is still refused");
        }
        child.kill().expect("it runs");
        child.wait().expect("it ends");
    }

    #[test]
    fn after_the_end_hardly_anything_is_waited_for() {
        let end = End::default();
        let concerned = end.concerns_this_thread(Patience::Usual);
        end.come();
        let (_folder, path) = never();
        let mut children = Vec::new();
        let start = Instant::now();
        for _ in 0..30 {
            let child = std::process::Command::new("sleep").arg("60").spawn().expect("it runs");
            whole(Pid(child.id()), &path, 100).expect_err("nobody writes");
            children.push(child);
        }
        assert_eq!(end.left(), Some(Duration::ZERO), "after {:?}", start.elapsed());
        drop(concerned);
        assert!(whole(Pid(std::process::id()), "/proc/self/stat", 1 << 20).is_ok(), "other threads go on");
        for child in &mut children {
            child.kill().expect("it runs");
            child.wait().expect("it ends");
        }
    }

    #[test]
    fn long_answers_come_in_parts() {
        let myself = Pid(std::process::id());
        let bytes: Vec<u8> = (0..300_000_u32).map(|at| (at % 251) as u8).collect();
        let mut copy = vec![0; bytes.len()];
        assert_eq!(memory(myself, bytes.as_ptr() as u64, &mut copy).expect("own memory"), bytes.len());
        assert_eq!(copy, bytes);
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        io::Write::write_all(&mut file, &bytes).expect("written");
        let path = file.path().to_str().expect("text");
        assert_eq!(whole(myself, path, 1 << 20).expect("readable"), bytes);
        assert_eq!(whole(myself, path, 70_000).expect("readable"), bytes[..70_000]);
        let (found, handle) = find(For::process(myself), &[path.as_bytes()]).expect("it is there");
        assert_eq!((found.size, found.regular), (300_000, 1));
        let whose = For { debtor: Debtor::FileSystem(found.dev), pid: myself };
        let mut part = vec![0; 100_000];
        let got = super::file(whose, handle.as_fd(), 250_000, &mut part).expect("readable");
        assert_eq!(part[..got], bytes[250_000..]);
        assert!(matches!(find(For::process(myself), &[b"/nowhere"]), Err(Refused::Errno(Errno::ENOENT))));
        assert!(matches!(find(For::process(myself), &[b"/a\0b"]), Err(Refused::Errno(Errno::EINVAL))));
    }
}
