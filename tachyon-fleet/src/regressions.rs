//! `diff` and `regressions`: what changed between two versions, and is more than noise.

use crate::args::{DiffArgs, RegressionsArgs};
use crate::compare::{Comparison, Side, Span, compare, sides, spans};
use crate::lake::Lake;
use crate::place;
use anyhow::Context as _;
use indicatif::{HumanCount, ProgressBar, ProgressStyle};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{self, IsTerminal as _, Write};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tachyon::advice::Refusal;
use tachyon::analysis::diff::{Change, Measured, Options};
use tachyon::sinks::text::{escape_controls, write_json};

/// Most changes of a service that are listed.
const SHOWN: usize = 20;

/// Runs `diff`.
///
/// # Errors
/// When tables cannot be read, or do not contain what was asked for.
pub fn run_diff(args: &DiffArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let lake = Lake::open(&args.root)?;
    let all = spans(&lake, args.period)?;
    let service = service(&all, args.service.as_deref())?;
    let sides = match args.at {
        Some(at) => moment(at),
        None => pair(&service, &all[&service], args.old.as_deref(), args.new.as_deref())?,
    };
    let comparison = compare(&lake, &service, sides, args.period, Options::default())?;
    if args.json {
        write_json(&mut *out, &Json::of(&comparison, true))?;
        return Ok(writeln!(out)?);
    }
    write_head(&comparison, out)?;
    let found = significant(&comparison).len();
    if found == 0 {
        writeln!(out, "  No function changed significantly. The largest differences, which may be noise:")?;
        let largest: Vec<&Change> = comparison.difference.changes.iter().take(10).collect();
        write_changes(&largest, out)?;
    } else {
        write_changes(&significant(&comparison), out)?;
    }
    Ok(write_moves(&comparison, out)?)
}

/// Runs `regressions`.
///
/// # Errors
/// When tables cannot be read.
pub fn run(args: &RegressionsArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let lake = Lake::open(&args.root)?;
    let all = spans(&lake, args.period)?;
    let comparable: Vec<(&Arc<str>, &Vec<Span>)> = all.iter().filter(|(_, versions)| versions.len() >= 2).collect();
    let progress = progress(comparable.len() as u64);
    let mut comparisons = Vec::new();
    for (service, versions) in &comparable {
        progress.set_message(escape_controls(service).into_owned());
        let sides = sides(&versions[1], &versions[0]);
        let compared = compare(&lake, service, sides, args.period, Options::default());
        comparisons.push(compared.with_context(|| format!("cannot compare versions of {service}"))?);
        progress.inc(1);
    }
    progress.finish_and_clear();
    if args.json {
        let services: Vec<Json> = comparisons.iter().map(|comparison| Json::of(comparison, false)).collect();
        let single: Vec<&str> = all.iter().filter(|(_, of)| of.len() < 2).map(|(service, _)| &**service).collect();
        write_json(&mut *out, &serde_json::json!({ "services": services, "without_two_versions": single }))?;
        return Ok(writeln!(out)?);
    }
    write_all(&comparisons, &all, out)
}

/// A bar on a terminal, nothing elsewhere.
fn progress(length: u64) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} services, {elapsed}  {msg}");
    ProgressBar::new(length).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn service(all: &BTreeMap<Arc<str>, Vec<Span>>, asked: Option<&str>) -> anyhow::Result<Arc<str>> {
    let list = |names: Vec<&Arc<str>>| {
        let some: Vec<&str> = names.iter().take(10).map(|name| &***name).collect();
        let more = if names.len() > 10 { format!(" and {} more", names.len() - 10) } else { String::new() };
        format!("{}{more}", some.join(", "))
    };
    match asked {
        Some(asked) => all.get_key_value(asked).map(|(service, _)| Arc::clone(service)).ok_or_else(|| {
            let hint = format!("services there: {}", list(all.keys().collect()));
            Refusal::new(format!("there is no service {asked} in these tables")).with_hint(hint).into()
        }),
        None => {
            let two: Vec<&Arc<str>> = all.iter().filter(|(_, of)| of.len() >= 2).map(|(service, _)| service).collect();
            match two[..] {
                [only] => Ok(Arc::clone(only)),
                [] => Err(Refusal::new("no service has two versions in these tables")
                    .with_hint("--service and --at compare before and after a moment; a rule of the agent's sets service.version")
                    .into()),
                _ => Err(Refusal::new(format!("{} services have two versions", two.len()))
                    .with_hint(format!("--service names one of {}; `regressions` compares all", list(two)))
                    .into()),
            }
        }
    }
}

