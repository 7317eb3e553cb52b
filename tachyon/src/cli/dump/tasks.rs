//! `dump --async`: asyncio's tasks, and greenlets, as data and as the trees that `python -m asyncio pstree` prints.

use super::super::escape::escape;
use super::{Frame, colon};
use crate::snapshot::{self, Snapshot, Tasks};
use serde::{Serialize, Serializer};
use std::collections::{HashMap, HashSet};
use std::io::{self, Write};

/// Most lines of all trees beyond those that show each task once. A task that several others await is shown below each of them, with
/// everything that it awaits: that doubles at each level.
const MAX_REPEATED_LINES: usize = 20_000;

/// How far to the right a tree goes, in bytes: each frame moves what it awaits by four columns. What does not fit is shown as a
/// tree of its own.
const MAX_INDENT: usize = 4_000;

/// Most cycles that are reported.
const MAX_CYCLES: usize = 100;

/// The key `greenlets` of the JSON: tasks, each awaited by its parent, of a loop whose address is that of the thread's main greenlet.
#[derive(Debug)]
pub(super) struct Greenlets(Asyncio);

#[derive(Serialize)]
struct Greenlet<'a> {
    id: u64,
    name: Option<&'a str>,
    tid: Option<u32>,
    main: u64,
    parent: Option<u64>,
    running: bool,
    steady: bool,
    whole: bool,
    frames: &'a [Frame],
}

impl Greenlets {
    pub(super) fn new(greenlets: &Tasks, snapshot: &Snapshot) -> Self {
        // They do not wait for their parents: that these lead in a circle is no deadlock.
        Self(Asyncio { cycles: Vec::new(), ..Asyncio::new(greenlets, snapshot) })
    }

    /// Prints the tree of each thread; `name_of` names a thread.
    pub(super) fn print(&self, name_of: impl Fn(u32) -> Option<String>, out: &mut dyn Write) -> io::Result<()> {
        self.0.print(name_of, out)
    }
}

impl Serialize for Greenlets {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.tasks.iter().map(|task| Greenlet {
            id: task.id,
            name: task.name.as_deref(),
            tid: task.tid,
            main: task.event_loop,
            parent: task.awaited_by.first().copied(),
            running: task.running,
            steady: task.steady,
            whole: task.whole,
            frames: &task.frames,
        }))
    }
}

/// The key `asyncio` of the JSON.
#[derive(Debug, Serialize)]
pub(super) struct Asyncio {
    loops: Vec<EventLoop>,
    tasks: Vec<Task>,
    cycles: Vec<Vec<u64>>,
}

#[derive(Debug, Serialize)]
struct EventLoop {
    id: u64,
    #[serde(rename = "type")]
    kind: Option<String>,
    tid: Option<u32>,
    running: Option<bool>,
}

#[derive(Debug, Serialize)]
struct Task {
    id: u64,
    name: Option<String>,
    #[serde(rename = "loop")]
    event_loop: u64,
    tid: Option<u32>,
    running: bool,
    steady: bool,
    whole: bool,
    awaited_by: Vec<u64>,
    frames: Vec<Frame>,
    /// Index of the loop in our own list.
    #[serde(skip)]
    loop_at: usize,
    #[serde(skip)]
    greenlet: bool,
}

impl Asyncio {
    pub(super) fn new(tasks: &Tasks, snapshot: &Snapshot) -> Self {
        let event_loop = |found: &snapshot::EventLoop| EventLoop {
            id: found.address,
            kind: found.kind.clone(),
            tid: found.tid,
            running: found.runs,
        };
        let task = |found: &snapshot::AsyncTask| {
            let event_loop = tasks.loops.get(found.event_loop);
            Task {
                id: found.address,
                name: found.name.clone(),
                event_loop: event_loop.map_or(0, |found| found.address),
                tid: event_loop.and_then(|found| found.tid),
                running: found.running,
                steady: found.steady,
                whole: found.whole,
                awaited_by: found.awaited_by.clone(),
                frames: found.frames.iter().map(|&id| Frame::new(id, snapshot)).collect(),
                loop_at: found.event_loop,
                greenlet: found.greenlet,
            }
        };
        let tasks_told: Vec<Task> = tasks.tasks.iter().map(task).collect();
        // What changed while it was read may look like a cycle.
        let steady = |cycle: &Vec<usize>| cycle.iter().all(|&at| tasks_told.get(at).is_some_and(|task| task.steady));
        let cycles = Graph::new(&tasks_told).cycles().into_iter().filter(steady);
        let ids =
            |cycle: Vec<usize>| cycle.into_iter().filter_map(|at| tasks_told.get(at)).map(|task| task.id).collect();
        let cycles = cycles.map(ids).collect();
        Self { loops: tasks.loops.iter().map(event_loop).collect(), tasks: tasks_told, cycles }
    }

