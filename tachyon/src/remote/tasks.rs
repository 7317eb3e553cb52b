//! The threads of a process, as the kernel lists them in `/proc/PID/task`.

use super::status::{parse_ns_pids, parse_stat};
use super::{RemoteError, RemoteProcess};
use nix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Most threads listed for one process: twice what the default `kernel.threads-max` of a large machine allows.
const MAX_TASKS: usize = 1 << 17;

/// One thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// Its tid in the profiler's own pid namespace; the main thread's is the pid.
    pub tid: u32,
    /// Its tid in its own, innermost pid namespace: what `gettid()` in it returns.
    pub ns_tid: u32,
    /// The kernel's short name of it; bytes that are not UTF-8 are replaced.
    pub comm: String,
    /// State letter as in `/proc/PID/stat`, e.g. `S`.
    pub state: char,
}

/// What a thread has done with its time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskTimes {
    /// When it started, nanoseconds after boot to a hundredth of a second.
    pub start_ns: u64,
    /// How long it has run on a CPU, nanoseconds (the first number of its `schedstat`).
    pub ran_ns: u64,
    /// How long it has been ready to run without a CPU (the second one; 0 if the kernel does not count that).
    pub queued_ns: u64,
    /// Whether it is on a CPU or ready to run.
    pub runs: bool,
}

/// Where a thread is, as far as that can be determined without stopping it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocked {
    /// It sleeps in the kernel, and will go on in user mode with these registers.
    At {
        /// Address of the next instruction.
        pc: u64,
        /// Stack pointer.
        sp: u64,
    },
    /// It is on a CPU, or waits for one.
    Running,
}

impl RemoteProcess {
    /// Where one of its threads is (`/proc/PID/task/TID/syscall`); `None` when it has ended or may not be looked at.
    #[must_use]
    pub fn blocked(&self, tid: u32) -> Option<Blocked> {
        parse_syscall(&self.proc_file(&format!("task/{tid}/syscall")).ok()?)
    }

    /// When one of its threads started, nanoseconds after boot to a hundredth of a second (as `CLOCK_MONOTONIC` on a machine that
    /// was never suspended); `None` when it has ended.
    #[must_use]
    pub fn task_start_ns(&self, tid: u32) -> Option<u64> {
        let stat = parse_stat(&self.proc_file(&format!("task/{tid}/stat")).ok()?)?;
        // `USER_HZ` is 100 everywhere.
        Some(stat.start_ticks * 10_000_000)
    }

    /// How long it has run, to a hundredth of a second; `None` when it has ended.
    #[must_use]
    pub fn age(&self) -> Option<Duration> {
        let began = Duration::from_nanos(self.task_start_ns(self.pid().0)?);
        Some(Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?).saturating_sub(began))
    }

    /// A file of one of its threads in `/proc`.
    ///
    /// # Errors
    /// When the thread has ended, or it may not be read.
    pub fn task_file(&self, tid: u32, name: &str) -> Result<Vec<u8>, RemoteError> {
        self.proc_file(&format!("task/{tid}/{name}"))
    }

    /// Its threads' ids.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn thread_ids(&self) -> std::io::Result<Vec<u32>> {
        let entries = std::fs::read_dir(self.proc_path("task"))?;
        Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).take(MAX_TASKS).collect())
    }

    /// The children that one of its threads has (proc_tid_children(5)).
    ///
    /// # Errors
    /// When the thread has ended, or the kernel has no such list.
    pub fn child_ids(&self, tid: u32) -> Result<Vec<u32>, RemoteError> {
        let list = self.task_file(tid, "children")?;
        Ok(String::from_utf8_lossy(&list).split_ascii_whitespace().filter_map(|id| id.parse().ok()).collect())
    }

    /// What one of its threads has done with its time; `None` if it has ended.
    #[must_use]
    pub fn task_times(&self, tid: u32) -> Option<TaskTimes> {
        let stat = parse_stat(&self.proc_file(&format!("task/{tid}/stat")).ok()?)?;
        if ['Z', 'X'].contains(&stat.state) {
            return None;
        }
        let schedstat = self.proc_file(&format!("task/{tid}/schedstat")).ok()?;
        let mut numbers = std::str::from_utf8(&schedstat).ok()?.split_ascii_whitespace();
        let mut number = || numbers.next()?.parse().ok();
        let start_ns = stat.start_ticks * 10_000_000;
        Some(TaskTimes { start_ns, ran_ns: number()?, queued_ns: number()?, runs: stat.state == 'R' })
    }

    /// The system call in which one of its threads sleeps, with its first arguments; the number is -1 if it sleeps outside of
    /// one. `None` when it runs, has ended or may not be looked at.
    #[must_use]
    pub fn system_call(&self, tid: u32) -> Option<(i64, [u64; 3])> {
        parse_call(&self.proc_file(&format!("task/{tid}/syscall")).ok()?)
    }

    /// Its threads by tid. One that ends while they are listed is left out.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn tasks(&self) -> Result<Vec<Task>, RemoteError> {
        let path = self.proc_path("task");
        let entries = std::fs::read_dir(&path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => RemoteError::NoSuchProcess(self.pid()),
            _ => RemoteError::File { path: path.clone(), source },
        })?;
        let tids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let mut tasks: Vec<Task> = tids.take(MAX_TASKS).filter_map(|tid| self.task(tid)).collect();
        if tasks.is_empty() {
            return Err(RemoteError::NoSuchProcess(self.pid()));
        }
        tasks.sort_by_key(|task| task.tid);
        Ok(tasks)
    }

    /// One of its threads; `None` when it has ended.
    #[must_use]
    pub fn task(&self, tid: u32) -> Option<Task> {
        let stat = parse_stat(&self.proc_file(&format!("task/{tid}/stat")).ok()?)?;
        let status = self.proc_file(&format!("task/{tid}/status")).ok()?;
        let ns_tid = parse_ns_pids(&status).and_then(|ids| ids.last().copied());
        Some(Task { tid, ns_tid: ns_tid.unwrap_or(tid), comm: stat.comm, state: stat.state })
    }
}

