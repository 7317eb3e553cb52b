//! A report as text: the first screen answers where the time went, the last lines say how to look closer.

use super::Asked;
use crate::analysis::{By, Edge, Edges, LeftAside, Report, Row, RowKind, RowName, ratio};
use crate::cli::escape::escape;
use crate::cli::table::{Cell, Colour, Column, Style, Table, heat, ordinal, percent};
use crate::profile::{Library, TASK_WAIT, library};
use indicatif::HumanCount;
use std::io::{self, Write};
use std::sync::Arc;

/// Rows to show if the user does not say how many and there is no terminal to set a limit.
const ROWS: usize = 20;
/// Lines of the first screen that are not rows of the table: those above and below it, and the shell's.
const AROUND: usize = 12;
/// Share of all samples below which native code in a Python function's self time is not shown under it.
const NATIVE_TOLD: f64 = 0.001;
/// Most native functions that are shown under a Python function.
const NATIVE_SHOWN: usize = 3;
/// Most modules and processes in the lines that sum them up.
const SUMMED_UP: usize = 6;

/// Share of samples on a CPU from which all of them count as CPU time.
const ON_CPU: f64 = 0.995;

/// What the text is made from.
pub(super) struct Text<'a> {
    pub asked: &'a Asked<'a>,
    pub report: &'a Report,
    pub modules: Option<Report>,
    pub processes: Option<Report>,
    /// By task, if samples have tasks.
    pub tasks: Option<Report>,
    /// What tasks awaited, which is not in the report.
    pub waiting_tasks: Option<LeftAside>,
    pub style: Style,
}

/// What waiting threads waited for, if any did.
pub(in crate::cli) fn write_waits(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    if report.waiting.is_empty() {
        return Ok(());
    }
    let told: Vec<String> =
        report.waits().into_iter().map(|(cause, share)| format!("{cause} {}", percent(share))).collect();
    writeln!(out, "waiting {}: {}", percent(report.waiting_share()), told.join(", "))
}

/// Which events the samples were taken at.
fn write_events(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    for ((name, period), &samples) in &report.events {
        let name = escape(name);
        let count = HumanCount(samples);
        match period {
            1 => writeln!(out, "event {name}: {count}")?,
            period => {
                let events = HumanCount(samples.saturating_mul(*period));
                writeln!(out, "event {name}: about {events}, {count} samples of every {}", ordinal(*period))?;
            }
        }
    }
    Ok(())
}

