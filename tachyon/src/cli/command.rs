//! `-- CMD`: a child that waits to be profiled before it runs.
//!
//! The child is forked at once, so its pid is known, and waits on a pipe; [`PreparedCommand::start`] lets it `exec`. It
//! keeps the profiler's directory, environment, standard streams (except for [`CommandOutput`]), process group and
//! initial signal state; under sudo it runs as the calling user (`--as-root` keeps it root). If it is dropped before its
//! start it ends without having run anything; once it runs, this module never kills it.
//!
//! Signals: a key at the terminal (Ctrl-C, Ctrl-\) reaches both processes, because it is sent to the whole foreground
//! group, so it is not forwarded; `SIGTERM` and `SIGHUP`, which a supervisor sends to one process, are for `recording`
//! to pass on with [`PreparedCommand::forward`]: the command ends as it would without a profiler in front of it, and
//! the recording ends with it.

use super::caller::Caller;
use crate::advice::{Advice, advises};
use crate::types::Pid;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, pthread_sigmask};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, User, fork, getgrouplist, pipe2};
use std::ffi::{CString, NulError, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Why a command could not be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// `exec` failed.
    #[error("cannot run {}", program.display())]
    Exec {
        /// The command's first word.
        program: OsString,
        /// The kernel's error.
        source: io::Error,
    },
    /// The child could not become the calling user.
    #[error("cannot run the command as uid {uid}")]
    Credentials {
        /// The calling user.
        uid: u32,
        /// The kernel's error.
        source: io::Error,
    },
    /// A word or a variable holds a NUL byte.
    #[error("cannot run the command: a NUL byte in its arguments or environment")]
    Nul(#[from] NulError),
    /// The system refused a pipe, a process or a descriptor.
    #[error("cannot start the command")]
    System(#[from] io::Error),
}

impl From<nix::Error> for CommandError {
    fn from(errno: nix::Error) -> Self {
        Self::System(errno.into())
    }
}

advises!(CommandError);

impl Advice for CommandError {
    /// The status a shell would end with: 127 for a command not found, 126 for one that cannot be executed.
    fn exit_status(&self) -> u8 {
        match self {
            Self::Exec { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            Self::Exec { .. } => 126,
            _ => super::failure::STATUS_FAILED,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Exec { program, source } if source.kind() == io::ErrorKind::NotFound => {
                Some(match program.as_bytes().contains(&b'/') {
                    true => "check the path, and the interpreter in the script's first line".to_owned(),
                    false => {
                        "it is in no directory of PATH (sudo has a PATH of its own): give its full path".to_owned()
                    }
                })
            }
            Self::Exec { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some("it must be executable by the user it runs as; give a script to python".to_owned())
            }
            Self::Credentials { .. } => Some("--as-root runs it as root".to_owned()),
            _ => None,
        }
    }
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandStatus {
    /// It exited with this status.
    Exited(i32),
    /// This signal ended it.
    Signaled(i32),
}

impl CommandStatus {
    /// The profiler's own exit status for it, as in shells: 128 + the signal's number.
    #[must_use]
    pub fn exit_status(self) -> u8 {
        match self {
            Self::Exited(status) => status.to_le_bytes()[0],
            Self::Signaled(signal) => 128_u8.wrapping_add(signal.to_le_bytes()[0]),
        }
    }
}

/// Where the command's standard output goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandOutput {
    /// Where the profiler's goes.
    Inherited,
    /// To standard error: the profiler's standard output is for the profile (`perf record -o -` does the same).
    StandardError,
    /// Nowhere, and there is no input: the profiler keeps the terminal for itself.
    Nowhere,
}

/// A child process that waits for its start, runs, or has ended.
#[derive(Debug)]
pub struct PreparedCommand {
    pid: nix::unistd::Pid,
    program: OsString,
    caller: Option<Caller>,
    /// Writing a byte starts it, closing without one ends it. `None` once started.
    barrier: Option<File>,
    /// Reports why `exec` failed; closes when it succeeds.
    failure: File,
    status: Option<CommandStatus>,
}

impl PreparedCommand {
    /// Forks the child, which waits.
    ///
    /// To be called before signal handlers are installed: signals ignored or blocked at that time stay so in the
    /// command, handlers do not.
    ///
    /// # Errors
    /// When the system refuses, or `argv` is empty or holds a NUL byte.
    pub fn prepare(argv: &[OsString], as_root: bool, output: CommandOutput) -> Result<Self, CommandError> {
        let program = argv.first().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?.clone();
        let caller = if as_root { None } else { Caller::through_sudo() };
        let image = Image::new(argv, caller, output)?;
        let (barrier_read, barrier_write) = pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        let (failure_read, failure_write) = pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;

        // Signals are blocked around the fork: no handler of this process may run in the child.
        let mut old_mask = SigSet::empty();
        pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), Some(&mut old_mask))?;
        // SAFETY: the child calls `Image::become_it` only, which is async-signal-safe and never returns.
        let forked = unsafe { fork() };
        if let Ok(ForkResult::Child) = forked {
            let pipes = ChildPipes {
                barrier: barrier_read.as_raw_fd(),
                failure: failure_write.as_raw_fd(),
                parents: [barrier_write.as_raw_fd(), failure_read.as_raw_fd()],
            };
            image.become_it(&pipes, old_mask.as_ref());
        }
        pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&old_mask), None)?;
        let ForkResult::Parent { child } = forked? else { unreachable!("the child has left above") };
        Ok(Self {
            pid: child,
            program,
            caller,
            barrier: Some(File::from(barrier_write)),
            failure: File::from(failure_read),
            status: None,
        })
    }

    /// Its pid, from its preparation on.
    #[must_use]
    pub fn pid(&self) -> Pid {
        Pid(self.pid.as_raw().unsigned_abs())
    }

    /// Lets it run. Returns once `exec` has happened or failed; a second call does nothing.
    ///
    /// # Errors
    /// When the command cannot be executed; then the child is gone.
    pub fn start(&mut self) -> Result<(), CommandError> {
        let Some(mut barrier) = self.barrier.take() else { return Ok(()) };
        // A child that was killed meanwhile has closed the pipe: its status says so.
        if barrier.write_all(&[GO]).is_err() {
            return Ok(());
        }
        drop(barrier);
        let mut told = [0; TOLD_BYTES];
        let mut len = 0;
        while len < TOLD_BYTES {
            match self.failure.read(&mut told[len..]) {
                Ok(0) => return Ok(()),
                Ok(read) => len += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        let [step, errno @ ..] = told;
        let source = io::Error::from_raw_os_error(i32::from_ne_bytes(errno));
        self.wait()?;
        Err(match (step, self.caller) {
            (STEP_CREDENTIALS, Some(caller)) => CommandError::Credentials { uid: caller.uid.as_raw(), source },
            _ => CommandError::Exec { program: self.program.clone(), source },
        })
    }

    /// How it ended, or `None` if it has not.
    ///
    /// # Errors
    /// When the kernel has no such child.
    pub fn try_wait(&mut self) -> io::Result<Option<CommandStatus>> {
        self.reap(Some(WaitPidFlag::WNOHANG))
    }

    /// Waits for its end, blocking the thread.
    ///
    /// # Errors
    /// When the kernel has no such child.
    pub fn wait(&mut self) -> io::Result<CommandStatus> {
        loop {
            if let Some(status) = self.reap(None)? {
                return Ok(status);
            }
        }
    }

    /// Sends it a signal that reached only the profiler. Does nothing if it has ended.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn forward(&self, signal: Signal) -> io::Result<()> {
        if self.status.is_some() {
            return Ok(());
        }
        Ok(kill(self.pid, signal)?)
    }

    fn reap(&mut self, flags: Option<WaitPidFlag>) -> io::Result<Option<CommandStatus>> {
        if self.status.is_none() {
            self.status = match waitpid(self.pid, flags) {
                Ok(WaitStatus::Exited(_, status)) => Some(CommandStatus::Exited(status)),
                Ok(WaitStatus::Signaled(_, signal, _)) => Some(CommandStatus::Signaled(signal as i32)),
                Ok(_) | Err(nix::Error::EINTR) => None,
                Err(errno) => return Err(errno.into()),
            };
        }
        Ok(self.status)
    }
}