    /// There is no loop that runs or has tasks.
    pub(super) fn is_empty(&self) -> bool {
        self.loops.is_empty()
    }

    /// Prints the trees of each loop; `name_of` names a thread.
    pub(super) fn print(&self, name_of: impl Fn(u32) -> Option<String>, out: &mut dyn Write) -> io::Result<()> {
        if self.is_empty() {
            return writeln!(out, "\nNo asyncio tasks, and no event loop that runs");
        }
        let graph = Graph::new(&self.tasks);
        let mut printer = Printer::new(self, &graph);
        for (at, event_loop) in self.loops.iter().enumerate() {
            writeln!(out)?;
            event_loop.print(self.tasks.iter().filter(|task| task.loop_at == at), &name_of, out)?;
            for root in printer.roots(at) {
                printer.tree(root, out)?;
            }
            // A task in a cycle, or awaited only from one, does not hang from any root.
            while let Some(rest) = printer.unseen(at) {
                printer.tree(rest, out)?;
            }
        }
        for cycle in &self.cycles {
            let name = |id: &u64| self.tasks.iter().find(|task| task.id == *id).map_or_else(String::new, Task::shown);
            let names: Vec<String> = cycle.iter().chain(cycle.first()).map(name).collect();
            writeln!(out, "\nThey await each other, and none of them can end: {}", names.join(" → "))?;
        }
        Ok(())
    }
}

impl EventLoop {
    fn print<'t>(
        &self,
        tasks: impl Iterator<Item = &'t Task>,
        name_of: impl Fn(u32) -> Option<String>,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        match self.tid {
            Some(tid) => match name_of(tid) {
                Some(name) => write!(out, "Thread {tid} \"{}\"", escape(&name))?,
                None => write!(out, "Thread {tid}")?,
            },
            None => write!(out, "No thread that is known")?,
        }
        let tasks: Vec<&Task> = tasks.collect();
        let of_greenlets = tasks.iter().any(|task| task.greenlet);
        if !of_greenlets {
            let kind = self.kind.as_deref().unwrap_or("event loop");
            let runs = if self.running == Some(false) { " (not running)" } else { "" };
            write!(out, ", {} at {:#x}{runs}", escape(kind), self.id)?;
        }
        match (tasks.len(), if of_greenlets { "greenlet" } else { "task" }) {
            (0, what) => write!(out, ": no {what}s")?,
            (1, what) => write!(out, ": 1 {what}")?,
            (count, what) => write!(out, ": {count} {what}s")?,
        }
        match tasks.iter().find(|task| task.running) {
            Some(task) => writeln!(out, ", runs {}", task.shown()),
            None if self.running == Some(true) && !tasks.is_empty() => writeln!(out, ", runs none of them"),
            None => writeln!(out),
        }
    }
}

impl Task {
    /// Its name as text.
    fn shown(&self) -> String {
        let unnamed = || format!("<{} {:#x}>", if self.greenlet { "greenlet" } else { "task" }, self.id);
        self.name.as_deref().map_or_else(unnamed, |name| escape(name).into_owned())
    }

    /// What follows its name in a tree.
    fn notes(&self) -> String {
        let mut notes = Vec::new();
        if self.running {
            notes.push("running");
        }
        if !self.steady {
            notes.push("changed while it was read");
        }
        if !self.whole {
            notes.push("stack cut");
        }
        if notes.is_empty() { String::new() } else { format!(" [{}]", notes.join(", ")) }
    }
}

/// Who awaits whom: tasks by their places in the list.
struct Graph {
    /// Those that a task awaits.
    awaited: Vec<Vec<usize>>,
    /// Nobody awaits it.
    root: Vec<bool>,
}

impl Graph {
    fn new(tasks: &[Task]) -> Self {
        let places: HashMap<u64, usize> = tasks.iter().enumerate().map(|(at, task)| (task.id, at)).collect();
        let mut awaited = vec![Vec::new(); tasks.len()];
        let mut root = vec![true; tasks.len()];
        for (at, task) in tasks.iter().enumerate() {
            for awaiter in task.awaited_by.iter().filter_map(|id| places.get(id)) {
                if let (Some(children), Some(root)) = (awaited.get_mut(*awaiter), root.get_mut(at)) {
                    children.push(at);
                    *root = false;
                }
            }
        }
        Self { awaited, root }
    }

    fn children(&self, task: usize) -> &[usize] {
        self.awaited.get(task).map_or(&[], Vec::as_slice)
    }