fn pair(service: &str, versions: &[Span], old: Option<&str>, new: Option<&str>) -> anyhow::Result<[Side; 2]> {
    let named = |name: &str| {
        let known: Vec<&str> = versions.iter().map(|span| &*span.version).collect();
        versions.iter().find(|span| &*span.version == name).ok_or_else(|| {
            let hint = format!("there are {}", known.join(", "));
            Refusal::new(format!("{service} has no version {name}")).with_hint(hint)
        })
    };
    let new = match new {
        Some(new) => named(new)?,
        None => versions.iter().find(|span| Some(&*span.version) != old).context("there is no second version")?,
    };
    let old = match old {
        Some(old) => named(old)?,
        None => {
            let older = versions.iter().filter(|span| span.version != new.version && span.first_ms <= new.first_ms);
            let missing = || {
                Refusal::new(format!("{service} has only one version"))
                    .with_hint("--at compares before and after a moment")
            };
            older.max_by_key(|span| span.first_ms).ok_or_else(missing)?
        }
    };
    Ok(sides(old, new))
}

/// Before and after.
fn moment(at: SystemTime) -> [Side; 2] {
    let ms = at.duration_since(UNIX_EPOCH).ok().and_then(|since| place::milliseconds(since.as_secs_f64())).unwrap_or(0);
    [Side { version: None, since_ms: i64::MIN, until_ms: ms }, Side { version: None, since_ms: ms, until_ms: i64::MAX }]
}

fn significant(comparison: &Comparison) -> Vec<&Change> {
    comparison.difference.changes.iter().filter(|change| change.measured.significant).collect()
}

fn write_all(
    comparisons: &[Comparison],
    all: &BTreeMap<Arc<str>, Vec<Span>>,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let changed = |comparison: &&Comparison| !significant(comparison).is_empty() || comparison.whole.significant;
    let (with, without): (Vec<&Comparison>, Vec<&Comparison>) = comparisons.iter().partition(changed);
    match (with.len(), comparisons.len()) {
        (_, 0) => writeln!(out, "No service has two versions in these tables (the label service.version).")?,
        (0, of) => writeln!(out, "No significant change in {of} services with two versions.")?,
        (count, of) => writeln!(out, "{count} of {of} services with two versions changed.")?,
    }
    for comparison in &with {
        writeln!(out)?;
        write_head(comparison, out)?;
        let changes = significant(comparison);
        write_changes(&changes[..changes.len().min(SHOWN)], out)?;
        if changes.len() > SHOWN {
            writeln!(out, "  and {} more (--json has all)", changes.len() - SHOWN)?;
        }
        write_moves(comparison, out)?;
    }
    if !without.is_empty() {
        writeln!(out, "\nNot changed, as far as can be seen:")?;
        for comparison in without {
            let [old, new] = names(comparison);
            let seen = comparison.difference.smallest_visible_share.map_or_else(
                || "too little to tell".to_owned(),
                |share| format!("{:.1} % of a function with 1 % would have been", share * 1e4),
            );
            writeln!(out, "  {}  {old} -> {new}  ({seen})", escape_controls(&comparison.service))?;
            write_moves(comparison, out)?;
        }
    }
    let single = all.values().filter(|of| of.len() < 2).count();
    if single > 0 {
        writeln!(
            out,
            "\n{single} services have no two versions, and are not compared (diff --service S --at TIME does)."
        )?;
    }
    Ok(())
}

fn names(comparison: &Comparison) -> [String; 2] {
    comparison.sides.each_ref().map(|side| {
        side.version.as_ref().map_or_else(
            || if side.since_ms == i64::MIN { "before".to_owned() } else { "after".to_owned() },
            |version| escape_controls(version).into_owned(),
        )
    })
}

fn write_head(comparison: &Comparison, out: &mut dyn Write) -> io::Result<()> {
    let [old, new] = names(comparison);
    let Comparison { service, difference, hosts, process_hours, whole, .. } = comparison;
    writeln!(out, "{}  {old} -> {new}", escape_controls(service))?;
    let side = |number: usize, samples: u64| {
        let days = comparison.sides[number].until_ms.checked_sub(comparison.sides[number].since_ms);
        let days = days.filter(|ms| ms % 86_400_000 == 0 && *ms > 0 && *ms < 1 << 40).map(|ms| ms / 86_400_000);
        let days =
            days.map_or_else(String::new, |days| format!(", {days} whole {}", if days == 1 { "day" } else { "days" }));
        format!(
            "{} samples of {} hosts, {:.0} process-hours{days}",
            HumanCount(samples),
            hosts[number],
            process_hours[number]
        )
    };
    writeln!(out, "  before: {}\n  after:  {}", side(0, difference.before.samples), side(1, difference.after.samples))?;
    if whole.before > 0.0 {
        let interval = whole.interval.map_or_else(String::new, |(low, high)| {
            format!(" ({:+.1} to {:+.1})", low / whole.before * 100.0, high / whole.before * 100.0)
        });
        let verdict = if whole.significant { "" } else { ": no significant change" };
        writeln!(
            out,
            "  CPU time of a process-hour: {:.1} s -> {:.1} s, {:+.1} %{interval}{verdict}",
            whole.before * 3600.0,
            whole.after * 3600.0,
            (whole.after / whole.before - 1.0) * 100.0
        )?;
    }
    Ok(())
}

