//! `diff`: what changed between two profiles, for people, as JSON, and as a gate.

use super::args::{DiffArgs, DiffBy};
use super::distributions::Installed;
use super::escape::escape;
use super::failure::Failure;
use super::report::text::{heading, place, plural, seconds};
use super::report::{Shape, write_to};
use super::table::{Cell, Colour, Column, Style, Table};
use crate::analysis::diff::{Change, Difference, LEVEL, Measured, Options, Whole, diff};
use crate::analysis::{By, RowName};
use crate::sinks::page::{self, SideSink};
use crate::sinks::text::write_json;
use indicatif::HumanCount;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Exit status when a significant change is larger than `--fail-over`.
pub const STATUS_CHANGED: u8 = 3;
/// Most changes shown if none is significant.
const INSIGNIFICANT_SHOWN: usize = 5;
/// Most changes that are shown.
const SHOWN: usize = 30;

/// Compares and writes to `-o`, otherwise to `out`, which is standard output. Returns the exit status.
///
/// # Errors
/// When a file is not a profile that can be read to its end, or the output cannot be written.
pub fn run(args: &DiffArgs, out: &mut dyn Write) -> anyhow::Result<u8> {
    let html = args.output.as_deref().and_then(Path::extension).is_some_and(|extension| extension == "html");
    let page = html && !args.json;
    let shape = match Shape::of(args.output.as_deref(), args.json) {
        _ if page => Shape::Json,
        shape => shape.map_err(|refused| refused.with_hint("-o takes .html, .md, .txt or .json"))?,
    };
    let (before, after) = args.sides()?;
    let by = match args.by {
        DiffBy::Function => By::Function,
        DiffBy::Line => By::Line,
        DiffBy::Module => By::Module,
    };
    let [old, new] = [before, after].map(|files| super::profiles::as_recordings(files, args.force_large));
    let options = Options { by, per_unit: args.per_unit, ..Options::default() };
    let difference = diff(&old?, &new?, options, &Installed::default());
    let shown = Shown { args, by, before, after, difference: &difference };
    write_to(args.output.as_deref(), args.force, out, &mut |out, to_file| {
        if page {
            return shown.write_page(out);
        }
        let style = match shape {
            Shape::Json => {
                write_json(&mut *out, &Json::new(&shown))?;
                return Ok(writeln!(out)?);
            }
            Shape::Markdown => Style::Markdown,
            Shape::Text if to_file => Style::plain(),
            Shape::Text => Style::of_stdout(),
        };
        Ok(shown.write(style, out)?)
    })?;
    let failed = args.fail_over.is_some_and(|limit| difference.changes.iter().any(|change| exceeds(change, limit)));
    Ok(if failed { STATUS_CHANGED } else { 0 })
}

/// Whether a significant change is an increase by more than this fraction of the value before; anything new counts.
fn exceeds(change: &Change, limit: f64) -> bool {
    let Measured { before, change, significant, .. } = change.measured;
    significant && change > limit * before
}

/// Parses `5%` or `5` as a fraction.
///
/// # Errors
/// When it is invalid.
pub fn limit(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').trim().parse::<f64>() {
        Ok(percent) if percent >= 0.0 && percent.is_finite() => Ok(percent / 100.0),
        _ => Err("a limit is a percentage from 0 on, e.g. 5%".to_owned()),
    }
}

/// Parses `1000`, or `1000,1200` if the sides did different amounts of work.
///
/// # Errors
/// When it is invalid.
pub fn units(text: &str) -> Result<(f64, f64), String> {
    let (before, after) = text.split_once(',').unwrap_or((text, text));
    match (before.trim().parse::<f64>(), after.trim().parse::<f64>()) {
        (Ok(before), Ok(after)) if before > 0.0 && after > 0.0 && (before + after).is_finite() => Ok((before, after)),
        _ => Err("a number of units is more than 0, e.g. 1000, or 1000,1200 before and after".to_owned()),
    }
}

/// The words of a command line, in which the `--` of `diff A... -- B...` does not end the options, unlike elsewhere.
pub(super) fn sides(words: impl IntoIterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let (mut is_diff, mut separated) = (false, false);
    words.into_iter().enumerate().map(move |(place, word)| {
        is_diff |= place == 1 && word == "diff";
        if is_diff && !separated && word == "--" {
            separated = true;
            return "--after".into();
        }
        word
    })
}