impl Text<'_> {
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        self.write_head(out)?;
        if self.report.samples == 0 {
            return writeln!(out, "no samples{}", if self.report.all_samples > 0 { " match" } else { "" });
        }
        if self.asked.callers.is_none() && self.asked.callees.is_none() {
            return self.write_rows(out);
        }
        for (found, of) in [(&self.asked.callers, true), (&self.asked.callees, false)] {
            if let Some(found) = found {
                self.write_edges(found, of, out)?;
            }
        }
        Ok(())
    }

    fn write_head(&self, out: &mut dyn Write) -> io::Result<()> {
        let report = self.report;
        let files = self.asked.args.files.iter().map(|file| escape(&file.to_string_lossy()).into_owned());
        let files: Vec<_> = files.collect();
        let (bold, more) = (files[0].clone(), files.len() - 1);
        write!(out, "{}", self.style.paint(&bold, Colour::Bold))?;
        match more {
            0 => writeln!(out)?,
            _ => writeln!(out, " and {more} more")?,
        }
        if self.style == Style::Markdown {
            writeln!(out)?;
        }
        // Samples of waiting threads, which CPython's profiler takes by default, are not CPU time.
        let time = match report.cpu_share {
            _ if report.is_of_tasks() => "waiting tasks' time",
            ..ON_CPU => "threads' time",
            _ => "CPU time",
        };
        let sampled = if report.is_of_events() {
            String::new()
        } else {
            format!(": {} s of {time}", seconds(report.sampled_seconds))
        };
        let count = plural(usize::try_from(report.samples).unwrap_or(usize::MAX), "sample", "samples");
        let mut line = format!("{count} in {} s{sampled}", seconds(report.seconds));
        if report.samples < report.all_samples {
            let share = percent(ratio(report.samples, report.all_samples));
            line = format!(
                "{} of {} samples match ({share}){sampled}",
                HumanCount(report.samples),
                HumanCount(report.all_samples),
            );
        }
        writeln!(
            out,
            "{line}, {}, {}",
            plural(report.processes, "process", "processes"),
            plural(report.threads, "thread", "threads")
        )?;
        if report.is_of_tasks() {
            return writeln!(out);
        }
        let mut shares = Vec::new();
        if let Some(gil) = report.gil_share {
            shares.push(format!("GIL held {}", percent(gil)));
        }
        shares.push(format!("garbage collector {}", percent(report.gc_share)));
        shares.push(format!("native code {}", percent(report.native_share)));
        if report.cpu_share < ON_CPU {
            shares.push(format!("on a CPU {}", percent(report.cpu_share)));
        }
        match report.lost {
            Some(0) => shares.push("nothing lost".to_owned()),
            Some(lost) => shares.push(format!("lost {}", percent(ratio(lost, lost + report.all_samples)))),
            None => {}
        }
        writeln!(out, "{}", shares.join(", "))?;
        write_waits(self.report, out)?;
        write_events(self.report, out)?;
        if let Some(LeftAside { us, .. }) = self.waiting_tasks {
            let seconds = seconds(us as f64 / 1e6);
            writeln!(out, "tasks waited for {seconds} s, side by side: --event {TASK_WAIT} shows for what, and where")?;
        }
        writeln!(out)
    }

    fn rows_wanted(&self) -> usize {
        let height = || match self.style {
            Style::Text { width: Some(_), .. } => Style::height(),
            _ => None,
        };
        let more = usize::from(!self.report.waiting.is_empty())
            + self.report.events.len()
            + usize::from(self.waiting_tasks.is_some())
            + usize::from(self.processes.is_some())
            + usize::from(self.tasks.is_some());
        let fitting = |rows: usize| rows.saturating_sub(AROUND + more).clamp(8, 40);
        self.asked.args.lines.unwrap_or_else(|| height().map_or(ROWS, fitting))
    }

    /// What is shown about native code under a Python function.
    fn detail<'a>(&'a self, row: &'a Row) -> impl Iterator<Item = &'a (Arc<str>, Arc<str>, u64)> {
        let told = |native: &&(Arc<str>, Arc<str>, u64)| self.share(native.2) >= NATIVE_TOLD;
        row.native.iter().filter(told).take(NATIVE_SHOWN)
    }

    /// How many rows fit into that many lines, with the details under each.
    fn fitting(&self, rows: &[&Row], lines: usize) -> usize {
        let mut used = 0;
        let fits = |row: &&&Row| {
            used += 1 + self.detail(row).count();
            used <= lines
        };
        rows.iter().take_while(fits).count().max(3)
    }

    fn write_rows(&self, out: &mut dyn Write) -> io::Result<()> {
        let (python, native): (Vec<&Row>, Vec<&Row>) =
            self.report.rows.iter().partition(|row| row.name.kind != RowKind::Native);
        let wanted = self.rows_wanted();
        // A blank line, two headings, and a line for what is left out.
        let with_native = if native.is_empty() { 0 } else { wanted.saturating_sub(4).div_ceil(3).max(3) };
        let has_detail = self.asked.args.native && matches!(self.report.by, By::Function | By::Line);
        let shown = match (self.asked.args.lines, native.is_empty()) {
            (Some(lines), _) => lines,
            (None, true) => wanted,
            (None, false) => {
                let lines = wanted.saturating_sub(4 + with_native);
                if has_detail { self.fitting(&python, lines) } else { lines.max(3) }
            }
        };
        self.write_table(&python, shown, self.asked.args.native, out)?;
        if !native.is_empty() {
            writeln!(out, "\n{}", self.style.paint("Native code, which is part of the rows above:", Colour::Bold))?;
            if self.style == Style::Markdown {
                writeln!(out)?;
            }
            let shown = if self.asked.args.lines.is_some() { wanted } else { with_native };
            self.write_table(&native, shown, false, out)?;
        }
        self.write_summaries(python.len() > shown, out)
    }

    fn write_table(&self, rows: &[&Row], wanted: usize, detail: bool, out: &mut dyn Write) -> io::Result<()> {
        let by = self.report.by;
        let is_group = matches!(by, By::Process | By::Thread);
        let is_native = rows.first().is_some_and(|row| row.name.kind == RowKind::Native);
        let amount = if self.report.is_of_events() { "SAMPLES" } else { "SECONDS" };
        let mut columns = vec![("SELF", Column::Number), (amount, Column::Extra)];
        columns.push(("TOTAL", Column::Number));
        columns.push((heading(by), Column::Text));
        let placed = matches!(by, By::Function | By::Line);
        if placed {
            columns.push((if is_native { "OBJECT" } else { "FILE" }, Column::Text));
        }
        if is_group {
            columns = vec![("SHARE", Column::Number), (amount, Column::Extra), (heading(by), Column::Text)];
        }
        let mut table = Table::new(columns);
        for row in rows.iter().take(wanted) {
            let (own, total) = (self.share(row.own.samples), self.share(row.total.samples));
            let amount = if self.report.is_of_events() {
                HumanCount(row.own.samples).to_string()
            } else {
                seconds(row.own.cpu_us as f64 / 1e6)
            };
            let mut cells = vec![Cell::new(&percent(own), heat(own)), amount.into()];
            if !is_group {
                cells.push(percent(total).into());
            }
            let name = if placed { row.name.function.as_deref().unwrap_or_default() } else { &row.name.name };
            let name = if by == By::Module { short(name) } else { name };
            cells.push(Cell::new(name, Colour::Plain));
            if placed {
                cells.push(Cell::new(&place(&row.name, row.hottest_line), Colour::Plain));
            }
            table.push(cells);
            for (symbol, object, samples) in self.detail(row).filter(|_| detail && placed) {
                let dim = |text: &str| Cell::new(text, Colour::Dim);
                let own = percent(self.share(*samples));
                table.push(vec![dim(&own), dim(""), dim(""), dim(&format!("  {symbol}")), dim(object)]);
            }
        }
        table.write(self.style, out)?;
        let rest = &rows[wanted.min(rows.len())..];
        if !rest.is_empty() {
            let own = self.share(rest.iter().map(|row| row.own.samples).sum());
            let text = format!("… and {} with {} of self", plural(rest.len(), "more row", "more rows"), percent(own));
            writeln!(out, "{}", self.style.paint(&text, Colour::Dim))?;
        }
        Ok(())
    }

    fn write_summaries(&self, cut: bool, out: &mut dyn Write) -> io::Result<()> {
        let summary = |heading: &str, report: &Report, out: &mut dyn Write| {
            let rows = report.rows.iter().filter(|row| row.name.kind != RowKind::Native && row.own.samples > 0);
            let texts: Vec<_> = rows
                .clone()
                .take(SUMMED_UP)
                .map(|row| format!("{} {}", escape(short(&row.name.name)), percent(self.share(row.own.samples))))
                .collect();
            let (line, fits) = self.style.fitting(heading.len() + 1, &texts);
            let more = if fits && rows.count() == texts.len() { "" } else { ", …" };
            writeln!(out, "{heading} {line}{more}")
        };
        let Some(modules) = &self.modules else { return Ok(()) };
        writeln!(out)?;
        summary("by module:", modules, out)?;
        if let Some(processes) = &self.processes {
            summary("by process:", processes, out)?;
        }
        if let Some(tasks) = &self.tasks {
            summary("by task:", tasks, out)?;
        }
        let mut closer = Vec::new();
        if self.report.native_share > 0.0 && !self.asked.args.native {
            closer.push("--native".to_owned());
        }
        closer.extend(["--by line|module|thread", "--callers NAME", "--callees NAME"].map(str::to_owned));
        if cut {
            closer.push("--lines N".to_owned());
        }
        let heading = "look closer:";
        let (line, _) = self.style.fitting(heading.len() + 1, &closer);
        writeln!(out, "{}", self.style.paint(&format!("{heading} {line}"), Colour::Dim))
    }

    fn write_edges(&self, found: &Edges, callers: bool, out: &mut dyn Write) -> io::Result<()> {
        let names: Vec<_> = found.functions.iter().map(|name| escape(&name.name).into_owned()).collect();
        let share = percent(ratio(found.samples, found.all));
        let (what, edges) = if callers { ("called by", &found.callers) } else { ("calls", &found.callees) };
        let mut names_shown = names.iter().take(SUMMED_UP).cloned().collect::<Vec<_>>().join(", ");
        if names.len() > SUMMED_UP {
            names_shown += &format!(" and {} more", names.len() - SUMMED_UP);
        }
        writeln!(out, "{} ({share} total) {what}:", self.style.paint(&names_shown, Colour::Bold))?;
        if self.style == Style::Markdown {
            writeln!(out)?;
        }
        if edges.is_empty() {
            return writeln!(out, "no function{}\n", if self.asked.args.native { "" } else { " of Python" });
        }
        let mut table = Table::new(vec![
            ("TOTAL", Column::Number),
            ("OF IT", Column::Number),
            ("SAMPLES", Column::Extra),
            ("FUNCTION", Column::Text),
            ("FILE", Column::Text),
        ]);
        let wanted = self.rows_wanted();
        for Edge { name, samples, .. } in edges.iter().take(wanted) {
            let share = ratio(*samples, found.all);
            table.push(vec![
                Cell::new(&percent(share), heat(share)),
                percent(ratio(*samples, found.samples)).into(),
                HumanCount(*samples).to_string().into(),
                Cell::new(&name.name, Colour::Plain),
                Cell::new(&place(name, None), Colour::Plain),
            ]);
        }
        table.write(self.style, out)?;
        if edges.len() > wanted {
            let text = format!("… and {}", plural(edges.len() - wanted, "more", "more"));
            writeln!(out, "{}", self.style.paint(&text, Colour::Dim))?;
        }
        writeln!(out)
    }

    fn share(&self, samples: u64) -> f64 {
        ratio(samples, self.report.samples)
    }
}