fn write_changes(changes: &[&Change], out: &mut dyn Write) -> io::Result<()> {
    if changes.is_empty() {
        return Ok(());
    }
    writeln!(out, "  {:>9} {:>9} {:>9} {:>9}  FUNCTION  FILE", "BEFORE", "AFTER", "CHANGE", "RELATIVE")?;
    for Change { name, measured, .. } in changes {
        let Measured { before, after, change, .. } = *measured;
        let relative = if before > 0.0 { format!("{:+.1} %", change / before * 100.0) } else { "new".to_owned() };
        let function = escape_controls(name.function.as_deref().unwrap_or(&name.name)).into_owned();
        let file = escape_controls(name.file.as_deref().unwrap_or_default()).into_owned();
        writeln!(out, "  {} {} {:>9} {relative:>9}  {function}  {file}", share(before), share(after), points(change))?;
    }
    Ok(())
}

fn share(share: f64) -> String {
    format!("{:>7.3} %", share * 100.0)
}

fn points(change: f64) -> String {
    format!("{:+.3}", change * 100.0)
}

fn write_moves(comparison: &Comparison, out: &mut dyn Write) -> io::Result<()> {
    let moved: Vec<&Change> = comparison.difference.changes.iter().filter(|change| change.moved_to.is_some()).collect();
    for change in moved.iter().take(SHOWN) {
        let Some(to) = &change.moved_to else { continue };
        let [from, to] =
            [&change.name, to].map(|name| escape_controls(name.function.as_deref().unwrap_or(&name.name)).into_owned());
        writeln!(out, "  only moved, renamed, split or inlined: {from} -> {to}")?;
    }
    Ok(())
}

/// A side of the JSON.
#[derive(Serialize)]
struct JsonSide {
    version: Option<Arc<str>>,
    samples: u64,
    hosts: usize,
    process_hours: f64,
    since: Option<String>,
    until: Option<String>,
}

#[derive(Serialize)]
struct JsonChange<'a> {
    function: &'a str,
    file: Option<&'a str>,
    #[serde(flatten)]
    share: Measured,
    moved_to: Option<&'a str>,
    before_samples: u64,
    after_samples: u64,
    cpu_seconds_per_process_second: Measured,
}

#[derive(Serialize)]
struct Json<'a> {
    service: &'a str,
    before: JsonSide,
    after: JsonSide,
    smallest_visible_share: Option<f64>,
    cpu_seconds_per_process_second: Measured,
    changes: Vec<JsonChange<'a>>,
}

impl<'a> Json<'a> {
    /// With all functions, or those that changed or moved.
    fn of(comparison: &'a Comparison, all: bool) -> Self {
        let side = |number: usize, samples: u64| {
            let Side { version, since_ms, until_ms } = &comparison.sides[number];
            let (since, until) = (time(*since_ms), time(*until_ms));
            let (hosts, process_hours) = (comparison.hosts[number], comparison.process_hours[number]);
            JsonSide { version: version.clone(), samples, hosts, process_hours, since, until }
        };
        let difference = &comparison.difference;
        let told =
            difference.changes.iter().filter(|change| all || change.measured.significant || change.moved_to.is_some());
        let changes = told.map(|change| JsonChange {
            function: change.name.function.as_deref().unwrap_or(&change.name.name),
            file: change.name.file.as_deref(),
            share: change.measured,
            moved_to: change.moved_to.as_ref().map(|to| to.function.as_deref().unwrap_or(&to.name)),
            before_samples: change.samples.0,
            after_samples: change.samples.1,
            cpu_seconds_per_process_second: change.other,
        });
        Self {
            service: &comparison.service,
            before: side(0, difference.before.samples),
            after: side(1, difference.after.samples),
            smallest_visible_share: difference.smallest_visible_share,
            cpu_seconds_per_process_second: comparison.whole,
            changes: changes.collect(),
        }
    }
}

/// A bound in words; `None` if there is none.
fn time(ms: i64) -> Option<String> {
    let since = UNIX_EPOCH.checked_add(Duration::from_millis(u64::try_from(ms).ok()?))?;
    (ms < 253_402_300_800_000).then(|| humantime::format_rfc3339_seconds(since).to_string())
}