impl Drop for PreparedCommand {
    fn drop(&mut self) {
        if self.barrier.take().is_some() {
            // It reads the end of the pipe and exits: nothing was run.
            let _ = self.wait();
        }
    }
}

/// The byte that starts the child.
const GO: u8 = 1;
/// What the child reports when it fails: a step and an errno.
const TOLD_BYTES: usize = 5;
const STEP_CREDENTIALS: u8 = 1;
const STEP_EXEC: u8 = 2;

struct ChildPipes {
    barrier: RawFd,
    failure: RawFd,
    /// The parent's ends: an inherited copy would keep the barrier open after the parent's death.
    parents: [RawFd; 2],
}

/// Everything the child needs, made before the fork: between `fork` and `exec` nothing may allocate.
struct Image {
    argv: CStrings,
    environment: CStrings,
    credentials: Option<Credentials>,
    output: CommandOutput,
    /// What a command without a terminal reads and writes.
    nothing: Option<File>,
}

struct Credentials {
    uid: libc::uid_t,
    gid: libc::gid_t,
    groups: Vec<libc::gid_t>,
}

impl Image {
    fn new(argv: &[OsString], caller: Option<Caller>, output: CommandOutput) -> Result<Self, CommandError> {
        let user = caller.and_then(|caller| User::from_uid(caller.uid).ok().flatten());
        let credentials = match caller {
            Some(Caller { uid, gid }) => {
                // A uid without an entry has no supplementary groups.
                let groups = match &user {
                    Some(user) => getgrouplist(&CString::new(user.name.as_bytes())?, gid)?,
                    None => vec![gid],
                };
                let groups = groups.into_iter().map(nix::unistd::Gid::as_raw).collect();
                Some(Credentials { uid: uid.as_raw(), gid: gid.as_raw(), groups })
            }
            None => None,
        };
        let environment = std::env::vars_os().map(|(name, value)| {
            let value = user.as_ref().and_then(|user| users_own(&name, &value, user)).unwrap_or(value);
            [name.as_os_str(), OsStr::new("="), &value].into_iter().collect::<OsString>()
        });
        let (argv, environment) = (CStrings::new(argv.iter().cloned())?, CStrings::new(environment)?);
        let nowhere = output == CommandOutput::Nowhere;
        let nothing = nowhere.then(|| File::options().read(true).write(true).open("/dev/null")).transpose()?;
        Ok(Self { argv, environment, credentials, output, nothing })
    }

