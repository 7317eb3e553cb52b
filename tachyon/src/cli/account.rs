//! The short account at the end of a recording, for people. The whole one is `--report`.

use super::escape::escape;
use super::output::{Destination, OutputPlan};
use crate::report::Report;
use crate::sinks::Format;
use crate::types::Pid;
use indicatif::HumanCount;
use std::io::{self, Write};
use std::path::Path;

/// What the account shows beside the [`Report`].
#[derive(Clone, Debug)]
pub struct Extras<'a> {
    /// The file that was written.
    pub output: &'a OutputPlan,
    /// It is a directory with a file for each process.
    pub split: bool,
    /// Functions by their share of samples as leaf, largest first.
    pub top: Vec<TopFunction>,
    /// Where the target waits when it hardly ran, e.g. `selectors.py:468 select`.
    pub waiting: Option<String>,
    /// Selected processes whose children were busy and not selected.
    pub busy_children: Vec<BusyChildren>,
    /// Only samples that hold the GIL were wanted.
    pub gil: bool,
    /// No CPython that was asked for ran at any time: what was asked for, as options; empty for all of them.
    pub nobody: Option<String>,
    /// Whether colours are wanted.
    pub colours: bool,
}

/// A function and how often it was the running one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopFunction {
    /// Qualified name.
    pub function: String,
    /// Source file; empty for code outside Python.
    pub filename: String,
    /// Its line, where known.
    pub lineno: Option<u32>,
    /// Samples that found it at the leaf.
    pub samples: u64,
}

/// A process with busy Python children that were not recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusyChildren {
    /// The process.
    pub pid: Pid,
    /// How many of its children were busy.
    pub count: u64,
}

/// Below this share of the time a target counts as blocked, and the account says where it waits.
const BLOCKED_SHARE: f64 = 0.01;
/// Most functions that are shown.
const TOP_SHOWN: usize = 5;

/// Writes the account, one fact a line.
///
/// # Errors
/// When `out` cannot be written.
pub fn write(report: &Report, extras: &Extras<'_>, out: &mut dyn Write) -> io::Result<()> {
    let seconds = seconds(report.duration_s);
    let processes = report.processes.len() as u64;
    let plural = if processes == 1 { "process" } else { "processes" };
    let share = on_cpu_share(report);
    write!(out, "{} samples of {} {plural} in {seconds} s", HumanCount(report.stored), HumanCount(processes))?;
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
    for TopFunction { function, filename, lineno, samples } in extras.top.iter().take(TOP_SHOWN) {
        let share = ratio(*samples, report.stored);
        write!(out, "{:>8}  {}", percent(share), escape(function))?;
        match (filename.as_str(), lineno) {
            // Code outside Python has no file.
            ("", _) => writeln!(out)?,
            (filename, Some(lineno)) => writeln!(out, " ({}:{lineno})", escape(filename))?,
            (filename, None) => writeln!(out, " ({})", escape(filename))?,
        }
    }
    write_loss(report, extras.colours, out)?;
    for BusyChildren { pid, count } in &extras.busy_children {
        let plural = if *count == 1 { "child" } else { "children" };
        writeln!(out, "pid {pid} has {count} busy Python {plural}: add --subprocesses")?;
    }
    write_next(extras, report, out)
}

fn write_loss(report: &Report, colours: bool, out: &mut dyn Write) -> io::Result<()> {
    let lost: u64 = report.loss.values().fold(0, |sum, &count| sum.saturating_add(count));
    let (warn, plain) = if colours { ("\x1b[33m", "\x1b[0m") } else { ("", "") };
    if lost == 0 {
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
    if let (Some(missed @ 1..), Some(expected)) = (report.not_fired, report.expected) {
        let share = percent(ratio(missed, expected));
        writeln!(out, "about {} of {} expected never fired ({share})", HumanCount(missed), HumanCount(expected))?;
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
    writeln!(out, "written: {}", escape(&path.to_string_lossy()))?;
    if output.format == Format::Tach {
        let converted = path.with_extension("collapsed");
        writeln!(out, "next: tachyon-bpf export {} -o {}", quoted(path), quoted(&converted))?;
    } else if output.format == Format::Collapsed {
        writeln!(out, "next: flamegraph.pl {} > {}", quoted(path), quoted(&path.with_extension("svg")))?;
    }
    Ok(())
}

/// Share of the recording that the targets were on a CPU, 1.0 being one whole CPU; `None` when it was not measured.
fn on_cpu_share(report: &Report) -> Option<f64> {
    let measured: Vec<f64> = report.processes.iter().filter_map(|process| process.cpu_s).collect();
    (!measured.is_empty() && report.duration_s > 0.0).then(|| measured.iter().sum::<f64>() / report.duration_s)
}

/// Shares are shown with one decimal: what a float loses beyond 2^53 does not matter.
fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// `30` for 30.0, else one decimal.
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
    use std::collections::BTreeMap;

    fn output(path: &str, format: Format) -> OutputPlan {
        OutputPlan { destination: Destination::Path(path.into()), format, force: false }
    }

    fn extras(output: &OutputPlan) -> Extras<'_> {
        Extras {
            output,
            split: false,
            top: Vec::new(),
            waiting: None,
            busy_children: Vec::new(),
            nobody: None,
            gil: false,
            colours: false,
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
    fn nobody_that_fits() {
        let output = output("out.tach", Format::Tach);
        let mut extras = extras(&output);
        extras.nobody = Some("--comm no*".to_owned());
        let text = account(&Report { duration_s: 1.0, ..Report::default() }, &extras);
        let line =
            "no CPython that can be profiled and fits --comm no* ran meanwhile: `tachyon-bpf doctor -v` lists those";
        assert!(text.contains(line) && !text.contains("ran 0"), "{text}");
    }

    #[test]
    fn busy_process() {
        let output = output("out.tach", Format::Tach);
        let mut extras = extras(&output);
        extras.top = vec![
            TopFunction { function: "work".into(), filename: "app.py".into(), lineno: Some(3), samples: 1_000 },
            TopFunction { function: "x\x1b[2J".into(), filename: "~".into(), lineno: None, samples: 234 },
        ];
        extras.busy_children = vec![BusyChildren { pid: Pid(12), count: 4 }];
        let mut report = report(1_234, Some(12.5));
        report.loss = BTreeMap::from([("ring_full".into(), 1), ("uninspected".into(), 2), ("internal".into(), 0)]);
        (report.expected, report.not_fired) = (Some(1_237), Some(5));
        assert_eq!(
            account(&report, &extras),
            "1,234 samples of 1 process in 30 s; on a CPU 41.7 % of the time\n\
             \x20 81.0 %  work (app.py:3)\n\
             \x20 19.0 %  x\\x1b[2J (~)\n\
             lost 3 of 1,237 (0.2 %): 2 uninspected, 1 ring_full\n\
             about 5 of 1,237 expected never fired (0.4 %)\n\
             pid 12 has 4 busy Python children: add --subprocesses\n\
             written: out.tach\n\
             next: tachyon-bpf export out.tach -o out.collapsed\n"
        );
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
            account(&report(8, Some(0.09)), &extras),
            "8 samples of 1 process in 30 s; on a CPU 0.3 % of the time\n\
             ran 0.3 % of 30 s; waiting in selectors.py:468 select\n\
             nothing lost\n\
             written: my file.collapsed\n\
             next: flamegraph.pl 'my file.collapsed' > 'my file.svg'\n"
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