pub(in crate::cli) fn heading(by: By) -> &'static str {
    match by {
        By::Function | By::Line => "FUNCTION",
        By::Module => "MODULE",
        By::Process => "PROCESS",
        By::Thread => "THREAD",
        By::Task => "TASK",
    }
}

/// File and line for people: without the directories that libraries lie in.
pub(in crate::cli) fn place(name: &RowName, hottest: Option<u32>) -> String {
    let file = short(name.file.as_deref().unwrap_or_default());
    match name.line.or(hottest) {
        Some(line) if !file.is_empty() => format!("{file}:{line}"),
        _ => file.to_owned(),
    }
}

/// A path as people know it.
pub(in crate::cli) fn short(path: &str) -> &str {
    match library(path) {
        Some(Library::Site { inside, .. } | Library::Standard(inside)) => inside,
        None => path,
    }
}

/// `2 threads`.
pub(in crate::cli) fn plural(count: usize, one: &str, many: &str) -> String {
    format!("{} {}", HumanCount(count as u64), if count == 1 { one } else { many })
}

/// Seconds for people.
pub(in crate::cli) fn seconds(seconds: f64) -> String {
    match seconds {
        100.0.. => format!("{seconds:.0}"),
        1.0.. => format!("{seconds:.1}"),
        _ => format!("{seconds:.2}"),
    }
}
