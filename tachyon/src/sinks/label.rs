//! How formats name frames, threads and processes.

use super::{process_frame_name, program_name};
use crate::profile::{Frame, Process, Profile, SPECIAL_FILENAME, ThreadId, package_path};
use std::borrow::Cow;
use std::collections::HashMap;

/// What a frame's code is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A line of Python source.
    Python,
    /// Machine code outside the kernel.
    Native,
    /// Kernel code.
    Kernel,
    /// No code: the garbage collector, a process's name, the place where a stack was cut.
    Special,
}

impl Kind {
    /// Whether native code may be charged to it: Python code, or one of the marks that stand for no code.
    pub(crate) const fn is_python(self) -> bool {
        matches!(self, Self::Python | Self::Special)
    }

    /// Its name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Native => "native",
            Self::Kernel => "kernel",
            Self::Special => "special",
        }
    }
}

/// A frame's names for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label<'a> {
    /// What it is.
    pub kind: Kind,
    /// Qualified name; for native frames without their object.
    pub function: &'a str,
    /// Source file, or a native frame's object; empty when there is none.
    pub filename: &'a str,
    /// First line of the running instruction.
    pub line: Option<u32>,
}

impl<'a> Label<'a> {
    /// The label of a frame of the profile.
    ///
    /// # Panics
    /// When the frame's names belong to another profile.
    #[must_use]
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
        match native_name(function) {
            Some((object, symbol)) => Self { kind: Kind::Native, function: symbol, filename: object, line: None },
            None => {
                let kind = if function == "<native>" { Kind::Native } else { Kind::Special };
                Self { kind, function, filename: "", line: None }
            }
        }
    }

    /// `function (json/decoder.py)`, `deflate (libz.so.1)`, `[k] do_syscall_64`, `<GC>`: for graphics, where names are cut at
    /// the end.
    pub(crate) fn to_text(self) -> String {
        let Self { function, filename, .. } = self;
        match self.kind {
            Kind::Python => format!("{function} ({})", package_path(filename)),
            Kind::Native if !filename.is_empty() => format!("{} ({filename})", fold_templates(function)),
            Kind::Kernel => format!("[k] {function}"),
            Kind::Native | Kind::Special => function.to_owned(),
        }
    }
}

/// Object and function of a native frame's name: `libz.so.1!deflate`.
pub(crate) fn native_name(name: &str) -> Option<(&str, &str)> {
    name.split_once('!').filter(|(object, _)| !object.is_empty() && !object.starts_with('<'))
}

/// A path without its directories.
pub(crate) fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Name of a thread for people.
pub(crate) fn thread_name(profile: &Profile, id: ThreadId) -> String {
    let thread = profile.thread(id);
    let tid = super::file_thread_id(profile, id);
    let mut name =
        if thread.name.is_empty() { format!("thread {tid}") } else { format!("{} (tid {tid})", thread.name) };
    if thread.interpreter != 0 {
        name.push_str(&format!(", interpreter {}", thread.interpreter));
    }
    name
}

/// What goes at the root of stacks in formats that join threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RootOptions {
    /// The thread.
    pub by_thread: bool,
    /// The program instead of the process, if there are several processes.
    pub merge_processes: bool,
}

/// The frames that go around a thread's stacks in formats that join threads.
pub(super) struct Roots<'a> {
    profile: &'a Profile,
    by_thread: bool,
    /// By process; empty where there is only one.
    processes: Vec<String>,
}

impl<'a> Roots<'a> {
    pub fn new(profile: &'a Profile, options: RootOptions) -> Self {
        let processes = match profile.meta.many_processes {
            false => Vec::new(),
            true if options.merge_processes => programs(&profile.processes),
            true => profile.processes.iter().map(process_frame_name).collect(),
        };
        Self { profile, by_thread: options.by_thread, processes }
    }

    /// The roots of a thread, outermost first: the process, if there are several, and the thread, if wanted.
    pub fn of(&self, id: ThreadId) -> Vec<String> {
        let process = self.processes.get(self.profile.thread(id).process as usize).cloned();
        process.into_iter().chain(self.by_thread.then(|| thread_name(self.profile, id))).collect()
    }
}

/// Names of processes, the same for all that run one program: `python3 app.py (4 processes)`.
fn programs(processes: &[Process]) -> Vec<String> {
    // Not by the displayed name, which has no directories.
    let key = |process: &Process| (program_name(process), crate::profile::script(&process.cmdline));
    let mut programs: HashMap<(String, String), usize> = HashMap::new();
    for process in processes {
        *programs.entry(key(process)).or_default() += 1;
    }
    let name = |process: &Process| {
        let (name, script) = key(process);
        match programs[&(name.clone(), script.clone())] {
            1 => process_frame_name(process),
            count if programs.keys().filter(|(other, _)| *other == name).count() > 1 => {
                format!("{name} ({count} processes of {script})")
            }
            count => format!("{name} ({count} processes)"),
        }
    };
    processes.iter().map(name).collect()
}