/// `running`, or the number of the system call (-1 outside of one) and its arguments, then stack pointer and program
/// counter (`fs/proc/base.c`, `proc_pid_syscall`).
fn parse_syscall(text: &[u8]) -> Option<Blocked> {
    let text = std::str::from_utf8(text).ok()?.trim_end();
    if text == "running" {
        return Some(Blocked::Running);
    }
    let mut words = text.rsplit(' ').map(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
    let (pc, sp) = (words.next()??, words.next()??);
    Some(Blocked::At { pc, sp })
}

/// The number and the first three arguments of the same.
fn parse_call(text: &[u8]) -> Option<(i64, [u64; 3])> {
    let mut words = std::str::from_utf8(text).ok()?.split_ascii_whitespace();
    let number = words.next()?.parse().ok()?;
    if number < 0 {
        return Some((number, [0; 3]));
    }
    let mut argument = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
    Some((number, [argument()?, argument()?, argument()?]))
}

#[cfg(test)]
mod tests {
    use super::{Blocked, parse_call, parse_syscall};
    use crate::remote::RemoteProcess;
    use crate::types::Pid;

    #[test]
    fn places_as_the_kernel_tells_them() {
        let place = |text: &str| parse_syscall(text.as_bytes());
        assert_eq!(place("running\n"), Some(Blocked::Running));
        let at = Some(Blocked::At { pc: 0x30, sp: 0x20 });
        assert_eq!(place("0 0x0 0x1 0x2 0x3 0x4 0x5 0x20 0x30\n"), at);
        assert_eq!(place("-1 0x20 0x30\n"), at);
        for odd in ["", "-1", "0x30", "0 20 30", "0 0x20 0x10000000000000000"] {
            assert_eq!(place(odd), None, "{odd}");
        }
    }

    #[test]
    fn calls_as_the_kernel_tells_them() {
        assert_eq!(parse_call(b"202 0x10 0x2 0x3 0x4 0x5 0x6 0x20 0x30\n"), Some((202, [0x10, 2, 3])));
        assert_eq!(parse_call(b"-1 0x20 0x30\n"), Some((-1, [0; 3])));
        for odd in ["running", "", "1 0x1", "1 2 3 4"] {
            assert_eq!(parse_call(odd.as_bytes()), None, "{odd}");
        }
    }

    #[test]
    fn threads_are_listed_with_their_names() {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("a (named) one".to_owned()).spawn(move || {
            tell.send(nix::unistd::gettid().as_raw().unsigned_abs()).expect("the test listens");
            // Ends when the test drops its side.
            let _ = ended.recv();
        });
        let tid = told.recv().expect("it tells");
        let tasks = RemoteProcess::at(Pid(std::process::id())).tasks().expect("this process runs");
        let task = tasks.iter().find(|task| task.tid == tid).expect("it is listed");
        assert_eq!((task.ns_tid, task.comm.as_str()), (tid, "a (named) one"));
        assert!(tasks.iter().any(|task| task.tid == std::process::id()));
        drop(end);
        thread.expect("it started").join().expect("it ended");
    }
}
