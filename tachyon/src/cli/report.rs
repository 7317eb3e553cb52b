//! `report`: where the time of a profile went, for people and as JSON.

pub(super) mod text;

use super::args::{GroupBy, ReportArgs};
use super::distributions::Installed;
use super::escape::escape;
use super::failure::Failure;
use super::output::{Destination, OutputFile};
use super::table::Style;
use crate::analysis::{self, Aggregate, By, Edge, Edges, Filter, Report, Row, RowName, ratio};
use crate::profile::TASK_WAIT;
use crate::report::EventReport;
use crate::sinks::text::write_json;
use anyhow::Context as _;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// What form of output is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Text,
    Markdown,
    Json,
}

impl Shape {
    /// From `-o PATH` and `--json`.
    pub fn of(output: Option<&Path>, json: bool) -> Result<Self, Failure> {
        let extension = output.and_then(Path::extension).map(|extension| extension.to_string_lossy().to_lowercase());
        match extension.as_deref() {
            _ if json => Ok(Self::Json),
            Some("json") => Ok(Self::Json),
            Some("md" | "markdown") => Ok(Self::Markdown),
            None | Some("txt" | "text") => Ok(Self::Text),
            Some(other) => Err(Failure::usage(format!("cannot write .{other} here"))
                .with_hint("-o takes .md, .txt or .json; `tachyon-bpf export` writes the other formats")),
        }
    }
}

/// Writes what was asked for to `-o`, otherwise to `out`, which is standard output.
///
/// # Errors
/// When a file is not a profile that can be read to its end, when nothing matches what was asked for, or when the
/// output cannot be written.
pub fn run(args: &ReportArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let shape = Shape::of(args.output.as_deref(), args.json)?;
    let aggregate = super::profiles::as_one(&args.files, args.event.as_deref(), args.force_large)?;
    if let Some(event) = args.event.as_deref().filter(|_| aggregate.samples() == 0) {
        return Err(no_such_event(event, &aggregate).into());
    }
    let has_tasks = aggregate.places().iter().any(|place| place.task().is_some());
    if args.by == Some(GroupBy::Task) && !has_tasks {
        return Err(Failure::new("the samples in these files do not say which asyncio task they belong to")
            .with_hint("record with --async; --by function shows the coroutines")
            .into());
    }
    let filter = Filter { focus: args.focus.clone(), ignore: args.ignore.clone() };
    let report = analysis::report(&aggregate, args.by(), &filter, args.native, &Installed::default());
    let edges = |pattern| analysis::edges(&aggregate, pattern, &filter, args.native);
    let asked = Asked { args, callers: args.callers.as_ref().map(edges), callees: args.callees.as_ref().map(edges) };
    for (pattern, found) in [(&args.callers, &asked.callers), (&args.callees, &asked.callees)] {
        if let (Some(pattern), Some(Edges { functions, .. })) = (pattern, found)
            && functions.is_empty()
        {
            return Err(Failure::new(format!("no function matches {pattern}"))
                .with_hint("names are qualified (Worker.run); native functions are found with --native")
                .into());
        }
    }
    write_to(args.output.as_deref(), args.force, out, &mut |out, to_file| {
        let style = match shape {
            Shape::Json => {
                write_json(&mut *out, &Json::new(&asked, &report))?;
                return Ok(writeln!(out)?);
            }
            Shape::Markdown => Style::Markdown,
            Shape::Text if to_file => Style::plain(),
            Shape::Text => Style::of_stdout(),
        };
        let overview = args.by.is_none() && args.callers.is_none() && args.callees.is_none();
        let modules = overview.then(|| analysis::report(&aggregate, By::Module, &filter, false, &Installed::default()));
        let processes = (overview && report.processes > 1)
            .then(|| analysis::report(&aggregate, By::Process, &filter, false, &Installed::default()));
        let tasks = (overview && has_tasks)
            .then(|| analysis::report(&aggregate, By::Task, &filter, false, &Installed::default()));
        let waiting_tasks = aggregate.left_aside().get(TASK_WAIT).copied().filter(|_| args.event.is_none());
        text::Text { asked: &asked, report: &report, modules, processes, tasks, waiting_tasks, style }.write(out)?;
        Ok(())
    })
}

fn no_such_event(event: &str, aggregate: &Aggregate) -> Failure {
    let known: Vec<&str> = aggregate.left_aside().keys().map(String::as_str).collect();
    let hint = match known.as_slice() {
        [] if event == TASK_WAIT => "record with --wall --async".to_owned(),
        [] => "all their samples are of the clock: leave --event out".to_owned(),
        known => format!("their events are: {}", escape(&known.join(", "))),
    };
    Failure::new(format!("no sample in these files was taken at the event {}", escape(event))).with_hint(hint)
}

/// What was asked for, with the result for single functions.
struct Asked<'a> {
    args: &'a ReportArgs,
    callers: Option<Edges>,
    callees: Option<Edges>,
}

/// Lets `write` write to a file, which appears only when complete, or to standard output.
pub(super) fn write_to(
    path: Option<&Path>,
    force: bool,
    out: &mut dyn Write,
    write: &mut dyn FnMut(&mut dyn Write, bool) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let path = path.filter(|path| path.as_os_str() != "-");
    let Some(path) = path else {
        write(out, false)?;
        return Ok(out.flush()?);
    };
    let output = OutputFile::create(&Destination::Path(path.to_owned()), force)?;
    let mut file = io::BufWriter::new(output.try_clone_file()?);
    write(&mut file, true)?;
    file.flush().with_context(|| format!("cannot write {}", path.display()))?;
    drop(file);
    Ok(output.commit()?)
}

