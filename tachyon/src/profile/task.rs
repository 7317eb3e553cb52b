//! Frames that say which asyncio task the frames above them work for, as CPython's profiler shows them, or which greenlet.

use super::SPECIAL_FILENAME;

/// File name of a task's frame, whose function is the task's name (CPython 3.15, `Lib/profiling/sampling/collector.py`). It goes below
/// the frames of the task's coroutines; whatever awaits the task goes below it.
pub const TASK_FILENAME: &str = "<task>";

/// The same of a greenlet's frame, whose function is the greenlet's name, or that of its type. It is the outermost one of the greenlet.
pub const GREENLET_FILENAME: &str = "<greenlet>";

/// The name of the task or greenlet that a frame stands for; `None`: it does not stand for one.
#[must_use]
pub fn task_name<'a>(filename: &str, function: &'a str) -> Option<&'a str> {
    let name = match filename {
        TASK_FILENAME | GREENLET_FILENAME => function,
        SPECIAL_FILENAME | "" => {
            let is_of = |filename| function.strip_prefix(filename)?.strip_prefix(' ');
            is_of(TASK_FILENAME).or_else(|| is_of(GREENLET_FILENAME))?
        }
        _ => return None,
    };
    Some(without_count(name))
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
}
