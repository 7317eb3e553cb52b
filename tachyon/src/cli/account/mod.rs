//! The short account at the end of a recording, for people. The whole one is `--report`.

mod waits;

use super::escape::escape;
use super::output::{Destination, OutputPlan};
use super::table::{cut, cut_end, ordinal, percent};
use crate::analysis::ratio;
use crate::profile::package_path;
use crate::recording::{BusyChildren, Hot};
use crate::report::{EventReport, Report};
use crate::sinks::Format;
use crate::sinks::label::{fold_templates, native_name};
use indicatif::HumanCount;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use unicode_width::UnicodeWidthStr as _;

/// What the account shows besides the [`Report`].
#[derive(Clone, Debug)]
pub struct Extras<'a> {
    /// The file that was written.
    pub output: &'a OutputPlan,
    /// It is a directory with a file for each process.
    pub split: bool,
    /// It is a directory with a file for each segment.
    pub rotated: Option<Rotated>,
    /// Functions by their share of samples as leaf, largest first.
    pub top: Vec<Hot>,
    /// Where the target waits when it hardly ran, e.g. `selectors.py:468 select`.
    pub waiting: Option<String>,
    /// Selected processes whose children were busy and not selected.
    pub busy_children: Vec<BusyChildren>,
    /// Only samples that hold the GIL were wanted.
    pub gil: bool,
    /// No requested CPython ran at any time: what was requested, as options; empty for all processes.
    pub nobody: Option<String>,
    /// How to call this program.
    pub program: PathBuf,
    /// Whether colours are wanted.
    pub colours: bool,
    /// Columns of the terminal; `None`: no limit.
    pub width: Option<usize>,
}

/// How this program can be called again: by its name if the shell finds this very file by it, otherwise as it was called.
#[must_use]
pub fn program() -> PathBuf {
    let called = std::env::args_os().next().map(PathBuf::from).unwrap_or_default();
    let Some(name) = called.file_name() else { return env!("CARGO_PKG_NAME").into() };
    let found = on_path(name).and_then(|path| path.canonicalize().ok());
    let own = std::env::current_exe().and_then(|path| path.canonicalize()).ok();
    if found.is_some() && found == own { name.into() } else { called }
}

/// The file that a shell runs by this name.
fn on_path(name: impl AsRef<Path>) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(name.as_ref())).find(|file| file.is_file())
}

/// What became of the segments of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotated {
    /// Segments whose files were finished.
    pub finished: u64,
    /// Segments, of this recording or earlier ones, that were removed for `--keep`.
    pub removed: u64,
}

/// Below this share of the time a target counts as blocked, and the account says where it waits.
const BLOCKED_SHARE: f64 = 0.01;
/// Most functions that are shown.
const TOP_SHOWN: usize = 5;
/// Below this share of stacks, cut ones are not mentioned.
const LEAST_CUT: f64 = 0.001;
/// Function names are not cut below this many columns.
const NARROWEST_NAME: usize = 20;
/// Most columns of a name if there is no terminal to set a limit: a log takes any width, and a program may give functions any name.
const WIDEST_NAME: usize = 200;