    /// Cycles, each from one of its tasks to the one that awaits it: some of each group of connected ones.
    fn cycles(&self) -> Vec<Vec<usize>> {
        let mut cycles = Vec::new();
        let mut done = HashSet::new();
        for start in 0..self.awaited.len() {
            // The tasks from the start to the current one, each with how many of its children have been looked at.
            let mut path: Vec<(usize, usize)> = Vec::new();
            let mut on_path = HashMap::new();
            if !done.contains(&start) {
                on_path.insert(start, 0);
                path.push((start, 0));
            }
            while let Some((task, looked)) = path.last_mut() {
                let (task, child) = (*task, self.children(*task).get(*looked).copied());
                *looked += 1;
                match child {
                    None => {
                        on_path.remove(&task);
                        done.insert(task);
                        path.pop();
                    }
                    Some(child) if done.contains(&child) => {}
                    Some(child) => match on_path.get(&child) {
                        Some(&from) if cycles.len() < MAX_CYCLES => {
                            cycles.push(path.iter().skip(from).map(|(task, _)| *task).collect());
                        }
                        Some(_) => {}
                        None => {
                            on_path.insert(child, path.len());
                            path.push((child, 0));
                        }
                    },
                }
            }
        }
        cycles
    }
}

/// Prints trees.
struct Printer<'a> {
    asyncio: &'a Asyncio,
    graph: &'a Graph,
    seen: HashSet<usize>,
    /// Every task of a loop before this one has been printed.
    looked: usize,
    repeated_lines: usize,
}

/// What to print next.
enum Step {
    /// A task below another, or a root: the prefix of its line, and whether it is the last one there.
    Enter { task: usize, prefix: String, last: bool },
    /// Everything below it has been printed.
    Leave(usize),
}

impl<'a> Printer<'a> {
    fn new(asyncio: &'a Asyncio, graph: &'a Graph) -> Self {
        Self { asyncio, graph, seen: HashSet::new(), looked: 0, repeated_lines: 0 }
    }

    fn of_loop(&self, event_loop: usize, from: usize) -> impl Iterator<Item = usize> {
        let tasks = self.asyncio.tasks.iter().enumerate().skip(from);
        tasks.filter(move |(_, task)| task.loop_at == event_loop).map(|(at, _)| at)
    }

    fn roots(&mut self, event_loop: usize) -> Vec<usize> {
        self.looked = 0;
        self.of_loop(event_loop, 0).filter(|&at| self.graph.root.get(at) == Some(&true)).collect()
    }

    /// A task of a loop that is in no tree so far.
    fn unseen(&mut self, event_loop: usize) -> Option<usize> {
        let found = self.of_loop(event_loop, self.looked).find(|at| !self.seen.contains(at));
        self.looked = found.map_or(self.asyncio.tasks.len(), |at| at + 1);
        found
    }

