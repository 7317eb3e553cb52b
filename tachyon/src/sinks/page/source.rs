//! Source text for the report: for functions that have samples, within bounds, whatever the files contain.
//!
//! The caller finds the files ([`SourceFiles`]); this module decides which of their lines go into the page.

use super::Usage;
use super::tree::Tree;
use crate::profile::{Process, Profile};
use crate::sinks::label::{Kind, Label};
use crate::sinks::text::escape_controls;
use serde::Serialize;
use std::collections::{BTreeSet, HashMap};

/// Most bytes of a file; larger ones are left out.
pub const LARGEST_FILE: usize = 4 << 20;
/// Most bytes of text in a page.
const MOST_TEXT: usize = 4 << 20;
/// Most files that are looked for.
const MOST_FILES: usize = 2000;
/// Most lines of a function, counted from its first line.
const LONGEST_FUNCTION: u32 = 400;
/// Lines around one that was seen, if no function's first line is found, or the function is longer.
const AROUND: u32 = 4;
/// Most bytes of a line.
const LONGEST_LINE: usize = 1000;

/// Finds source files. The paths that it is asked for come from the profiled program.
pub trait SourceFiles: Send {
    /// A process has its first sample: later requests refer to its files at this moment.
    fn met(&mut self, process: &Process);

    /// The file at this path as the process sees it, if it has at most `most` bytes.
    ///
    /// # Errors
    /// Why there is none, in words for the user.
    fn read(&mut self, process: &Process, path: &str, most: usize) -> Result<SourceFile, String>;
}

/// A file as it was found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SourceFile {
    /// All of it.
    pub bytes: Vec<u8>,
    /// Its last change, seconds since 1970.
    pub changed_unix: f64,
}

/// What the page has of a source file.
#[derive(Debug, Default, Serialize)]
pub struct Source {
    files: Vec<FileText>,
    missing: Vec<Missing>,
}

#[derive(Debug, Serialize)]
struct FileText {
    file: u32,
    /// It was changed after the recording began, so lines may have moved.
    changed: bool,
    lines: Vec<(u32, String)>,
}

#[derive(Debug, Serialize)]
struct Missing {
    file: u32,
    why: String,
}

/// A file's functions with the lines that were seen.
#[derive(Default)]
struct Wanted<'a> {
    samples: u64,
    process: u32,
    functions: HashMap<&'a str, BTreeSet<u32>>,
}

impl Source {
    /// Reads the files, those with most samples first.
    pub(super) fn read(
        profile: &Profile,
        usage: &Usage,
        stacks: &super::Stacks,
        tree: &mut Tree,
        files: &mut dyn SourceFiles,
    ) -> Self {
        let mut wanted: HashMap<&str, Wanted<'_>> = HashMap::new();
        for (place, stack) in stacks.iter().enumerate() {
            for &frame in stack {
                let label = Label::of(profile, profile.frames.get(frame));
                let (Kind::Python, Some(line)) = (label.kind, label.line) else { continue };
                let file = wanted.entry(label.filename).or_default();
                if file.samples == 0 {
                    file.process = usage.process[place];
                }
                file.samples += usage.counts[place];
                file.functions.entry(label.function).or_default().insert(line);
            }
        }
        let mut wanted: Vec<_> = wanted.into_iter().collect();
        wanted.sort_by(|(a, first), (b, second)| second.samples.cmp(&first.samples).then(a.cmp(b)));
        let (mut found, mut room) = (Self::default(), MOST_TEXT);
        for (number, (path, wanted)) in wanted.into_iter().enumerate() {
            let file = tree.string(path);
            let read = match profile.processes.get(wanted.process as usize) {
                _ if number >= MOST_FILES || room == 0 => Err("the report has enough source text already".to_owned()),
                Some(process) => files.read(process, path, LARGEST_FILE),
                None => Err("nothing is known of its process".to_owned()),
            };
            match read {
                Ok(SourceFile { bytes, changed_unix }) => {
                    let text = String::from_utf8_lossy(&bytes);
                    let lines = lines(&text, &wanted.functions, &mut room);
                    let started = profile.meta.start_unix;
                    found.files.push(FileText { file, changed: started > 0.0 && changed_unix > started, lines });
                }
                Err(why) => found.missing.push(Missing { file, why: escape_controls(&why).into_owned() }),
            }
        }
        found
    }
}