/// Writes the account, one fact per line.
///
/// # Errors
/// When `out` cannot be written.
pub fn write(report: &Report, extras: &Extras<'_>, out: &mut dyn Write) -> io::Result<()> {
    let seconds = seconds(report.duration_s);
    let processes = report.processes.len() as u64;
    let plural = if processes == 1 { "process" } else { "processes" };
    let share = on_cpu_share(report);
    if let Some(wall) = report.wall.as_ref().filter(|_| extras.nobody.is_none()) {
        waits::write(report, wall, out)?;
    }
    let samples = match &report.wall {
        Some(wall) if report.stored == 0 => format!("{} samples of waiting threads", HumanCount(wall.stored)),
        Some(wall) => {
            format!("{} samples, and {} of waiting threads,", HumanCount(report.stored), HumanCount(wall.stored))
        }
        None => format!("{} samples", HumanCount(report.stored)),
    };
    write!(out, "{samples} of {} {plural} in {seconds} s", HumanCount(processes))?;
    match share {
        Some(share) => writeln!(out, "; on a CPU {} of the time", percent(share))?,
        None => writeln!(out)?,
    }
    if let Some(wanted) = &extras.nobody {
        let fitting = if wanted.is_empty() { String::new() } else { format!(" and fits {}", escape(wanted)) };
        writeln!(
            out,
            "no CPython that can be profiled{fitting} ran meanwhile: `tachyon-bpf doctor -v` lists those that run"
        )?;
    } else if !report.events.is_empty() {
        write_events(&report.events, out)?;
    } else if report.wall.is_some() {
        // Already shown first.
    } else if share.unwrap_or(0.0) < BLOCKED_SHARE && (share.is_some() || report.stored == 0) {
        write!(out, "ran {} of {seconds} s", percent(share.unwrap_or(0.0)))?;
        match &extras.waiting {
            Some(place) => writeln!(out, "; waiting in {}", escape(place))?,
            None => writeln!(out)?,
        }
    }
    if extras.gil && report.stored == 0 && share.is_some_and(|share| share >= BLOCKED_SHARE) {
        writeln!(out, "no sample held the GIL: a free-threaded CPython has none unless it is switched on")?;
    }
    for Hot { function, file, line, samples } in extras.top.iter().take(TOP_SHOWN) {
        let share = ratio(*samples, report.stored);
        let (function, file) = match native_name(function).filter(|_| file.is_empty()) {
            Some((object, function)) => (fold_templates(function), object),
            None => (function.as_str().into(), package_path(file)),
        };
        let place = match (file, line) {
            ("", _) => String::new(),
            (file, Some(line)) => format!(" ({}:{line})", cut(&escape(file), WIDEST_NAME)),
            (file, None) => format!(" ({})", cut(&escape(file), WIDEST_NAME)),
        };
        let function = escape(&function);
        let room =
            extras.width.map_or(WIDEST_NAME, |width| width.saturating_sub(10 + place.width()).max(NARROWEST_NAME));
        writeln!(out, "{:>8}  {}{place}", percent(share), cut_end(&function, room))?;
    }
    write_loss(report, extras.colours, out)?;
    for BusyChildren { pid, count } in &extras.busy_children {
        let plural = if *count == 1 { "child" } else { "children" };
        writeln!(out, "pid {pid} has {count} busy Python {plural}: add --subprocesses")?;
    }
    write_next(extras, report, out)
}

/// How many of each chosen event there were.
fn write_events(events: &[EventReport], out: &mut dyn Write) -> io::Result<()> {
    for EventReport { name, period, stored } in events {
        let (name, count) = (escape(name), HumanCount(*stored));
        match period {
            None => writeln!(out, "{name}: {count} samples")?,
            Some(1) => writeln!(out, "{name}: {count}")?,
            Some(period) => {
                let about = HumanCount(stored.saturating_mul(*period));
                writeln!(out, "{name}: about {about}, {count} samples of every {}", ordinal(*period))?;
            }
        }
    }
    Ok(())
}

fn write_loss(report: &Report, colours: bool, out: &mut dyn Write) -> io::Result<()> {
    let lost: u64 = report.loss.values().fold(0, |sum, &count| sum.saturating_add(count));
    let (warn, plain) = if colours { ("\x1b[33m", "\x1b[0m") } else { ("", "") };
    let waits_lost = report.wall.as_ref().is_some_and(|wall| wall.ticks_due > wall.stored);
    if lost == 0 && waits_lost {
        writeln!(out, "no sample of a running thread lost")?;
    } else if lost == 0 {
        writeln!(out, "nothing lost")?;
    } else {
        let of = report.stored.saturating_add(lost);
        let mut causes: Vec<_> = report.loss.iter().filter(|(_, count)| **count > 0).collect();
        causes.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let causes: Vec<_> =
            causes.into_iter().map(|(cause, count)| format!("{} {}", HumanCount(*count), escape(cause))).collect();
        let (share, causes) = (percent(ratio(lost, of)), causes.join(", "));
        writeln!(out, "{warn}lost {} of {} ({share}): {causes}{plain}", HumanCount(lost), HumanCount(of))?;
    }
    if report.inconsistent > 0 {
        let count = HumanCount(report.inconsistent);
        writeln!(
            out,
            "{warn}independent counts of the same samples differ by {count}: this is a bug in tachyon-bpf, please report it{plain}"
        )?;
    }
    let cut = report.cut_stacks();
    let stacks: u64 = cut.iter().map(|(_, count)| count).sum();
    let share = ratio(stacks, report.stored);
    if share >= LEAST_CUT {
        let reasons: Vec<_> = cut.iter().map(|(reason, count)| format!("{} {reason}", HumanCount(*count))).collect();
        let (share, reasons) = (percent(share), escape(&reasons.join(", ")).into_owned());
        writeln!(
            out,
            "{warn}cut {} of {} stacks ({share}): {reasons}{plain}",
            HumanCount(stacks),
            HumanCount(report.stored)
        )?;
    }
    if let Some((missed, expected)) = report.missed() {
        let share = percent(ratio(missed, expected));
        writeln!(out, "about {} of {} expected samples missed ({share})", HumanCount(missed), HumanCount(expected))?;
    }
    Ok(())
}