impl DiffArgs {
    /// The files before and after: `A... -- B...`, or two words.
    pub(super) fn sides(&self) -> Result<(&[PathBuf], &[PathBuf]), Failure> {
        match (&self.before[..], &self.after[..]) {
            ([before, after], []) => Ok((std::slice::from_ref(before), std::slice::from_ref(after))),
            (_, []) => Err(Failure::usage("which files are before, and which after?").with_hint(
                "`--` stands between them: tachyon-bpf diff before-1.tach before-2.tach -- after-1.tach after-2.tach",
            )),
            (before, after) => Ok((before, after)),
        }
    }
}

/// What is shown.
struct Shown<'a> {
    args: &'a DiffArgs,
    by: By,
    before: &'a [PathBuf],
    after: &'a [PathBuf],
    difference: &'a Difference,
}

impl Shown<'_> {
    fn write(&self, style: Style, out: &mut dyn Write) -> io::Result<()> {
        let Difference { before, after, .. } = self.difference;
        for (what, files, whole) in [("before", self.before, before), ("after ", self.after, after)] {
            let mut name = escape(&files[0].to_string_lossy()).into_owned();
            if files.len() > 1 {
                name += &format!(" and {} more", files.len() - 1);
            }
            let samples = plural(usize::try_from(whole.samples).unwrap_or(usize::MAX), "sample", "samples");
            let replicates = plural(whole.replicates, "replicate", "replicates");
            writeln!(
                out,
                "{} {name}: {samples} in {} s, {} s of CPU time, {replicates}{}",
                style.paint(what, Colour::Dim),
                seconds(whole.seconds),
                seconds(whole.sampled_seconds),
                if style == Style::Markdown { "  " } else { "" }
            )?;
        }
        writeln!(out)?;
        self.write_verdict(style, out)?;
        let significant = self.difference.changes.iter().filter(|change| change.measured.significant).count();
        let wanted = if significant > 0 { significant.min(SHOWN) } else { INSIGNIFICANT_SHOWN };
        let told = self.difference.changes.iter().filter(|change| !change.only_moved);
        let changes: Vec<&Change> = told.take(wanted).collect();
        if !changes.is_empty() {
            writeln!(out)?;
            self.table(&changes).write(style, out)?;
        }
        if significant > wanted {
            writeln!(out, "… and {} more significant changes (--json has all)", significant - wanted)?;
        }
        self.write_moves(style, out)
    }

    /// The report's page, for both sides.
    fn write_page(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        let mut sides = [SideSink::default(), SideSink::default()];
        for (side, files) in sides.iter_mut().zip([self.before, self.after]) {
            super::profiles::feed(files, self.args.force_large, side)?;
        }
        let name = |files: &[PathBuf]| match files {
            [file] => file.file_name().unwrap_or(file.as_os_str()).to_string_lossy().into_owned(),
            files => format!("{} files", files.len()),
        };
        let title = escape(&format!("{} → {}", name(self.before), name(self.after))).into_owned();
        let Difference { before, after, .. } = self.difference;
        let caption = format!("{} samples before, {} after", before.samples, after.samples);
        Ok(page::write_difference(out, &title, &caption, &sides, &Json::new(self))?)
    }

    fn write_verdict(&self, style: Style, out: &mut dyn Write) -> io::Result<()> {
        let rows = match self.by {
            By::Line => "lines",
            By::Module => "modules",
            _ => "functions",
        };
        let tested = self.difference.changes.iter().filter(|change| change.measured.q.is_some()).count();
        let significant = self.difference.changes.iter().filter(|change| change.measured.significant).count();
        let Some(visible) = self.difference.smallest_visible_share else {
            return writeln!(
                out,
                "Nothing can be told: each side must have samples over some seconds, or several recordings. \
                 The largest differences, noise or not:"
            );
        };
        let verdict = match significant {
            0 => {
                style.paint(&format!("No significant change among {} {rows}.", HumanCount(tested as u64)), Colour::Good)
            }
            count => style.paint(
                &format!("{} among {} {rows}.", plural(count, "significant change", "significant changes"), tested),
                Colour::Bold,
            ),
        };
        writeln!(out, "{verdict}")?;
        writeln!(
            out,
            "To be seen, a {} with 1 % of the time would have to change by {:.2} points ({:.0} % of itself).",
            rows.trim_end_matches('s'),
            visible * 100.0,
            visible * 1e4
        )?;
        if significant == 0 {
            writeln!(out, "The largest differences, which may be noise:")?;
        }
        Ok(())
    }

    fn table(&self, changes: &[&Change]) -> Table {
        let placed = self.by != By::Module;
        let mut columns = vec![
            ("BEFORE", Column::Number),
            ("AFTER", Column::Number),
            ("CHANGE", Column::Number),
            ("99 % INTERVAL", Column::Extra),
            ("RELATIVE", Column::Spare),
            (heading(self.by), Column::Text),
        ];
        if placed {
            columns.push(("FILE", Column::Text));
        }
        let mut table = Table::new(columns);
        for Change { name, measured, .. } in changes {
            let Measured { before, after, change, interval, significant, .. } = *measured;
            let colour = match (significant, change > 0.0) {
                (true, true) => Colour::Hot,
                (true, false) => Colour::Good,
                (false, _) => Colour::Dim,
            };
            let interval = interval
                .map_or_else(String::new, |(low, high)| format!("{} to {}", self.signed(low), self.signed(high)));
            let mut cells = vec![
                self.value(before).into(),
                self.value(after).into(),
                Cell::new(&self.signed(change), colour),
                interval.into(),
                relative(before, change).into(),
                Cell::new(shown_name(name), Colour::Plain),
            ];
            if placed {
                cells.push(Cell::new(&place(name, None), Colour::Plain));
            }
            table.push(cells);
        }
        table
    }

    fn write_moves(&self, style: Style, out: &mut dyn Write) -> io::Result<()> {
        let moved = |change: &&Change| change.moved_to.is_some();
        let count = self.difference.changes.iter().filter(moved).count();
        if count > 0 {
            writeln!(out, "\n{}", style.paint("Only moved, renamed, split or inlined into the caller:", Colour::Bold))?;
        }
        let mut table = Table::new(vec![
            ("CHANGE", Column::Number),
            ("FROM", Column::Text),
            ("TO", Column::Text),
            ("FILE", Column::Text),
        ]);
        for change in self.difference.changes.iter().filter(moved).take(SHOWN) {
            let Some(to) = &change.moved_to else { continue };
            let (old, new) = (place(&change.name, None), place(to, None));
            let file = if old == new { new } else { format!("{old} -> {new}") };
            table.push(vec![
                self.signed(change.measured.change).into(),
                Cell::new(shown_name(&change.name), Colour::Plain),
                Cell::new(shown_name(to), Colour::Plain),
                Cell::new(&file, Colour::Plain),
            ]);
        }
        if table.is_empty() { Ok(()) } else { table.write(style, out) }
    }

    fn value(&self, value: f64) -> String {
        if self.args.per_unit.is_some() { short_time(value) } else { format!("{:.2} %", value * 100.0) }
    }

    fn signed(&self, value: f64) -> String {
        match self.args.per_unit {
            Some(_) => format!("{}{}", if value < 0.0 { "-" } else { "+" }, short_time(value.abs())),
            None => format!("{:+.2}", value * 100.0),
        }
    }
}

