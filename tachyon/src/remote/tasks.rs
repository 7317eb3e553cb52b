//! The threads of a process, as the kernel lists them in `/proc/PID/task`.

use super::status::{parse_ns_pids, parse_stat};
use super::{RemoteError, RemoteProcess};

/// Most threads listed of one process: twice what a default `kernel.threads-max` of a large machine lets one have.
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

impl RemoteProcess {
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

#[cfg(test)]
mod tests {
    use crate::remote::RemoteProcess;
    use crate::types::Pid;

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
