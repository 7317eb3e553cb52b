//! What `/proc/PID` says about a process: name, command line, parent, start, pids in its namespaces.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use super::aside::{self, Refused};
use super::{MAX_PROC_FILE_BYTES, RemoteError, RemoteProcess};
use crate::types::Pid;

/// Flag of kernel threads in `/proc/PID/stat` (`include/linux/sched.h`).
const PF_KTHREAD: u64 = 0x0020_0000;

/// The part of `/proc/PID/stat` that is of use here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// The kernel's short name of the main thread; bytes that are not UTF-8 are replaced.
    pub comm: String,
    /// State letter, e.g. `S`; `Z` and `X` have no memory any more.
    pub state: char,
    /// Parent.
    pub parent: Pid,
    /// A kernel thread, which has no memory of its own.
    pub kernel_thread: bool,
    /// Start after boot, in clock ticks. Together with the pid it identifies one process for good.
    pub start_ticks: u64,
}

impl RemoteProcess {
    /// Name, state, parent and start.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn stat(&self) -> Result<Stat, RemoteError> {
        let text = self.proc_file("stat")?;
        parse_stat(&text).ok_or_else(|| RemoteError::Odd {
            path: self.proc_path("stat"),
            line: String::from_utf8_lossy(&text).into_owned(),
        })
    }

    /// The kernel's short name of the main thread.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn comm(&self) -> Result<String, RemoteError> {
        let text = self.proc_file("comm")?;
        Ok(String::from_utf8_lossy(text.strip_suffix(b"\n").unwrap_or(&text)).into_owned())
    }

    /// The command line, of which at most this many bytes are read: a process can make it as long as it likes. Empty when
    /// it has none (a kernel thread, a zombie).
    ///
    /// # Errors
    /// When the process is gone.
    pub fn cmdline(&self, most: u64) -> Result<Vec<String>, RemoteError> {
        let text = self.proc_file_within("cmdline", most)?;
        let text = text.strip_suffix(b"\0").unwrap_or(&text);
        if text.is_empty() {
            return Ok(Vec::new());
        }
        Ok(text.split(|&byte| byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect())
    }

    /// The variables of these names that it was started with (proc_pid_environ(5)); at most this many bytes are read.
    ///
    /// # Errors
    /// When the process is gone, or may not be read.
    pub fn environment(&self, names: &[String], most: u64) -> Result<Vec<(String, String)>, RemoteError> {
        let text = self.proc_file_within("environ", most)?;
        Ok(variables(&text, names))
    }

    /// Its effective user id in the profiler's user namespace.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn effective_uid(&self) -> Result<u32, RemoteError> {
        self.uid(1)
    }

    /// Its real user id: the user it belongs to.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn real_uid(&self) -> Result<u32, RemoteError> {
        self.uid(0)
    }

    /// One of its user ids: real, effective, saved, file system (proc_pid_status(5)).
    fn uid(&self, number: usize) -> Result<u32, RemoteError> {
        let text = self.proc_file("status")?;
        let line = text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(b"Uid:"));
        let uid =
            line.and_then(|line| std::str::from_utf8(line).ok()?.split_ascii_whitespace().nth(number)?.parse().ok());
        uid.ok_or_else(|| RemoteError::Odd {
            path: self.proc_path("status"),
            line: String::from_utf8_lossy(line.unwrap_or_default()).into_owned(),
        })
    }

    /// The process's pid in each of its pid namespaces, the profiler's own first, its innermost last.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn ns_pids(&self) -> Result<Vec<u32>, RemoteError> {
        let text = self.proc_file("status")?;
        // Without the line there are no pid namespaces (CONFIG_PID_NS), hence only one pid.
        Ok(parse_ns_pids(&text).unwrap_or_else(|| vec![self.pid().0]))
    }

    /// Reads a whole file of `/proc/PID`.
    pub(super) fn proc_file(&self, name: &str) -> Result<Vec<u8>, RemoteError> {
        self.proc_file_within(name, MAX_PROC_FILE_BYTES)
    }

    /// The same, up to `most` bytes.
    fn proc_file_within(&self, name: &str, most: u64) -> Result<Vec<u8>, RemoteError> {
        let path = self.proc_path(name);
        let read = match name {
            // Reading these never waits for anything of the process's.
            "stat" | "status" | "comm" | "cgroup" => read_here(&path, most),
            _ if name.ends_with("/children") => read_here(&path, most),
            _ => match aside::whole(self.pid(), &path.to_string_lossy(), most) {
                Err(Refused::NoHelper) => read_here(&path, most),
                read => read.map_err(std::io::Error::from),
            },
        };
        match read {
            Ok(text) => Ok(text),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(RemoteError::NoSuchProcess(self.pid())),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Err(RemoteError::NoSuchProcess(self.pid())),
            Err(source) => Err(RemoteError::File { path, source }),
        }
    }
}

