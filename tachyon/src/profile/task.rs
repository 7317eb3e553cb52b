//! Frames that say which asyncio task the frames above them work for, as CPython's profiler shows them, or which greenlet.

use super::SPECIAL_FILENAME;

/// File name of a task's frame, whose function is the task's name (CPython 3.15, `Lib/profiling/sampling/collector.py`). It goes below
/// the frames of the task's coroutines; whatever awaits the task goes below it.
pub const TASK_FILENAME: &str = "<task>";

/// The same of a greenlet's frame, whose function is the greenlet's name, or that of its type. It is the outermost one of the greenlet.
pub const GREENLET_FILENAME: &str = "<greenlet>";

/// Name of the greenlet that a thread begins with.
pub const MAIN_GREENLET: &str = "main";

/// What a frame stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkOf<'a> {
    /// A task of this name.
    Task(&'a str),
    /// A greenlet of this name.
    Greenlet(&'a str),
}

impl<'a> WorkOf<'a> {
    /// That of a frame; `None`: it stands for neither.
    #[must_use]
    pub fn of(filename: &str, function: &'a str) -> Option<Self> {
        match filename {
            TASK_FILENAME => Some(Self::Task(without_count(function))),
            GREENLET_FILENAME => Some(Self::Greenlet(function)),
            SPECIAL_FILENAME | "" => {
                let is_of = |filename| function.strip_prefix(filename)?.strip_prefix(' ');
                let task = is_of(TASK_FILENAME).map(|name| Self::Task(without_count(name)));
                task.or_else(|| is_of(GREENLET_FILENAME).map(Self::Greenlet))
            }
            _ => None,
        }
    }

    /// The name.
    #[must_use]
    pub fn name(self) -> &'a str {
        match self {
            Self::Task(name) | Self::Greenlet(name) => name,
        }
    }

    /// How many of those in a stack, innermost first, come before the one that says whose work it is: the first task, or else the first
    /// greenlet. (A task may run code in a greenlet, as SQLAlchemy's do.)
    #[must_use]
    pub fn before_whose(mut all: impl Iterator<Item = Self>) -> usize {
        all.position(|one| matches!(one, Self::Task(_))).unwrap_or(0)
    }
}

/// The name of the task or greenlet that a frame stands for; `None`: it does not stand for one.
#[must_use]
pub fn task_name<'a>(filename: &str, function: &'a str) -> Option<&'a str> {
    WorkOf::of(filename, function).map(WorkOf::name)
}

/// The name of a task's frame: if several await it, in the form that CPython's profiler uses.
#[must_use]
pub fn awaited_by(name: &str, several: u16) -> String {
    if several > 1 { format!("{name} ({several} parents)") } else { name.to_owned() }
}

/// The task's own name.
fn without_count(name: &str) -> &str {
    let count = |name: &'_ str| {
        let (own, count) = name.strip_suffix(" parents)")?.rsplit_once(" (")?;
        (!count.is_empty() && count.bytes().all(|digit| digit.is_ascii_digit())).then_some(own.len())
    };
    count(name).map_or(name, |len| &name[..len])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_told_by_their_file_or_their_name() {
        assert_eq!(task_name("<task>", "Task-7"), Some("Task-7"));
        assert_eq!(task_name("~", "<task> fetch"), Some("fetch"));
        assert_eq!(task_name("<greenlet>", "Greenlet"), Some("Greenlet"));
        assert_eq!(task_name("~", "<greenlet> Greenlet"), Some("Greenlet"));
        assert_eq!(task_name("~", "<tasks> x"), None);
        assert_eq!(task_name("app.py", "<task> fetch"), None);
        assert_eq!(task_name("<task>", &awaited_by("a", 3)), Some("a"));
        assert_eq!(task_name("<task>", &awaited_by("a", 1)), Some("a"));
        assert_eq!(task_name("<task>", "a (two parents)"), Some("a (two parents)"));
    }

    #[test]
    fn the_first_task_says_whose_work_it_is_or_else_the_first_greenlet() {
        let of = |files: &[&str]| WorkOf::before_whose(files.iter().filter_map(|file| WorkOf::of(file, "name")));
        assert_eq!(of(&[]), 0);
        assert_eq!(of(&["<greenlet>", "<greenlet>"]), 0);
        assert_eq!(of(&["<greenlet>", "<greenlet>", "<task>", "<task>"]), 2);
        assert_eq!(of(&["<task>", "<greenlet>"]), 0);
    }
}
