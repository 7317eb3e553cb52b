//! `--once`: one look, as text or as JSON.

use super::driver::{self, Taken};
use crate::analysis::{Aggregate, By, Collector, Filter, Report, Row, RowKind, ratio, report};
use crate::cli::args::TopArgs;
use crate::cli::command::{CommandStatus, PreparedCommand};
use crate::cli::distributions::Installed;
use crate::cli::escape::escape;
use crate::cli::record::signals::{End, Signals};
use crate::cli::report::Json;
use crate::cli::report::text::{place, plural, seconds, write_waits};
use crate::cli::table::{Cell, Colour, Column, Style, Table, heat, percent};
use crate::kernel::drop_privileges;
use crate::recording::{Opened, Running};
use crate::sinks::text::write_json;
use serde::Serialize;
use std::io::Write;
use std::time::{Duration, Instant};

/// How often to check on the targets.
const TURN: Duration = Duration::from_millis(100);
/// Rows of the text if there is no terminal to set a limit.
const ROWS: usize = 20;
/// Most tasks that are named in one line.
const TASKS: usize = 8;
/// Lines of the text that are not rows.
const AROUND: usize = 6;

/// The JSON: that of `report`, plus what is only known about a live process. `docs/top.md` names the keys.
#[derive(Serialize)]
struct Live<'a> {
    #[serde(flatten)]
    report: Json<'a>,
    window_s: f64,
    /// `None`: not known, because only threads on a CPU were sampled.
    waiting_share: Option<f64>,
    /// CPU time of the profiler per second, including its BPF programs if the kernel measures them.
    profiler_cpu_share: f64,
}

/// Records for as long as requested, and writes what it saw. Returns how the command ended, if it did so by itself.
///
/// # Errors
/// When the kernel refuses, or the output cannot be written.
pub fn run(
    args: &TopArgs,
    opened: Opened,
    signals: &mut Signals,
    runtime: &tokio::runtime::Runtime,
    mut command: Option<&mut PreparedCommand>,
    out: &mut dyn Write,
) -> anyhow::Result<Option<CommandStatus>> {
    let (mut running, mut taking) = driver::begin(opened)?;
    // The cost of the start is a segment of its own.
    taking.cut(&mut running)?;
    if let Some(command) = command.as_deref_mut() {
        command.start()?;
    }
    // If the kernel refuses, it works with more rights than it needs.
    let _refused = drop_privileges();
    let ended = runtime.block_on(wait(args.delay, &mut running, signals, command.as_deref_mut()))?;
    let taken = taking.cut(&mut running)?;
    drop(running);
    if let (Some(command), None) = (command, ended) {
        super::end(command)?;
    }
    show(args, &taken, out)?;
    out.flush()?;
    Ok(ended)
}

/// Waits until it is time, or nothing more can come.
async fn wait(
    delay: Duration,
    running: &mut Running,
    signals: &mut Signals,
    mut command: Option<&mut PreparedCommand>,
) -> anyhow::Result<Option<CommandStatus>> {
    let end = Instant::now() + delay;
    let mut turn = tokio::time::interval(TURN);
    loop {
        tokio::select! {
            biased;
            told = signals.next() => if let End::Asked(_) = told { return Ok(None) },
            () = tokio::time::sleep_until(end.into()) => return Ok(None),
            _ = turn.tick() => if running.status()?.over.is_some() { return Ok(None) },
        }
        if let Some(command) = command.as_deref_mut()
            && let Some(status) = command.try_wait()?
        {
            return Ok(Some(status));
        }
    }
}

fn show(args: &TopArgs, taken: &Taken, out: &mut dyn Write) -> anyhow::Result<()> {
    let Taken { profile, report: account, batch, .. } = taken;
    let mut aggregate = Aggregate::default();
    batch.feed(profile, account, &mut Collector::new(&mut aggregate))?;
    let report_by =
        |by| report(&aggregate, by, &Filter::default(), args.sampling.native.is_some(), &Installed::default());
    let report = report_by(By::Function);
    let used_s = account.cost.user_cpu_s + account.cost.bpf_run_ns.unwrap_or(0) as f64 / 1e9;
    let profiler = if account.duration_s > 0.0 { used_s / account.duration_s } else { 0.0 };
    if !args.json {
        let tasks = args.awaiting.then(|| report_by(By::Task));
        return Ok(write_text(&report, tasks.as_ref(), profiler, out)?);
    }
    let live = Live {
        report: Json::live(&report, args.sampling.native.is_some()),
        window_s: account.duration_s,
        waiting_share: (args.wall || args.off_cpu).then(|| report.waiting_share()),
        profiler_cpu_share: profiler,
    };
    write_json(&mut *out, &live)?;
    Ok(writeln!(out)?)
}

fn write_text(report: &Report, tasks: Option<&Report>, profiler: f64, out: &mut dyn Write) -> std::io::Result<()> {
    let style = Style::of_stdout();
    let (processes, threads) =
        (plural(report.processes, "process", "processes"), plural(report.threads, "thread", "threads"));
    let samples = plural(usize::try_from(report.samples).unwrap_or(usize::MAX), "sample", "samples");
    writeln!(
        out,
        "{samples} in {} s: {} s of {}, {processes}, {threads}",
        seconds(report.seconds),
        seconds(report.sampled_seconds),
        if report.waiting.is_empty() { "CPU time" } else { "threads' time" }
    )?;
    let gil = report.gil_share.map(|gil| format!("GIL held {}, ", percent(gil))).unwrap_or_default();
    let lost = match report.lost {
        Some(lost @ 1..) => format!("lost {}", percent(ratio(lost, lost + report.samples))),
        _ => "nothing lost".to_owned(),
    };
    writeln!(
        out,
        "{gil}garbage collector {}, native code {}, {lost}; the profiler used {} of a CPU",
        percent(report.gc_share),
        percent(report.native_share),
        percent(profiler)
    )?;
    write_waits(report, out)?;
    if let Some(tasks) = tasks {
        let rows = tasks.rows.iter().filter(|row| row.own.samples > 0).take(TASKS);
        let share = |row: &Row| percent(ratio(row.own.samples, tasks.samples));
        let texts: Vec<_> = rows.map(|row| format!("{} {}", escape(&row.name.name), share(row))).collect();
        let (line, _) = style.fitting("by task: ".len(), &texts);
        writeln!(out, "by task: {line}")?;
    }
    writeln!(out)?;
    let columns =
        [("SELF", Column::Number), ("TOTAL", Column::Number), ("FUNCTION", Column::Text), ("FILE", Column::Text)];
    let mut table = Table::new(columns.to_vec());
    let most = Style::height().map_or(ROWS, |height| height.saturating_sub(AROUND).clamp(8, 40));
    for row in report.rows.iter().filter(|row| row.name.kind != RowKind::Native).take(most) {
        let share = |samples| ratio(samples, report.samples);
        table.push(vec![
            Cell::new(&percent(share(row.own.samples)), heat(share(row.own.samples))),
            percent(share(row.total.samples)).into(),
            Cell::new(row.name.function.as_deref().unwrap_or(&row.name.name), Colour::Plain),
            Cell::new(&place(&row.name, row.hottest_line), Colour::Plain),
        ]);
    }
    if table.is_empty() { writeln!(out, "no samples") } else { table.write(style, out) }
}