/// The JSON's schema; `docs/reading.md` names the keys.
#[derive(Serialize)]
pub(super) struct Json<'a> {
    samples: u64,
    seconds: f64,
    rows: Vec<JsonRow<'a>>,
    by: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    files: Vec<&'a PathBuf>,
    all_samples: u64,
    sampled_seconds: f64,
    gil_share: Option<f64>,
    gc_share: f64,
    cpu_share: f64,
    native_share: f64,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    waiting: &'a BTreeMap<String, u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    events: Vec<EventReport>,
    lost: Option<u64>,
    processes: usize,
    threads: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    functions: Option<Vec<&'a str>>,
}

#[derive(Serialize)]
struct JsonRow<'a> {
    name: &'a str,
    function: Option<&'a str>,
    file: Option<&'a str>,
    line: Option<u32>,
    #[serde(rename = "self")]
    own: u64,
    total: u64,
    self_share: f64,
    total_share: f64,
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    relation: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hottest_line: Option<u32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    native: Vec<JsonNative<'a>>,
}

/// What native code a row's self went into.
#[derive(Serialize)]
struct JsonNative<'a> {
    function: &'a str,
    file: &'a str,
    #[serde(rename = "self")]
    own: u64,
}

impl<'a> Json<'a> {
    fn new(asked: &'a Asked<'_>, report: &'a Report) -> Self {
        let limit = asked.args.lines.unwrap_or(usize::MAX);
        let single = [(&asked.callers, "caller"), (&asked.callees, "callee")];
        let edges = single.into_iter().filter_map(|(found, relation)| Some((found.as_ref()?, relation)));
        let (mut rows, mut functions) = (Vec::new(), None);
        for (found, relation) in edges {
            let side = if relation == "caller" { &found.callers } else { &found.callees };
            rows.extend(side.iter().take(limit).map(|edge| JsonRow::edge(edge, found.all, relation)));
            functions.get_or_insert_with(Vec::new).extend(found.functions.iter().map(|name| name.name.as_str()));
        }
        if functions.is_none() {
            rows = JsonRow::all(report, limit, asked.args.native);
        }
        Self { files: asked.args.files.iter().collect(), functions, ..Self::with(report, rows) }
    }

    /// A report that does not come from a file.
    pub fn live(report: &'a Report, native: bool) -> Self {
        Self::with(report, JsonRow::all(report, usize::MAX, native))
    }

    fn with(report: &'a Report, rows: Vec<JsonRow<'a>>) -> Self {
        Self {
            samples: report.samples,
            seconds: report.seconds,
            rows,
            by: report.by.name(),
            files: Vec::new(),
            all_samples: report.all_samples,
            sampled_seconds: report.sampled_seconds,
            gil_share: report.gil_share,
            gc_share: report.gc_share,
            cpu_share: report.cpu_share,
            native_share: report.native_share,
            waiting: &report.waiting,
            events: events(report),
            lost: report.lost,
            processes: report.processes,
            threads: report.threads,
            functions: None,
        }
    }
}

/// Samples of events other than the clock.
fn events(report: &Report) -> Vec<EventReport> {
    let of = |((name, period), &stored): (&(String, u64), &u64)| EventReport {
        name: name.clone(),
        period: Some(*period),
        stored,
    };
    report.events.iter().map(of).collect()
}

impl<'a> JsonRow<'a> {
    fn named(name: &'a RowName, own: u64, total: u64, all: u64) -> Self {
        Self {
            name: &name.name,
            function: name.function.as_deref(),
            file: name.file.as_deref(),
            line: name.line,
            own,
            total,
            self_share: ratio(own, all),
            total_share: ratio(total, all),
            kind: name.kind.name(),
            relation: None,
            hottest_line: None,
            native: Vec::new(),
        }
    }

    fn all(report: &'a Report, limit: usize, native: bool) -> Vec<Self> {
        report.rows.iter().take(limit).map(|row| Self::new(row, report.samples, native)).collect()
    }

    fn new(row: &'a Row, all: u64, native: bool) -> Self {
        let detail = row.native.iter().filter(|_| native);
        Self {
            hottest_line: row.hottest_line,
            native: detail.map(|(function, file, own)| JsonNative { function, file, own: *own }).collect(),
            ..Self::named(&row.name, row.own.samples, row.total.samples, all)
        }
    }

    fn edge(edge: &'a Edge, all: u64, relation: &'static str) -> Self {
        Self { relation: Some(relation), ..Self::named(&edge.name, edge.own, edge.samples, all) }
    }
}

/// A regular expression of the command line.
///
/// # Errors
/// What is wrong with it, in one line.
pub fn pattern(text: &str) -> Result<regex::Regex, String> {
    regex::Regex::new(text).map_err(|error| {
        let told = error.to_string();
        let last = told.lines().last().unwrap_or_default().trim();
        format!("not a regular expression: {}", last.strip_prefix("error: ").unwrap_or(last))
    })
}

/// A number of rows.
///
/// # Errors
/// When it is not valid.
pub fn rows(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&rows| rows > 0).ok_or_else(|| "a number of rows is 1 or more".to_owned())
}
