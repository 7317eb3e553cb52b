//! How formats name frames, threads and processes.

use super::process_frame_name;
use crate::profile::{Frame, Profile, SPECIAL_FILENAME, ThreadId};

/// What a frame's code is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Kind {
    /// A line of Python source.
    Python,
    /// Machine code outside the kernel.
    Native,
    /// Kernel code.
    Kernel,
    /// No code: the garbage collector, a process's name, the place where a stack was cut.
    Special,
}

/// A frame in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Label<'a> {
    pub kind: Kind,
    /// Qualified name; of native frames without their object.
    pub function: &'a str,
    /// Source file, or a native frame's object; empty when there is none.
    pub filename: &'a str,
    /// First line of the running instruction.
    pub line: Option<u32>,
}

impl<'a> Label<'a> {
    /// What a frame of the profile is called.
    pub fn of(profile: &'a Profile, frame: &Frame) -> Self {
        let function = profile.strings.get(frame.function);
        let filename = profile.strings.get(frame.filename);
        if filename != SPECIAL_FILENAME || frame.lineno != -1 {
            let line = u32::try_from(frame.lineno).ok().filter(|&line| line > 0);
            return Self { kind: Kind::Python, function, filename, line };
        }
        if let Some(function) = function.strip_prefix("[k] ") {
            return Self { kind: Kind::Kernel, function, filename: "[kernel]", line: None };
        }
        match function.split_once('!') {
            Some((object, symbol)) if !object.is_empty() && !function.starts_with('<') => {
                Self { kind: Kind::Native, function: symbol, filename: object, line: None }
            }
            _ => {
                let kind = if function == "<native>" { Kind::Native } else { Kind::Special };
                Self { kind, function, filename: "", line: None }
            }
        }
    }

    /// `function (file.py)`, `libz.so.1!deflate`, `[k] do_syscall_64`, `<GC>`: for formats that know one name only.
    pub fn to_text(self) -> String {
        let Self { function, filename, .. } = self;
        match self.kind {
            Kind::Python => format!("{function} ({})", base_name(filename)),
            Kind::Native if !filename.is_empty() => format!("{filename}!{function}"),
            Kind::Kernel => format!("[k] {function}"),
            Kind::Native | Kind::Special => function.to_owned(),
        }
    }
}

/// A path without its directories.
pub(super) fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Name of a thread for people.
pub(super) fn thread_name(profile: &Profile, id: ThreadId) -> String {
    let thread = profile.thread(id);
    let tid = super::file_thread_id(profile, id);
    let mut name =
        if thread.name.is_empty() { format!("thread {tid}") } else { format!("{} (tid {tid})", thread.name) };
    if thread.interpreter != 0 {
        name.push_str(&format!(", interpreter {}", thread.interpreter));
    }
    name
}

/// The frames that stand outside of a thread's stacks in formats that join threads, outermost first: the process,
/// where there are several, and the thread, where it is wanted.
pub(super) fn roots(profile: &Profile, id: ThreadId, by_thread: bool) -> Vec<String> {
    let process = profile.meta.many_processes.then(|| process_frame_name(profile.process_of(id)));
    process.into_iter().chain(by_thread.then(|| thread_name(profile, id))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Process, Thread};

    #[test]
    fn frames_in_words() {
        let mut profile = Profile::default();
        for (filename, function, lineno, kind, text, line) in [
            ("/srv/app.py", "A.run", 7, Kind::Python, "A.run (app.py)", Some(7)),
            ("app.py", "f", -1, Kind::Python, "f (app.py)", None),
            ("app.py", "f", 0, Kind::Python, "f (app.py)", None),
            ("~", "f", 3, Kind::Python, "f (~)", Some(3)),
            ("~", "libz.so.1!deflate", -1, Kind::Native, "libz.so.1!deflate", None),
            ("~", "[k] read", -1, Kind::Kernel, "[k] read", None),
            ("~", "<native>", -1, Kind::Native, "<native>", None),
            ("~", "<GC>", -1, Kind::Special, "<GC>", None),
            ("~", "!x", -1, Kind::Special, "!x", None),
        ] {
            let filename = profile.strings.intern(filename);
            let function = profile.strings.intern(function);
            let frame = Frame { lineno, ..Frame::without_location(filename, function) };
            let label = Label::of(&profile, &frame);
            assert_eq!((label.kind, label.to_text().as_str(), label.line), (kind, text, line));
        }
    }

    #[test]
    fn roots_of_stacks() {
        let mut profile = Profile::default();
        profile.processes.push(Process { pid: 9, comm: "app".into(), ..Process::default() });
        let thread = Thread { ns_tid: 5, unique_tid: 50, interpreter: 2, name: "w".into(), ..Thread::default() };
        profile.threads.push(thread);
        assert!(roots(&profile, ThreadId(0), false).is_empty());
        assert_eq!(roots(&profile, ThreadId(0), true), ["w (tid 5), interpreter 2"]);
        profile.meta.many_processes = true;
        assert_eq!(roots(&profile, ThreadId(0), true), ["app (9)", "w (tid 50), interpreter 2"]);
    }
}
