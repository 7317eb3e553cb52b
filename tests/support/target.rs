//! A program to be profiled: started, ready, and certain to be ended.

use crate::Interpreter;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use tempfile::TempDir;

/// The path of a program in `programs/`.
#[must_use]
pub fn program(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("programs").join(name)
}

/// A running Python program, killed with all its children when it is dropped.
#[derive(Debug)]
pub struct Target {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    /// What the program said about itself when it was ready.
    pub facts: Value,
    interpreter: &'static str,
    /// The copy of `programs/` that it runs from, in another root directory.
    _programs: Option<TempDir>,
}

/// A copy of `programs/` in the `/tmp` of another root directory.
fn copied(root: &Path) -> TempDir {
    let dir = tempfile::Builder::new().prefix("programs").tempdir_in(root.join("tmp")).expect("a root has a /tmp");
    let programs = std::fs::read_dir(program("")).expect("the programs can be listed");
    for entry in programs.filter_map(Result::ok).filter(|entry| entry.path().is_file()) {
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).expect("a program can be copied");
    }
    dir
}

impl Target {
    /// Runs a program of `programs/` and waits until it says that it is ready.
    ///
    /// # Panics
    /// When it cannot be run, or ends before that.
    #[must_use]
    pub fn start(interpreter: &Interpreter, name: &str) -> Self {
        Self::start_with(interpreter, name, &[])
    }

    /// The same with arguments for the program.
    ///
    /// # Panics
    /// As [`Target::start`].
    #[must_use]
    pub fn start_with(interpreter: &Interpreter, name: &str, args: &[&str]) -> Self {
        Self::start_in(interpreter, name, args, &[])
    }

    /// The same with variables in its environment.
    ///
    /// # Panics
    /// As [`Target::start`].
    #[must_use]
    pub fn start_in(interpreter: &Interpreter, name: &str, args: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut command = interpreter.command();
        command.envs(environment.iter().copied());
        let copied = interpreter.root.as_deref().map(copied);
        let script = match (&copied, &interpreter.root) {
            (Some(dir), Some(root)) => {
                Path::new("/").join(dir.path().strip_prefix(root).expect("it was made there")).join(name)
            }
            _ => program(name),
        };
        command.arg(script).args(args);
        Self::of(&mut command, interpreter.name, name, copied)
    }

    /// Runs a program that is not an interpreter of the list and brings its own Python.
    ///
    /// # Panics
    /// As [`Target::start`].
    #[must_use]
    pub fn embedded(command: &mut Command, name: &str) -> Self {
        Self::of(command, "an embedded interpreter", name, None)
    }

    fn of(command: &mut Command, interpreter: &'static str, name: &str, programs: Option<TempDir>) -> Self {
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0).spawn();
        let mut child = spawned.unwrap_or_else(|error| panic!("cannot run {name} with {interpreter}: {error}"));
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().expect("standard output is a pipe"));
        let mut target = Self { child, stdin, stdout, facts: Value::Null, interpreter, _programs: programs };
        let line = target.line();
        target.facts = serde_json::from_str(&line)
            .unwrap_or_else(|error| panic!("{name} with {interpreter} is not ready, it says {line:?}: {error}"));
        target
    }

    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Gives all its threads priority over other programs, which then take no CPU from it. Threads that it starts later
    /// inherit this.
    ///
    /// # Panics
    /// Without the right to do so.
    pub fn make_urgent(&self) {
        // SAFETY: setpriority(2) touches no memory; the group is the child's own (`process_group(0)`).
        let result = unsafe { libc::setpriority(libc::PRIO_PGRP, self.child.id(), -19) };
        assert_eq!(result, 0, "the target cannot be made urgent: {}", std::io::Error::last_os_error());
    }

    /// The interpreter's name, for messages.
    #[must_use]
    pub fn interpreter(&self) -> &'static str {
        self.interpreter
    }

    /// The next line of its output.
    ///
    /// # Panics
    /// When it cannot be read.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("the program's output can be read");
        line.trim_end().to_owned()
    }

    /// Sends it an empty line, for which some programs wait.
    ///
    /// # Panics
    /// When it no longer listens.
    pub fn go(&mut self) {
        self.tell("");
    }

    /// Sends it a line, which some programs obey.
    ///
    /// # Panics
    /// When it no longer listens.
    pub fn tell(&mut self, words: &str) {
        let stdin = self.stdin.as_mut().expect("standard input is open");
        stdin.write_all(format!("{words}\n").as_bytes()).expect("the program reads its input");
    }

    /// Its answer to an empty line, in JSON.
    ///
    /// # Panics
    /// When it says something else, or nothing.
    pub fn ask(&mut self) -> serde_json::Value {
        self.go();
        serde_json::from_str(&self.line()).expect("the program answers in JSON")
    }

    /// Closes its input and waits for its end.
    ///
    /// # Panics
    /// When it cannot be waited for.
    pub fn wait(&mut self) -> ExitStatus {
        self.stdin = None;
        self.child.wait().expect("a child can be waited for")
    }

    /// Kills it, and waits for its end.
    pub fn kill(&mut self) {
        let group = i32::try_from(self.child.id()).expect("pids are positive");
        // SAFETY: kill(2) touches no memory; the group is the child's own (`process_group(0)`), and the child has not
        // been waited for, so its id is not reused.
        unsafe { libc::kill(-group, libc::SIGKILL) };
        let _ended = self.child.wait();
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.kill();
        }
    }
}