    /// The child's life from fork to exec. Async-signal-safe: only system calls and memory made before.
    fn become_it(&self, pipes: &ChildPipes, mask: &libc::sigset_t) -> ! {
        reset_handlers();
        for fd in pipes.parents {
            // SAFETY: the child owns its copies of the parent's ends, and nothing of it uses them.
            unsafe { libc::close(fd) };
        }
        // SAFETY: `mask` is an initialised set; the old one is not asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) };
        let mut go = 0_u8;
        loop {
            // SAFETY: one byte is read into one byte that lives.
            let read = unsafe { libc::read(pipes.barrier, (&raw mut go).cast(), 1) };
            if read == 1 {
                break;
            }
            if read == 0 || errno() != libc::EINTR {
                // SAFETY: `_exit` runs no destructor of the copied parent.
                unsafe { libc::_exit(127) };
            }
        }
        if self.output == CommandOutput::StandardError {
            // SAFETY: takes numbers only. Both are open: Rust's runtime opens `/dev/null` for those that are not.
            unsafe { libc::dup2(libc::STDERR_FILENO, libc::STDOUT_FILENO) };
        }
        if let Some(nothing) = &self.nothing {
            for stream in [libc::STDIN_FILENO, libc::STDOUT_FILENO, libc::STDERR_FILENO] {
                // SAFETY: takes numbers only, and the file is open.
                unsafe { libc::dup2(nothing.as_raw_fd(), stream) };
            }
        }
        let step = match self.credentials.as_ref().map(Credentials::assume) {
            Some(false) => STEP_CREDENTIALS,
            _ => {
                // Ambient capabilities given to the profiler are not for the command. A kernel may not support them. SAFETY:
                // a system call with plain numbers.
                unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
                // SAFETY: both arrays are NULL-terminated arrays of NUL-terminated strings that `self` owns, the program
                // is the first of them. Like the standard library's `Command`, this relies on the C library's search
                // of PATH not allocating.
                unsafe { libc::execvpe(self.argv.first(), self.argv.as_ptr(), self.environment.as_ptr()) };
                STEP_EXEC
            }
        };
        let [a, b, c, d] = errno().to_ne_bytes();
        let told = [step, a, b, c, d];
        // SAFETY: the buffer has the length given. Less than PIPE_BUF: written whole.
        unsafe { libc::write(pipes.failure, told.as_ptr().cast(), TOLD_BYTES) };
        // SAFETY: `_exit` runs no destructor of the copied parent.
        unsafe { libc::_exit(127) }
    }
}