    fn tree(&mut self, root: usize, out: &mut dyn Write) -> io::Result<()> {
        let mut steps = vec![Step::Enter { task: root, prefix: String::new(), last: true }];
        let mut above = HashSet::new();
        while let Some(step) = steps.pop() {
            let (at, prefix, last) = match step {
                Step::Leave(task) => {
                    above.remove(&task);
                    continue;
                }
                Step::Enter { task, prefix, last } => (task, prefix, last),
            };
            let Some(task) = self.asyncio.tasks.get(at) else { continue };
            let branch = if last { "└── " } else { "├── " };
            let letter = if task.greenlet { 'G' } else { 'T' };
            write!(out, "{prefix}{branch}({letter}) {}{}", task.shown(), task.notes())?;
            if above.contains(&at) {
                writeln!(out, " (awaits a task above that awaits it)")?;
                continue;
            }
            if !self.seen.insert(at) {
                self.repeated_lines += 1 + task.frames.len();
                if self.repeated_lines > MAX_REPEATED_LINES {
                    writeln!(out, " (shown before)")?;
                    continue;
                }
            }
            writeln!(out)?;
            let children = self.graph.children(at);
            let mut prefix = prefix + if last { "    " } else { "│   " };
            // What a task awaits hangs from the line that awaits it. A greenlet's parent need not be waiting for it.
            let of_children = task.greenlet.then(|| prefix.clone());
            for (number, frame) in task.frames.iter().rev().enumerate() {
                if prefix.len() > MAX_INDENT {
                    break;
                }
                let children_follow = number == 0 && task.greenlet && !children.is_empty();
                let (branch, below) = if children_follow { ("├──", "│   ") } else { ("└──", "    ") };
                let (function, file) = (escape(&frame.function), escape(&frame.filename));
                writeln!(out, "{prefix}{branch}  {function} {file}{}", colon(frame.lineno))?;
                prefix.push_str(below);
            }
            let prefix = of_children.unwrap_or(prefix);
            if prefix.len() > MAX_INDENT {
                writeln!(out, "{prefix}└──  … (too deep: what it awaits is shown further below)")?;
                continue;
            }
            above.insert(at);
            steps.push(Step::Leave(at));
            for (number, &child) in children.iter().enumerate().rev() {
                steps.push(Step::Enter { task: child, prefix: prefix.clone(), last: number + 1 == children.len() });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tasks 0, 1, … in one loop, each with those that await it and this many frames.
    fn asyncio(awaited_by: &[&[u64]], frames: usize) -> Asyncio {
        let frame = |number: usize| Frame {
            function: format!("f{number}"),
            filename: "a.py".to_owned(),
            lineno: Some(1),
            end_lineno: None,
            column: None,
            end_column: None,
        };
        let task = |(id, awaited_by): (usize, &&[u64])| Task {
            id: id as u64,
            name: Some(id.to_string()),
            event_loop: 7,
            tid: Some(1),
            running: false,
            steady: true,
            whole: true,
            awaited_by: awaited_by.to_vec(),
            frames: (0..frames).map(frame).collect(),
            loop_at: 0,
            greenlet: false,
        };
        let event_loop = EventLoop { id: 7, kind: Some("Loop".to_owned()), tid: Some(1), running: Some(true) };
        Asyncio {
            loops: vec![event_loop],
            tasks: awaited_by.iter().enumerate().map(task).collect(),
            cycles: Vec::new(),
        }
    }

    fn printed(asyncio: &Asyncio) -> String {
        let mut out = Vec::new();
        asyncio.print(|_| None, &mut out).expect("memory takes it");
        String::from_utf8(out).expect("text")
    }

    fn cycles(awaited_by: &[&[u64]]) -> Vec<Vec<usize>> {
        Graph::new(&asyncio(awaited_by, 0).tasks).cycles()
    }

    #[test]
    fn trees_look_like_pstrees() {
        let text = printed(&asyncio(&[&[], &[0], &[0], &[]], 2));
        let wanted = "\nThread 1, Loop at 0x7: 4 tasks, runs none of them\n\
            └── (T) 0\n    └──  f1 a.py:1\n        └──  f0 a.py:1\n            \
            ├── (T) 1\n            │   └──  f1 a.py:1\n            │       └──  f0 a.py:1\n            \
            └── (T) 2\n                └──  f1 a.py:1\n                    └──  f0 a.py:1\n\
            └── (T) 3\n    └──  f1 a.py:1\n        └──  f0 a.py:1\n";
        assert_eq!(text, wanted);
    }

    #[test]
    fn circles_end() {
        assert_eq!(cycles(&[&[1], &[0], &[]]), [[0, 1]]);
        assert_eq!(cycles(&[&[0]]), [[0]]);
        assert_eq!(cycles(&[&[], &[0], &[0, 1]]), Vec::<Vec<usize>>::new());
        // 3 is awaited by the cycle of 0, 1, 2.
        assert_eq!(cycles(&[&[2], &[0], &[1], &[0]]), [[0, 1, 2]]);
        let text = printed(&asyncio(&[&[1], &[0], &[0]], 0));
        assert_eq!(text.matches("(T)").count(), 4, "{text}");
        assert_eq!(text.matches(" (awaits a task above that awaits it)").count(), 1, "{text}");
    }

    #[test]
    fn what_doubles_with_each_level_stays_bounded() {
        // Two tasks per level, each awaited by both above it: 2^30 paths.
        let above: Vec<Vec<u64>> =
            (0..60_u64).map(|at| if at < 2 { vec![] } else { vec![at / 2 * 2 - 2, at / 2 * 2 - 1] }).collect();
        let above: Vec<&[u64]> = above.iter().map(Vec::as_slice).collect();
        let text = printed(&asyncio(&above, 1));
        assert!(text.lines().count() < 3 * MAX_REPEATED_LINES, "{}", text.lines().count());
        assert!((0..60).all(|task| text.contains(&format!("(T) {task}\n"))), "each is shown");
        assert!(text.contains(" (shown before)\n"));
    }

    #[test]
    fn what_is_deep_is_shown_in_pieces() {
        let above: Vec<Vec<u64>> = (0..5_000_u64).map(|at| if at == 0 { vec![] } else { vec![at - 1] }).collect();
        let above: Vec<&[u64]> = above.iter().map(Vec::as_slice).collect();
        let text = printed(&asyncio(&above, 1));
        assert!(text.lines().all(|line| line.len() < MAX_INDENT + 200));
        assert_eq!(text.matches("(T)").count(), 5_000);
        assert!(text.contains("… (too deep: what it awaits is shown further below)\n"));
    }
}