fn write_next(extras: &Extras<'_>, report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let output = extras.output;
    let Destination::Path(path) = &output.destination else { return Ok(()) };
    if extras.split {
        let files = report.processes.iter().filter(|process| process.samples > 0).count() as u64;
        let plural = if files == 1 { "process" } else { "processes" };
        let (path, files) = (path.to_string_lossy(), HumanCount(files));
        return writeln!(
            out,
            "written: {}, a directory with the {} profiles of {files} {plural}",
            escape(&path),
            output.format
        );
    }
    if let Some(Rotated { finished, removed }) = extras.rotated {
        let plural = if finished == 1 { "segment" } else { "segments" };
        write!(out, "written: {}, a directory: {} {plural}", escape(&path.to_string_lossy()), HumanCount(finished))?;
        return if removed > 0 { writeln!(out, "; {} old ones removed", HumanCount(removed)) } else { writeln!(out) };
    }
    writeln!(out, "written: {}", escape(&path.to_string_lossy()))?;
    if extras.nobody.is_some() {
        // There is nothing to look at.
    } else if output.format == Format::Tach {
        let (program, picture) = (quoted(&extras.program), path.with_extension("html"));
        writeln!(out, "next: {program} export {} -o {}", quoted(path), quoted(&picture))?;
    } else if output.format == Format::Collapsed && on_path("flamegraph.pl").is_some() {
        writeln!(out, "next: flamegraph.pl {} > {}", quoted(path), quoted(&path.with_extension("svg")))?;
    }
    Ok(())
}

/// Share of the recording that the targets were on a CPU, 1.0 being one whole CPU; `None` if it was not measured.
fn on_cpu_share(report: &Report) -> Option<f64> {
    let measured: Vec<f64> = report.processes.iter().filter_map(|process| process.cpu_s).collect();
    (!measured.is_empty() && report.duration_s > 0.0).then(|| measured.iter().sum::<f64>() / report.duration_s)
}

