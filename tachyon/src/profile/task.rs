//! Frames that say whose work the frames above them are: asyncio tasks, as CPython's profiler shows them.

use super::SPECIAL_FILENAME;

/// File name of a task's frame, whose function is the task's name (CPython 3.15, `Lib/profiling/sampling/collector.py`). It lies below
/// the frames of the task's coroutines; what awaits the task lies below it.
pub const TASK_FILENAME: &str = "<task>";

/// The name of the task that a frame stands for; `None`: it stands for none.
#[must_use]
pub fn task_name<'a>(filename: &str, function: &'a str) -> Option<&'a str> {
    match filename {
        TASK_FILENAME => Some(function),
        SPECIAL_FILENAME | "" => function.strip_prefix(TASK_FILENAME)?.strip_prefix(' '),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_told_by_their_file_or_their_name() {
        assert_eq!(task_name("<task>", "Task-7"), Some("Task-7"));
        assert_eq!(task_name("~", "<task> fetch"), Some("fetch"));
        assert_eq!(task_name("~", "<tasks> x"), None);
        assert_eq!(task_name("app.py", "<task> fetch"), None);
    }
}
