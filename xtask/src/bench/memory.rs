//! Memory of a program and of everything it started, polled: the kernel reports the peak of a process only to whoever waits for it.

use std::collections::HashSet;
use std::fs;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::probe;

/// Time between two looks.
const EACH: Duration = Duration::from_millis(100);

/// Watches a process until the result is requested.
pub(crate) struct Watch {
    /// Dropping this ends it.
    running: Sender<()>,
    thread: JoinHandle<u64>,
}

impl Watch {
    pub(crate) fn of(pid: u32) -> Self {
        let (running, ended) = channel();
        let look = move || {
            let mut most = 0;
            loop {
                most = most.max(resident(pid));
                if ended.recv_timeout(EACH) != Err(RecvTimeoutError::Timeout) {
                    return most;
                }
            }
        };
        Self { running, thread: std::thread::spawn(look) }
    }

    /// The most that was seen, bytes.
    pub(crate) fn most(self) -> u64 {
        drop(self.running);
        self.thread.join().expect("it does not panic")
    }
}

/// Resident memory of a process and its descendants, bytes; what they share counts for each.
fn resident(root: u32) -> u64 {
    let Ok(all) = fs::read_dir("/proc") else { return 0 };
    let pids = all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let processes: Vec<_> = pids.filter_map(|pid| Some((pid, status(pid, "PPid")?))).collect();
    let mut family = HashSet::from([root]);
    // A parent may have the higher number.
    loop {
        let before = family.len();
        let children = processes.iter().filter(|(_, parent)| family.contains(parent)).map(|&(pid, _)| pid);
        family = family.iter().copied().chain(children.collect::<Vec<_>>()).collect();
        if family.len() == before {
            break;
        }
    }
    family.iter().filter_map(|&pid| status(pid, "VmRSS")).map(|kib| u64::from(kib) * 1024).sum()
}

/// A number from `/proc/PID/status`.
fn status(pid: u32, name: &str) -> Option<u32> {
    probe::field(&format!("/proc/{pid}/status"), name)?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn descendants_count() {
        let holds = "x = b'x' * 50_000_000; import time; print(flush=True); time.sleep(60)";
        let mut line = Command::new("sh");
        let source = format!("python3 -c \"{holds}\" & python3 -c \"{holds}\"; wait");
        let mut shell = line.args(["-c", &source]).stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut ready = [0; 2];
        std::io::Read::read_exact(shell.stdout.as_mut().unwrap(), &mut ready).unwrap();
        // It looks at least once.
        let most = Watch::of(shell.id()).most();
        let _killed = Command::new("pkill").args(["-P", &shell.id().to_string()]).status();
        shell.wait().unwrap();
        assert!(most > 100_000_000, "{most}");
    }
}