/// The lines of these functions, in order, as far as there is room.
fn lines(text: &str, functions: &HashMap<&str, BTreeSet<u32>>, room: &mut usize) -> Vec<(u32, String)> {
    let all: Vec<&str> = text.split('\n').map(|line| line.strip_suffix('\r').unwrap_or(line)).collect();
    let mut shown = BTreeSet::new();
    for (name, seen) in functions {
        shown.extend(function(&all, name, seen));
    }
    let mut lines = Vec::new();
    for number in shown {
        let line = all[number as usize - 1];
        let mut end = line.len().min(LONGEST_LINE);
        while !line.is_char_boundary(end) {
            end -= 1;
        }
        // A line costs its number and punctuation, too.
        let Some(left) = room.checked_sub(end + 8) else {
            *room = 0;
            break;
        };
        *room = left;
        lines.push((number, line[..end].to_owned()));
    }
    lines
}

/// Numbers of a function's lines: from its `def` to where its indentation ends. Without one (a module, a lambda), the
/// lines around those that were seen.
fn function(all: &[&str], name: &str, seen: &BTreeSet<u32>) -> BTreeSet<u32> {
    let last = u32::try_from(all.len()).unwrap_or(u32::MAX);
    let around = |line: u32| line.saturating_sub(AROUND).max(1)..=line.saturating_add(AROUND).min(last);
    let mut lines: BTreeSet<u32> = seen.iter().filter(|line| **line <= last).flat_map(|&line| around(line)).collect();
    let Some(&first) = seen.first().filter(|first| **first <= last) else { return lines };
    let own = name.rsplit('.').next().unwrap_or(name);
    let start = (first.saturating_sub(LONGEST_FUNCTION).max(1)..=first)
        .rev()
        .find(|&line| defines(all[line as usize - 1], own));
    let Some(start) = start else { return lines };
    let outer = indentation(all[start as usize - 1]);
    let mut end = start;
    // The head may go over several lines, and its last one may be indented like the first: `) -> int:`.
    let mut in_head = true;
    for line in start..=last.min(start + LONGEST_FUNCTION) {
        let text = all[line as usize - 1].trim();
        if text.is_empty() {
            continue;
        }
        let closes = text.starts_with([')', ']', '}']);
        if line > start && !in_head && !closes && indentation(all[line as usize - 1]) <= outer && !seen.contains(&line)
        {
            break;
        }
        in_head &= !text.ends_with(':') && line < start + AROUND * 8;
        end = line;
    }
    // Neighbouring lines belong to it only within its bounds.
    lines.retain(|&line| line >= start);
    if seen.last().is_some_and(|&last| last <= end) {
        lines.retain(|&line| line <= end);
    }
    let mut decorated = start;
    while decorated > 1 && all[decorated as usize - 2].trim_start().starts_with('@') {
        decorated -= 1;
    }
    lines.extend(decorated..=end);
    lines
}

fn defines(line: &str, name: &str) -> bool {
    let line = line.trim_start();
    let rest = line.strip_prefix("async ").map_or(line, str::trim_start);
    let rest = rest.strip_prefix("def ").or_else(|| rest.strip_prefix("class ")).map(str::trim_start);
    rest.and_then(|rest| rest.strip_prefix(name)).is_some_and(|rest| rest.trim_start().starts_with(['(', ':', '[']))
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "import os\n\n@cache\ndef f(\n    a,\n) -> int:\n    x = 1\n\n    return (\n  a)\n\ndef g():\n    pass\n\nclass A:\n    def f(self):\n        return 1\n    y = 2\nf()\n";

    fn of(name: &str, seen: &[u32]) -> Vec<u32> {
        let all: Vec<&str> = TEXT.split('\n').collect();
        function(&all, name, &seen.iter().copied().collect()).into_iter().collect()
    }

    #[test]
    fn a_function_is_shown_from_its_decorators_to_its_end() {
        assert_eq!(of("f", &[9]), (3..=10).collect::<Vec<_>>());
        assert_eq!(of("A.f", &[16, 17]), [16, 17]);
        assert_eq!(of("g", &[13]), [12, 13]);
        assert_eq!(of("<module>", &[1]), [1, 2, 3, 4, 5]);
        assert_eq!(of("f", &[4_000_000_000]), [0; 0], "lines that the file does not have");
    }

    #[test]
    fn there_is_no_more_text_than_room() {
        let long = format!("{}\nb\n", "é".repeat(LONGEST_LINE));
        let functions = HashMap::from([("<module>", BTreeSet::from([1]))]);
        let mut room = 1 << 20;
        let found = lines(&long, &functions, &mut room);
        assert_eq!(found[0].1.len(), LONGEST_LINE);
        assert_eq!(found.len(), 3);
        let mut room = LONGEST_LINE + 8;
        assert_eq!(lines(&long, &functions, &mut room).len(), 1);
        assert_eq!(room, 0);
    }
}