fn shown_name(name: &RowName) -> &str {
    name.function.as_deref().unwrap_or(&name.name)
}

/// The change as a fraction of the value before.
fn relative(before: f64, change: f64) -> String {
    if before > 0.0 { format!("{:+.1} %", change / before * 100.0) } else { "new".to_owned() }
}

/// Seconds, in a suitable unit.
fn short_time(seconds: f64) -> String {
    match seconds {
        1.0.. => format!("{seconds:.3} s"),
        1e-3.. => format!("{:.3} ms", seconds * 1e3),
        _ => format!("{:.3} us", seconds * 1e6),
    }
}

/// The JSON's schema; `docs/reading.md` names the keys.
#[derive(Serialize)]
struct Json<'a> {
    before: JsonSide<'a>,
    after: JsonSide<'a>,
    smallest_visible_share: Option<f64>,
    by: &'static str,
    per_unit: Option<(f64, f64)>,
    level: f64,
    changes: Vec<JsonChange<'a>>,
    moved_files: BTreeMap<&'a str, &'a str>,
}

#[derive(Serialize)]
struct JsonSide<'a> {
    files: &'a [PathBuf],
    samples: u64,
    seconds: f64,
    sampled_seconds: f64,
    replicates: usize,
}

#[derive(Serialize)]
struct JsonChange<'a> {
    function: &'a str,
    file: Option<&'a str>,
    line: Option<u32>,
    kind: &'static str,
    #[serde(flatten)]
    measured: Measured,
    only_moved: bool,
    moved_to: Option<&'a str>,
    before_samples: u64,
    after_samples: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_seconds_per_second: Option<Measured>,
    #[serde(skip_serializing_if = "Option::is_none")]
    share: Option<Measured>,
}