/// `30` for 30.0, otherwise one decimal.
fn seconds(seconds: f64) -> String {
    let text = format!("{seconds:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// A path as a shell takes it.
fn quoted(path: &Path) -> String {
    let text = path.to_string_lossy();
    let plain = |c: char| c.is_alphanumeric() || "/._-+:@%,=".contains(c);
    let text = if text.starts_with('-') { format!("./{text}") } else { text.into_owned() };
    if text.chars().all(plain) {
        return text;
    }
    format!("'{}'", escape(&text).replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::ProcessReport;
    use crate::types::Pid;
    use std::collections::BTreeMap;

    fn output(path: &str, format: Format) -> OutputPlan {
        OutputPlan { destination: Destination::Path(path.into()), format, force: false }
    }

    fn extras(output: &OutputPlan) -> Extras<'_> {
        Extras {
            output,
            split: false,
            rotated: None,
            top: Vec::new(),
            waiting: None,
            busy_children: Vec::new(),
            nobody: None,
            gil: false,
            program: "./tachyon-bpf".into(),
            colours: false,
            width: None,
        }
    }

    fn report(stored: u64, cpu_s: Option<f64>) -> Report {
        let processes = vec![ProcessReport { pid: 12, cpu_s, ..ProcessReport::default() }];
        Report { stored, duration_s: 30.0, rate_hz: 99.0, processes, ..Report::default() }
    }

    fn account(report: &Report, extras: &Extras<'_>) -> String {
        let mut out = Vec::new();
        write(report, extras, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn long_names_are_cut_in_logs_too() {
        let output = output("out.tach", Format::Tach);
        let mut extras = extras(&output);
        let file = format!("{}end.py", "d".repeat(4000));
        extras.top = vec![Hot { function: "n".repeat(4000), file, line: Some(7), samples: 5 }];
        let text = account(&report(5, Some(30.0)), &extras);
        let line = text.lines().find(|line| line.contains("nnn")).unwrap();
        assert!(line.chars().count() < 430 && line.ends_with("end.py:7)") && line.contains("n… (…ddd"), "{line}");
    }

    #[test]
    fn nobody_that_fits() {
        let output = output("out.tach", Format::Tach);
        let mut extras = extras(&output);
        extras.nobody = Some("--comm no*".to_owned());
        let text = account(&Report { duration_s: 1.0, ..Report::default() }, &extras);
        let line =
            "no CPython that can be profiled and fits --comm no* ran meanwhile: `tachyon-bpf doctor -v` lists those";
        assert!(text.contains(line) && !text.contains("ran 0") && !text.contains("next: "), "{text}");
    }

    #[test]
    fn busy_process() {
        let output = output("out.tach", Format::Tach);
        let mut extras = extras(&output);
        extras.top = vec![
            Hot { function: "work".into(), file: "app.py".into(), line: Some(3), samples: 1_000 },
            Hot { function: "x\x1b[2J".into(), file: "~".into(), line: None, samples: 234 },
        ];
        extras.busy_children = vec![BusyChildren { pid: Pid(12), count: 4 }];
        let mut report = report(1_234, Some(12.5));
        report.loss = BTreeMap::from([("ring_full".into(), 1), ("uninspected".into(), 2), ("internal".into(), 0)]);
        (report.expected, report.not_fired) = (Some(1_437), Some(203));
        report.stops = BTreeMap::from([("complete".into(), 1_000), ("thread_list_too_long".into(), 234)]);
        assert_eq!(
            account(&report, &extras),
            "1,234 samples of 1 process in 30 s; on a CPU 41.7 % of the time\n\
             \x20 81.0 %  work (app.py:3)\n\
             \x20 19.0 %  x\\x1b[2J (~)\n\
             lost 3 of 1,237 (0.2 %): 2 uninspected, 1 ring_full\n\
             cut 234 of 1,234 stacks (19.0 %): 234 thread_list_too_long\n\
             about 203 of 1,437 expected samples missed (14.1 %)\n\
             pid 12 has 4 busy Python children: add --subprocesses\n\
             written: out.tach\n\
             next: ./tachyon-bpf export out.tach -o out.html\n"
        );
    }

    #[test]
    fn counts_that_differ_are_a_bug() {
        let output = output("out.tach", Format::Tach);
        let mut report = report(8, Some(12.5));
        let line =
            "\nindependent counts of the same samples differ by 3: this is a bug in tachyon-bpf, please report it\n";
        assert!(!account(&report, &extras(&output)).contains("differ"));
        report.inconsistent = 3;
        assert!(account(&report, &extras(&output)).contains(line));
    }

    #[test]
    fn nobody_holds_the_gil() {
        let output = output("out.tach", Format::Tach);
        let mut extras = extras(&output);
        let line = "\nno sample held the GIL: a free-threaded CPython has none unless it is switched on\n";
        assert!(!account(&report(0, Some(12.5)), &extras).contains(line));
        extras.gil = true;
        assert!(account(&report(0, Some(12.5)), &extras).contains(line));
        assert!(!account(&report(1, Some(12.5)), &extras).contains(line));
        assert!(!account(&report(0, Some(0.0)), &extras).contains(line), "it did not run");
    }

    #[test]
    fn blocked_process() {
        let output = output("my file.collapsed", Format::Collapsed);
        let mut extras = extras(&output);
        extras.waiting = Some("selectors.py:468 select".into());
        assert_eq!(
            // Users who have that program are told about it.
            account(&report(8, Some(0.09)), &extras).split_inclusive('\n').take(4).collect::<String>(),
            "8 samples of 1 process in 30 s; on a CPU 0.3 % of the time\n\
             ran 0.3 % of 30 s; waiting in selectors.py:468 select\n\
             nothing lost\n\
             written: my file.collapsed\n"
        );
        assert!(
            account(&report(0, None), &extras).contains("\nran 0.0 % of 30 s; waiting in selectors.py:468 select\n")
        );
        assert!(!account(&report(8, None), &extras).contains("ran "));
    }

    #[test]
    fn paths_are_quoted_for_a_shell() {
        for (path, shown) in [("a/b.tach", "a/b.tach"), ("-x", "./-x"), ("a'b", r"'a'\''b'"), ("a\nb", "'a\\nb'")] {
            assert_eq!(quoted(Path::new(path)), shown);
        }
    }
}
