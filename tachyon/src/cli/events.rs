//! `-e list`: the events of this machine.

use super::escape::escape;
use super::table::{Column, Style, Table};
use crate::advice::Advice as _;
use crate::kernel::{ChosenEvent, Events, Listed};
use indicatif::HumanCount;
use std::io::{self, Write};
use std::str::FromStr;

/// The value of an `-e`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AskedEvent {
    /// List the available events.
    List,
    /// An event to sample.
    Sample(ChosenEvent),
}

impl FromStr for AskedEvent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "list" {
            return Ok(Self::List);
        }
        let told = |error: crate::kernel::EventError| match error.hint() {
            Some(hint) => format!("{error} ({hint})"),
            None => error.to_string(),
        };
        text.parse().map(Self::Sample).map_err(told)
    }
}

/// Writes the available events: on a terminal, tracepoints only by category, because there are thousands.
///
/// # Errors
/// When `out` cannot be written.
pub fn list(events: &Events, style: Style, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "Software events, and of how many one is sampled unless EVENT:PERIOD says otherwise:")?;
    table(&events.software).write(style, out)?;
    if events.hardware.is_empty() {
        writeln!(out, "\nHardware events: none. This machine shows no performance counters, as most virtual ones.")?;
    } else {
        writeln!(out, "\nHardware events:")?;
        table(&events.hardware).write(style, out)?;
    }
    let categories = match &events.tracepoints {
        Ok(categories) => categories,
        Err(error) => {
            writeln!(out, "\nTracepoints: {}", escape(&error.to_string()))?;
            return error.hint().map_or(Ok(()), |hint| writeln!(out, "  {hint}"));
        }
    };
    let count: usize = categories.iter().map(|(_, points)| points.len()).sum();
    writeln!(out, "\nTracepoints ({}), each hit of which is sampled, as CATEGORY:NAME:", HumanCount(count as u64))?;
    if matches!(style, Style::Text { width: None, .. }) {
        for (category, points) in categories {
            points.iter().try_for_each(|point| writeln!(out, "  {}:{}", escape(category), escape(point)))?;
        }
        return Ok(());
    }
    let mut rest: &[(String, Vec<String>)] = categories;
    while !rest.is_empty() {
        let parts: Vec<_> =
            rest.iter().map(|(category, points)| format!("{}: {}", escape(category), points.len())).collect();
        let (line, _) = style.fitting(2, &parts);
        writeln!(out, "  {line}")?;
        rest = &rest[line.split(", ").count()..];
    }
    writeln!(out, "Their names: tachyon-bpf record -e list | grep sched:")
}

fn table(events: &[Listed]) -> Table {
    let mut table = Table::new(vec![("ONE OF", Column::Number), ("EVENT", Column::Text), ("WHAT", Column::Text)]);
    for Listed { name, also, period, what } in events {
        let names = [name.as_str()].into_iter().chain(also.iter().copied()).collect::<Vec<_>>().join(", ");
        let period = if name == "cpu-clock" { String::new() } else { HumanCount(u64::from(*period)).to_string() };
        table.push(vec![period.into(), names.into(), (*what).to_owned().into()]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events() -> Events {
        let faults = Listed { name: "page-faults".to_owned(), also: vec!["faults"], period: 1, what: "pages" };
        let points = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let tracepoints = vec![
            ("block".to_owned(), points(&["block_rq_issue"])),
            ("sched".to_owned(), points(&["sched_switch", "sched_waking"])),
        ];
        Events { software: vec![faults], hardware: Vec::new(), tracepoints: Ok(tracepoints) }
    }

    fn shown(style: Style) -> String {
        let mut out = Vec::new();
        list(&events(), style, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_pipe_has_all_names() {
        let text = shown(Style::plain());
        for part in [
            "page-faults, faults",
            "Hardware events: none",
            "(3)",
            "  block:block_rq_issue\n",
            "  sched:sched_waking\n",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn a_terminal_has_categories() {
        let text = shown(Style::Text { width: Some(40), colours: false });
        assert!(text.contains("  block: 1, sched: 2\n"), "{text}");
        assert!(!text.contains("sched_waking"), "{text}");
    }
}