/// Those of `names` that are in an environment, in the order of `names`.
fn variables(environment: &[u8], names: &[String]) -> Vec<(String, String)> {
    let value_of = |name: &String| {
        environment.split(|&byte| byte == 0).find_map(|word| word.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
    };
    let known = |name: &String| Some((name.clone(), String::from_utf8_lossy(value_of(name)?).into_owned()));
    names.iter().filter_map(known).collect()
}

/// Reads a file on this thread itself, which blocks until it is done.
fn read_here(path: &Path, most: u64) -> std::io::Result<Vec<u8>> {
    // The kernel returns a page at a time; with a small buffer, a start with 2,000 processes would be noticeably slower.
    let mut text = Vec::with_capacity(4096);
    File::open(path)?.take(most).read_to_end(&mut text)?;
    Ok(text)
}

/// The `NSpid` line of a `status` file: the outermost namespace first.
pub(super) fn parse_ns_pids(text: &[u8]) -> Option<Vec<u32>> {
    let line = text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(b"NSpid:"))?;
    let pids = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    Some(pids.filter_map(|pid| pid.parse().ok()).collect())
}

/// Parses `pid (comm) state ppid …`. The name may contain blanks and parentheses: the last `)` ends it.
#[must_use]
pub fn parse_stat(text: &[u8]) -> Option<Stat> {
    let open = text.iter().position(|&byte| byte == b'(')?;
    let close = text.iter().rposition(|&byte| byte == b')')?;
    let comm = String::from_utf8_lossy(text.get(open + 1..close)?).into_owned();
    let rest = std::str::from_utf8(text.get(close + 1..)?).ok()?;
    // proc_pid_stat(5): state is field 3, so field n is at n - 3 here.
    let fields: Vec<&str> = rest.split_ascii_whitespace().take(20).collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    Some(Stat {
        comm,
        state: fields.first()?.chars().next()?,
        parent: Pid(u32::try_from(number(4)?).ok()?),
        kernel_thread: number(9)? & PF_KTHREAD != 0,
        start_ticks: number(22)?,
    })
}

/// The CPU that a thread ran on last: field 39 of its `stat`.
pub(super) fn last_cpu(text: &[u8]) -> Option<u32> {
    let close = text.iter().rposition(|&byte| byte == b')')?;
    let rest = std::str::from_utf8(text.get(close + 1..)?).ok()?;
    rest.split_ascii_whitespace().nth(39 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_parentheses_do_not_shift_fields() {
        let text = b"12 (a) S 1 (b \xff) R 7 12 12 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 98765 1 2 3\n";
        let stat = parse_stat(text).expect("good");
        assert_eq!(stat.comm, "a) S 1 (b \u{fffd}");
        assert_eq!((stat.state, stat.parent, stat.start_ticks, stat.kernel_thread), ('R', Pid(7), 98765, false));
        for odd in [&b""[..], b"12 (a", b"12 a) S", b"12 )a( S 1", b"12 (a) S 1 2", b"12 (a) S x 1 1 1 1 1 1"] {
            assert_eq!(parse_stat(odd), None);
        }
    }

    #[test]
    fn of_this_process() {
        let process = RemoteProcess::open(Pid(std::process::id())).expect("this process exists");
        let stat = process.stat().expect("readable");
        assert_eq!(stat.parent.0, std::os::unix::process::parent_id());
        assert_eq!(stat.comm, process.comm().expect("readable"));
        assert!(!stat.kernel_thread);
        let args: Vec<String> = std::env::args().collect();
        assert_eq!(process.cmdline(1 << 20).expect("readable"), args);
        assert_eq!(process.ns_pids().expect("readable").first(), Some(&std::process::id()));
    }
}
