//! `--source`: finds the source files that the report shows.
//!
//! Their paths come from the profiled program, or from whoever made a profile. So only Python source files (`.py`,
//! `.pyw`) are read, only regular ones, below a root directory that symbolic links cannot leave, and without waiting
//! for a file system that may never answer (`remote`).

use crate::profile::Process;
use crate::remote::{MappedFile, RemoteError, RemoteProcess};
use crate::sinks::page::source::{SourceFile, SourceFiles};
use crate::types::Pid;
use std::collections::HashMap;
use std::io;
use std::path::Path;

/// Where the files are.
#[derive(Debug)]
pub enum Files {
    /// Below each process's own root directory.
    Targets {
        /// A program that the profiler itself runs has its root directory, which still exists when the program has ended.
        ours: bool,
        /// By pid: when the process started, so that another one with its pid can be distinguished.
        met: HashMap<u32, u64>,
    },
    /// Below the profiler's own root directory, whatever was profiled and wherever.
    ThisMachine,
}

impl Files {
    /// Files of processes that are being profiled. `ours`: they are a command that the profiler runs.
    #[must_use]
    pub fn of_targets(ours: bool) -> Box<dyn SourceFiles> {
        Box::new(Self::Targets { ours, met: HashMap::new() })
    }

    /// Files at the same paths here and now.
    #[must_use]
    pub fn of_this_machine() -> Box<dyn SourceFiles> {
        Box::new(Self::ThisMachine)
    }

    fn find(&self, pid: u32, path: &Path) -> Result<MappedFile, String> {
        let here = || RemoteProcess::at(Pid(std::process::id())).file_at(path).map_err(|error| told(&error));
        let Self::Targets { ours, met } = self else { return here() };
        let process = RemoteProcess::at(Pid(pid));
        let start = process.stat().ok().map(|stat| stat.start_ticks);
        if start.is_none() || start != met.get(&pid).copied() {
            return if *ours { here() } else { Err("its process had ended".to_owned()) };
        }
        match process.file_at(path) {
            // It has not been waited for yet, but its root directory is gone all the same.
            Err(_) if *ours => here(),
            Err(error) => Err(told(&error)),
            Ok(file) => Ok(file),
        }
    }
}

impl SourceFiles for Files {
    fn met(&mut self, process: &Process) {
        if let Self::Targets { met, .. } = self
            && let Ok(stat) = RemoteProcess::at(Pid(process.pid)).stat()
        {
            met.insert(process.pid, stat.start_ticks);
        }
    }

    fn read(&mut self, process: &Process, path: &str, most: usize) -> Result<SourceFile, String> {
        let path = Path::new(path);
        if path.as_os_str().as_encoded_bytes().starts_with(b"<") {
            return Err("it is no file".to_owned());
        }
        if !path.is_absolute() {
            return Err("its path is relative".to_owned());
        }
        let extension = path.extension().and_then(|extension| extension.to_str());
        if !extension.is_some_and(|extension| extension == "py" || extension == "pyw") {
            return Err("it is no .py file".to_owned());
        }
        let file = self.find(process.pid, path)?;
        let identity = file.identity();
        if identity.size > most as u64 {
            return Err(format!("it has more than {} MiB", most >> 20));
        }
        let bytes = read(&file, most).map_err(|error| error.to_string())?;
        #[expect(clippy::cast_precision_loss, reason = "compared with seconds")]
        let changed_unix = identity.mtime_ns as f64 / 1e9;
        Ok(SourceFile { bytes, changed_unix })
    }
}

/// The whole file as it is when read, which may be less or more than when it was found.
fn read(file: &MappedFile, most: usize) -> io::Result<Vec<u8>> {
    let file = file.open().map_err(io::Error::other)?;
    let (mut bytes, mut block) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        match file.read_at(&mut block, bytes.len() as u64)? {
            0 => return Ok(bytes),
            got => bytes.extend_from_slice(&block[..got]),
        }
        if bytes.len() > most {
            return Err(io::Error::other("it grew while it was read"));
        }
    }
}

/// Without the path, which the page has already.
fn told(error: &RemoteError) -> String {
    match error {
        RemoteError::File { source, .. } => source.to_string(),
        RemoteError::NotRegular(_) => "it is no regular file".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn only_pythons_regular_files_of_bounded_size_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        fs::write(path("a.py"), "x = 1\n").unwrap();
        fs::write(path("secret"), "x").unwrap();
        fs::write(path("large.py"), [b'#'; 101]).unwrap();
        nix::unistd::mkfifo(Path::new(&path("fifo.py")), nix::sys::stat::Mode::S_IRUSR).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path("zero.py")).unwrap();
        std::os::unix::fs::symlink(path("a.py"), path("link.py")).unwrap();
        let own = Process { pid: std::process::id(), ..Process::default() };
        let mut targets = Files::of_targets(false);
        targets.met(&own);
        for files in [&mut Files::of_this_machine(), &mut targets] {
            for (name, expected) in [
                ("a.py", Ok("x = 1\n")),
                ("link.py", Ok("x = 1\n")),
                ("secret", Err("it is no .py file")),
                ("large.py", Err("it has more than 0 MiB")),
                ("fifo.py", Err("it is no regular file")),
                ("zero.py", Err("it is no regular file")),
            ] {
                let found = files.read(&own, &path(name), 100).map(|file| String::from_utf8(file.bytes).unwrap());
                assert_eq!(found.as_deref().map_err(String::as_str), expected, "{name}");
            }
            assert_eq!(files.read(&own, "<string>", 100), Err("it is no file".to_owned()));
            assert_eq!(files.read(&own, "a.py", 100), Err("its path is relative".to_owned()));
        }
        let stranger = Process { pid: 1, ..Process::default() };
        assert_eq!(targets.read(&stranger, &path("a.py"), 100), Err("its process had ended".to_owned()));
        let mut ours = Files::of_targets(true);
        assert!(ours.read(&stranger, &path("a.py"), 100).is_ok(), "what we ran has our root directory");
    }
}