impl Credentials {
    /// Becomes the user, for good: the last step gives up every capability.
    fn assume(&self) -> bool {
        // SAFETY: the list has the length given.
        let groups = unsafe { libc::setgroups(self.groups.len(), self.groups.as_ptr()) };
        // SAFETY: takes numbers only.
        let gid = unsafe { libc::setresgid(self.gid, self.gid, self.gid) };
        if groups != 0 || gid != 0 {
            return false;
        }
        // SAFETY: takes numbers only.
        let uid = unsafe { libc::setresuid(self.uid, self.uid, self.uid) };
        uid == 0
    }
}

/// Resets this process's handlers to the default. What was ignored stays ignored, except SIGPIPE, which Rust's runtime
/// ignores but a program started by a shell finds at its default.
fn reset_handlers() {
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: all-zero is a valid `sigaction`: SIG_DFL, no flags, an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: writes the current action into `action`.
        let known = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) } == 0;
        let keep =
            action.sa_sigaction == libc::SIG_DFL || (action.sa_sigaction == libc::SIG_IGN && signal != libc::SIGPIPE);
        if known && !keep {
            // SAFETY: all-zero, as above.
            let default: libc::sigaction = unsafe { std::mem::zeroed() };
            // SAFETY: installs the default action; the old one is not asked for.
            unsafe { libc::sigaction(signal, &raw const default, std::ptr::null_mut()) };
        }
    }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// `HOME`, `USER` and `LOGNAME` where sudo has set root's: the calling user's own, as without the profiler.
fn users_own(name: &OsStr, value: &OsStr, user: &User) -> Option<OsString> {
    let (name, root) = match name.to_str()? {
        name @ ("HOME" | "USER" | "LOGNAME") => (name, User::from_uid(nix::unistd::Uid::from_raw(0)).ok()??),
        _ => return None,
    };
    let (roots, own) = match name {
        "HOME" => (root.dir.into_os_string(), user.dir.clone().into_os_string()),
        _ => (OsString::from(root.name), OsString::from(&user.name)),
    };
    (value == roots).then_some(own)
}

/// A NULL-terminated array of C strings, as `exec` takes it.
struct CStrings {
    pointers: Vec<*const libc::c_char>,
    _strings: Vec<CString>,
}

impl CStrings {
    fn new(words: impl Iterator<Item = OsString>) -> Result<Self, NulError> {
        let strings = words.map(|word| CString::new(word.into_vec())).collect::<Result<Vec<_>, _>>()?;
        // The strings' bytes are on the heap: moving the vector does not move them.
        let pointers = strings.iter().map(|word| word.as_ptr()).chain([std::ptr::null()]).collect();
        Ok(Self { pointers, _strings: strings })
    }

    /// The first string; NULL when there is none.
    fn first(&self) -> *const libc::c_char {
        self.pointers.first().copied().unwrap_or(std::ptr::null())
    }

    fn as_ptr(&self) -> *const *const libc::c_char {
        self.pointers.as_ptr()
    }
}

#[cfg(test)]
mod tests;