/// A demangled name with `<…>` for its template arguments, which may be longer than everything else: `std::sort<…>`. The
/// brackets that a Rust path begins with are kept: `<Vec<…> as Clone>::clone`.
pub(crate) fn fold_templates(name: &str) -> Cow<'_, str> {
    if !name.contains('<') {
        return Cow::Borrowed(name);
    }
    let mut out = String::with_capacity(name.len());
    // For each open bracket, whether its contents are folded.
    let mut open: Vec<bool> = Vec::new();
    let mut characters = name.char_indices().peekable();
    while let Some((at, character)) = characters.next() {
        let before = &name[..at];
        let folding = open.contains(&true);
        if before.ends_with("operator") && "<>-=".contains(character) {
            let symbol = &name[at..];
            let len = symbol.find(|character| !"<>-=".contains(character)).unwrap_or(symbol.len());
            if !folding {
                out.push_str(&symbol[..len]);
            }
            while characters.next_if(|(next, _)| *next < at + len).is_some() {}
            continue;
        }
        match character {
            '<' => {
                let previous = before.chars().next_back();
                let arguments = previous.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':' || c == ' ')
                    && !before.ends_with("impl ")
                    && !before.ends_with("as ")
                    && !before.ends_with("for ");
                if !folding {
                    out.push_str(if arguments { "<…>" } else { "<" });
                }
                open.push(arguments);
            }
            '>' if !before.ends_with(['-', '=']) => {
                let Some(folded) = open.pop() else { return Cow::Borrowed(name) };
                if !folded && !folding {
                    out.push('>');
                }
            }
            _ if !folding => out.push(character),
            _ => {}
        }
    }
    if open.is_empty() { Cow::Owned(out) } else { Cow::Borrowed(name) }
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
            ("~", "libz.so.1!deflate", -1, Kind::Native, "deflate (libz.so.1)", None),
            ("/usr/lib/python3.11/re/__init__.py", "compile", 9, Kind::Python, "compile (re/__init__.py)", Some(9)),
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
        let roots = |profile: &Profile, by_thread| {
            Roots::new(profile, RootOptions { by_thread, ..RootOptions::default() }).of(ThreadId(0))
        };
        assert!(roots(&profile, false).is_empty());
        assert_eq!(roots(&profile, true), ["w (tid 5), interpreter 2"]);
        profile.meta.many_processes = true;
        assert_eq!(roots(&profile, true), ["app (9)", "w (tid 50), interpreter 2"]);
    }

    #[test]
    fn workers_of_one_program_are_one() {
        let process = |pid, comm: &str, line: &str| {
            let cmdline = line.split(' ').map(str::to_owned).collect();
            Process { pid, comm: comm.into(), cmdline, ..Process::default() }
        };
        let processes = [
            process(1, "python3", "/usr/bin/python3 /srv/app.py"),
            process(2, "python3", "/usr/bin/python3 /srv/app.py"),
            process(3, "python3", "python3 -m celery worker"),
            process(4, "gunicorn", "gunicorn: worker [app]"),
            process(5, "gunicorn", "gunicorn: master [app]"),
            process(6, "manage.py", "python /a/manage.py"),
            process(7, "manage.py", "python /a/manage.py"),
            process(8, "manage.py", "python /b/manage.py"),
        ];
        assert_eq!(
            programs(&processes),
            [
                "python3 app.py (2 processes)",
                "python3 app.py (2 processes)",
                "python3 -m celery (3)",
                "gunicorn (2 processes)",
                "gunicorn (2 processes)",
                "python manage.py (2 processes of /a/manage.py)",
                "python manage.py (2 processes of /a/manage.py)",
                "python manage.py (8)",
            ]
        );
        assert_eq!(process_frame_name(&processes[0]), "python3 app.py (1)");
    }

    #[test]
    fn template_arguments_are_folded() {
        for (name, shown) in [
            ("deflate", "deflate"),
            ("std::vector<int, std::allocator<int> >::push_back(int const&)", "std::vector<…>::push_back(int const&)"),
            ("std::sort<A<B>, C>(D<E>)", "std::sort<…>(D<…>)"),
            ("S::operator<(S const&) const", "S::operator<(S const&) const"),
            ("std::operator<< <char>(A<B>&)", "std::operator<< <…>(A<…>&)"),
            ("P<int>::operator->() const", "P<…>::operator->() const"),
            (
                "auto f<int>(int)::{lambda()#1}::operator()() const -> T<int>",
                "auto f<…>(int)::{lambda()#1}::operator()() const -> T<…>",
            ),
            ("<alloc::vec::Vec<T> as core::clone::Clone>::clone", "<alloc::vec::Vec<…> as core::clone::Clone>::clone"),
            ("core::ptr::drop_in_place::<Option<String>>", "core::ptr::drop_in_place::<…>"),
            ("a>b", "a>b"),
            ("a<b", "a<b"),
        ] {
            assert_eq!(fold_templates(name), shown);
        }
    }
}