impl<'a> Json<'a> {
    fn new(shown: &Shown<'a>) -> Self {
        let side = |files, whole: &Whole| {
            let Whole { samples, seconds, sampled_seconds, replicates } = *whole;
            JsonSide { files, samples, seconds, sampled_seconds, replicates }
        };
        let Difference { before, after, smallest_visible_share, changes, moved_files } = shown.difference;
        let per_unit = shown.args.per_unit;
        let changes = changes.iter().map(|change| {
            let other = change.other;
            let (rate, share) = if per_unit.is_some() { (None, Some(other)) } else { (Some(other), None) };
            JsonChange {
                function: shown_name(&change.name),
                file: change.name.file.as_deref(),
                line: change.name.line,
                kind: change.name.kind.name(),
                measured: change.measured,
                only_moved: change.only_moved,
                moved_to: change.moved_to.as_ref().map(shown_name),
                before_samples: change.samples.0,
                after_samples: change.samples.1,
                cpu_seconds_per_second: rate,
                share,
            }
        });
        Self {
            before: side(shown.before, before),
            after: side(shown.after, after),
            smallest_visible_share: *smallest_visible_share,
            by: shown.by.name(),
            per_unit,
            level: LEVEL,
            changes: changes.collect(),
            moved_files: moved_files.iter().map(|(old, new)| (&**old, &**new)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::RowKind;
    use crate::cli::args::{Verb, parse};

    #[test]
    fn only_significant_increases_fail() {
        let name = RowName { name: "f".into(), function: None, file: None, line: None, kind: RowKind::Python };
        let change = |before: f64, after: f64, significant| Change {
            name: name.clone(),
            samples: (1, 1),
            measured: Measured { before, after, change: after - before, interval: None, q: None, significant },
            other: Measured::default(),
            only_moved: false,
            moved_to: None,
        };
        for (before, after, significant, expected) in [
            (0.10, 0.11, true, true),
            (0.10, 0.104, true, false),
            (0.10, 0.20, false, false),
            (0.10, 0.05, true, false),
            (0.0, 0.01, true, true),
        ] {
            assert_eq!(exceeds(&change(before, after, significant), 0.05), expected, "{before} {after}");
        }
    }

    #[test]
    fn options_may_follow_the_files_after() {
        let words = |line: &str| -> Vec<_> { line.split(' ').map(OsString::from).collect() };
        let Ok(Verb::Diff(args)) = parse(words("tachyon-bpf diff a b -- c d --json --by module -o x.json")) else {
            panic!("it is a diff");
        };
        assert_eq!((args.before.len(), args.after.len(), args.json), (2, 2, true));
        assert_eq!(args.sides().unwrap().1, [PathBuf::from("c"), "d".into()]);
        let Ok(Verb::Diff(args)) = parse(words("tachyon-bpf diff --fail-over 5% a b")) else { panic!("it is a diff") };
        assert_eq!(args.sides().unwrap(), (&["a".into()][..], &["b".into()][..]));
        assert_eq!(args.fail_over, Some(0.05));
        let Ok(Verb::Diff(args)) = parse(words("tachyon-bpf diff a b c")) else { panic!("it is a diff") };
        assert!(args.sides().is_err());
    }

    #[test]
    fn values_of_options() {
        assert_eq!(limit("5%"), Ok(0.05));
        assert_eq!(limit("0"), Ok(0.0));
        assert!(limit("-1%").is_err() && limit("x").is_err() && limit("nan").is_err());
        assert_eq!(units("1000"), Ok((1000.0, 1000.0)));
        assert_eq!(units("1000, 500"), Ok((1000.0, 500.0)));
        assert!(units("0").is_err() && units("1,x").is_err() && units("inf").is_err());
    }
}
