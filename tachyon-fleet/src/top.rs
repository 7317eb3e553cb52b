//! `top`: the three questions, answered without an engine.

use crate::args::TopArgs;
use crate::facts::{Facts, Wanted};
use crate::lake::Lake;
use crate::questions::{self, ChangeRow, FunctionRow, LossRow};
use serde::Serialize;
use std::io::Write;
use tachyon::sinks::text::{escape_controls, write_json};

/// What `--json` prints.
#[derive(Serialize)]
struct Answer<T> {
    rows: Vec<T>,
}

/// Runs the command.
///
/// # Errors
/// When tables cannot be read, or `out` fails.
pub fn run(args: &TopArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let lake = Lake::open(&args.root)?;
    let wanted = Wanted { time: !args.losses, hosts: args.losses };
    let facts = Facts::read(&lake, args.period, wanted)?;
    if args.changes {
        show(args.json, questions::changes(&facts, args.lines), write_changes, out)
    } else if args.losses {
        show(args.json, questions::losses(&facts), write_losses, out)
    } else {
        show(args.json, questions::functions(&facts, args.lines), write_functions, out)
    }
}

fn show<T: Serialize>(
    json: bool,
    rows: Vec<T>,
    text: fn(&[T], &mut dyn Write) -> std::io::Result<()>,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    if json {
        write_json(&mut *out, &Answer { rows })?;
        writeln!(out)?;
    } else {
        text(&rows, out)?;
    }
    Ok(())
}

fn write_functions(rows: &[FunctionRow], out: &mut dyn Write) -> std::io::Result<()> {
    for of_service in rows.chunk_by(|a, b| a.service == b.service) {
        writeln!(out, "{}", escape_controls(&of_service[0].service))?;
        writeln!(out, "{:>12} {:>12}  FUNCTION  FILE", "SELF", "TOTAL")?;
        for row in of_service {
            let (own, total) = (row.self_ns as f64 / 1e9, row.total_ns as f64 / 1e9);
            let (function, file) = (escape_controls(&row.function), escape_controls(&row.file));
            writeln!(out, "{own:>10.2} s {total:>10.2} s  {function}  {file}")?;
        }
    }
    Ok(())
}

fn write_changes(rows: &[ChangeRow], out: &mut dyn Write) -> std::io::Result<()> {
    for of_service in rows.chunk_by(|a, b| a.service == b.service) {
        let ChangeRow { service, old_version, new_version, .. } = &of_service[0];
        let [service, old, new] = [service, old_version.as_str(), new_version].map(escape_controls);
        writeln!(out, "{service}: {old} -> {new}, shares of its CPU time")?;
        writeln!(out, "{:>10} {:>10} {:>10}  FUNCTION  FILE", "BEFORE", "AFTER", "CHANGE")?;
        for row in of_service {
            let [old, new, change] = [row.old_ppm, row.new_ppm, row.change_ppm].map(|ppm| ppm as f64 / 1e4);
            let (function, file) = (escape_controls(&row.function), escape_controls(&row.file));
            writeln!(out, "{old:>8.2} % {new:>8.2} % {change:>+8.2} %  {function}  {file}")?;
        }
    }
    Ok(())
}

fn write_losses(rows: &[LossRow], out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(out, "{:>12} {:>12} {:>9} {:>10}  HOST", "STORED", "LOST", "SHARE", "RECOVERED")?;
    for row in rows {
        let LossRow { host, stored, lost, lost_ppm, recovered } = row;
        let share = *lost_ppm as f64 / 1e4;
        writeln!(out, "{stored:>12} {lost:>12} {share:>7.2} % {recovered:>10}  {}", escape_controls(host))?;
    }
    Ok(())
}
