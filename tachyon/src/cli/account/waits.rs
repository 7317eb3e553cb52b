//! Where the selected threads waited, as shares of their lifetimes: the first line of the account of a recording with waits.

use super::super::table::percent;
use crate::analysis::ratio;
use crate::cli::escape::escape;
use crate::profile::package_path;
use crate::recording::waits::UNREPORTED;
use crate::report::{CauseReport, HolderReport, PlaceReport, Report, TaskWaitReport, WakerReport, WallReport};
use indicatif::HumanCount;
use std::collections::BTreeMap;
use std::io::{self, Write};

/// Most causes of waits that are shown.
const CAUSES: usize = 4;
/// Most lines that held the GIL, and most that ended waits.
const LINES: usize = 3;
/// A place with a smaller share of its cause is just one of many.
const MOST: f64 = 0.5;
/// Below this share of their lifetimes, who held what threads waited for is not shown.
const LEAST: f64 = 0.02;

/// Shares of the threads' lifetimes.
struct Shares {
    waiting: f64,
    /// By cause, largest first.
    causes: Vec<(String, f64)>,
}

impl Shares {
    /// From the time of each process as the kernel counted it, or else from the samples.
    fn of(report: &Report, wall: &WallReport) -> Self {
        Self::of_times(report).unwrap_or_else(|| {
            let whole = report.stored + wall.stored;
            let causes = wall.causes.iter().map(|(name, cause)| (name.clone(), ratio(cause.stored, whole))).collect();
            Self { waiting: ratio(wall.stored, whole), causes }.sorted()
        })
    }

    fn of_times(report: &Report) -> Option<Self> {
        let (mut running, mut waits) = (0.0, BTreeMap::new());
        for process in &report.processes {
            let time = process.time.as_ref()?;
            running += time.running_s;
            *waits.entry("cpu".to_owned()).or_insert(0.0) += time.queued_s;
            for (cause, seconds) in &time.blocked_s {
                *waits.entry(cause.clone()).or_insert(0.0) += seconds;
            }
        }
        let waiting: f64 = waits.values().sum();
        let whole = running + waiting;
        if whole <= 0.0 {
            return None;
        }
        let causes = waits.into_iter().map(|(cause, seconds)| (cause, seconds / whole)).collect();
        Some(Self { waiting: waiting / whole, causes }.sorted())
    }

    fn sorted(mut self) -> Self {
        self.causes.sort_by(|a, b| b.1.total_cmp(&a.1));
        self
    }

    fn of_cause(&self, name: &str) -> f64 {
        self.causes.iter().find(|(cause, _)| cause == name).map_or(0.0, |(_, share)| *share)
    }
}

/// Writes one line, and more if there is more to say.
pub(super) fn write(report: &Report, wall: &WallReport, out: &mut dyn Write) -> io::Result<()> {
    let shares = Shares::of(report, wall);
    let shown = shares.causes.iter().take(CAUSES).filter(|(_, share)| *share >= 0.001);
    let told: Vec<String> = shown.map(|(name, share)| told(name, *share, wall)).collect();
    let colon = if told.is_empty() { "" } else { ": " };
    writeln!(out, "{} waiting{colon}{}", short(shares.waiting), told.join(", "))?;
    let gil = wall.causes.get("gil").map_or(0, |cause| cause.stored);
    if shares.of_cause("gil") >= LEAST && wall.holders.len() > 1 {
        let lines = wall.holders.iter().take(LINES);
        let lines: Vec<_> = lines.map(|line| format!("{} {}", short(ratio(line.stored, gil)), holder(line))).collect();
        writeln!(out, "the GIL was held by: {}", lines.join(", "))?;
    }
    for WakerReport { stored, cause, place, waker } in wall.wakers.iter().take(LINES) {
        let (place, waker) = (escape(place), escape(waker));
        writeln!(out, "woken by {waker}: {cause} in {place}, {}", short(ratio(*stored, wall.stored)))?;
    }
    if let Some(tasks) = &wall.tasks {
        write_tasks(tasks, out)?;
    }
    if wall.widened > 0 {
        let share = short(ratio(wall.widened, wall.ticks_due));
        writeln!(
            out,
            "{share} of the samples of waiting threads were taken less often: too many threads came back at once"
        )?;
    }
    if wall.threads_without_room > 0 {
        let met = HumanCount(wall.threads_without_room);
        writeln!(out, "{met} times a thread was met for which there was no room: its waits are in no count")?;
    }
    let lost = wall.ticks_due.saturating_sub(wall.stored);
    if lost > 0 {
        writeln!(out, "{} of the samples of waiting threads were lost", percent(ratio(lost, wall.ticks_due)))?;
    }
    let unreported = wall.loss.get(UNREPORTED).copied().unwrap_or(0);
    if unreported > 0 {
        let share = percent(ratio(unreported, wall.ticks_due));
        writeln!(
            out,
            "{share} because the kernel did not report that a thread was back on a CPU, as in some virtual machines"
        )?;
    }
    Ok(())
}

/// Writes where asyncio tasks and greenlets waited side by side.
fn write_tasks(tasks: &TaskWaitReport, out: &mut dyn Write) -> io::Result<()> {
    let told = |place: &PlaceReport| format!("{} {}", short(ratio(place.stored, tasks.stored)), escape(&place.place));
    let lines: Vec<String> = tasks.places.iter().take(LINES).map(told).collect();
    if !lines.is_empty() {
        let who = match tasks.greenlets {
            0 => "asyncio tasks awaited something in",
            of_all if of_all >= tasks.stored => "greenlets waited in",
            _ => "asyncio tasks and greenlets waited in",
        };
        writeln!(out, "{who}: {}", lines.join(", "))?;
    }
    let not_read = tasks.idle.saturating_sub(tasks.read);
    if tasks.idle > 0 && ratio(not_read, tasks.idle) >= LEAST {
        let share = short(ratio(not_read, tasks.idle));
        let of = |cause: &str| tasks.loss.get(cause).copied().unwrap_or(0);
        let why = if of("late") > of("went_on") { "it would have taken too long" } else { "the loop went on too soon" };
        writeln!(out, "in {share} of the event loops' idle time the tasks could not be read: {why}")?;
    }
    let lost = ["too_many", "write_error"].iter().filter_map(|cause| tasks.loss.get(*cause)).sum::<u64>();
    if lost > 0 {
        writeln!(out, "{} of the samples of waiting tasks were lost", percent(ratio(lost, tasks.stored + lost)))?;
    }
    Ok(())
}

/// A cause with its share and where most of it was.
fn told(name: &str, share: f64, wall: &WallReport) -> String {
    let share = short(share);
    let what = match name {
        "gil" => "GIL",
        // Where a thread is when it loses its CPU says nothing.
        "cpu" => return format!("{share} for a CPU"),
        "child" => "child process",
        "stop_the_world" => "stop of the world",
        name => name,
    };
    let place = wall.causes.get(name);
    if let (true, Some(line)) = (name == "gil", wall.holders.first()) {
        return format!("{share} GIL (held by {})", holder(line));
    }
    match place {
        Some(CauseReport { stored, place, at_place }) => {
            let most = if ratio(*at_place, *stored) < MOST { ", above all" } else { "" };
            format!("{share} {what}{most} in {}", escape(place))
        }
        None => format!("{share} {what}"),
    }
}

/// `encode, json/encoder.py:201`.
fn holder(line: &HolderReport) -> String {
    let (function, file) = (escape(&line.function), escape(package_path(&line.file)).into_owned());
    match line.line {
        Some(number) => format!("{function}, {file}:{number}"),
        None => format!("{function}, {file}"),
    }
}

/// Whole percent, or one decimal for small ones.
fn short(share: f64) -> String {
    let percent = share * 100.0;
    if percent >= 9.95 { format!("{percent:.0} %") } else { format!("{percent:.1} %") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{ProcessReport, TimeReport};

    fn cause(stored: u64, place: &str, at_place: u64) -> CauseReport {
        CauseReport { stored, place: place.to_owned(), at_place }
    }

    fn wall() -> WallReport {
        WallReport {
            ticks_due: 720,
            stored: 720,
            causes: BTreeMap::from([
                ("socket".to_owned(), cause(410, "db.py:88 execute", 400)),
                ("gil".to_owned(), cause(220, "views.py:9 render", 200)),
                ("cpu".to_owned(), cause(90, "views.py:9 render", 50)),
            ]),
            holders: vec![HolderReport {
                stored: 200,
                function: "encode".to_owned(),
                file: "/usr/lib/python3.12/json/encoder.py".to_owned(),
                line: Some(201),
            }],
            ..WallReport::default()
        }
    }

    fn lines(report: &Report, wall: &WallReport) -> String {
        let mut out = Vec::new();
        write(report, wall, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn the_first_line_says_where_the_time_went() {
        let report = Report { stored: 280, ..Report::default() };
        assert_eq!(
            lines(&report, &wall()),
            "72 % waiting: 41 % socket in db.py:88 execute, 22 % GIL (held by encode, json/encoder.py:201), \
             9.0 % for a CPU\n"
        );
    }

    #[test]
    fn what_the_kernel_counted_goes_before_what_was_sampled() {
        let blocked_s = BTreeMap::from([("socket".to_owned(), 6.0), ("gil".to_owned(), 2.0)]);
        let time = Some(TimeReport { running_s: 1.0, queued_s: 1.0, blocked_s, gil_wait_s: 2.0 });
        let processes = vec![ProcessReport { time, ..ProcessReport::default() }];
        let report = Report { stored: 0, processes, ..Report::default() };
        let text = lines(&report, &wall());
        assert!(text.starts_with("90 % waiting: 60 % socket in db.py:88 execute, 20 % GIL (held by"), "{text}");
        assert!(text.ends_with(", 10 % for a CPU\n"), "{text}");
    }

    #[test]
    fn what_else_there_is_has_lines_of_its_own() {
        let mut wall = wall();
        wall.causes.insert("socket".to_owned(), cause(410, "db.py:88 execute", 100));
        wall.holders.push(HolderReport { stored: 20, function: "f\x1b".to_owned(), file: "a.py".into(), line: None });
        wall.wakers = vec![WakerReport {
            stored: 360,
            cause: "lock".to_owned(),
            place: "queue.py:171 get".to_owned(),
            waker: "queue.py:133 put".to_owned(),
        }];
        let place = |stored, place: &str| PlaceReport { stored, place: place.to_owned() };
        wall.tasks = Some(TaskWaitReport {
            idle: 100,
            read: 96,
            loss: BTreeMap::from([("went_on".to_owned(), 4), ("write_error".to_owned(), 10)]),
            stored: 990,
            greenlets: 0,
            places: vec![place(660, "app.py:12 handle"), place(330, "feed.py:7 poll")],
        });
        (wall.widened, wall.threads_without_room, wall.ticks_due) = (72, 3, 800);
        wall.loss = BTreeMap::from([(UNREPORTED.to_owned(), 4)]);
        let text = lines(&Report { stored: 280, ..Report::default() }, &wall);
        for line in [
            "41 % socket, above all in db.py:88 execute",
            "\nthe GIL was held by: 91 % encode, json/encoder.py:201, 9.1 % f\\x1b, a.py\n",
            "\nwoken by queue.py:133 put: lock in queue.py:171 get, 50 %\n",
            "\nasyncio tasks awaited something in: 67 % app.py:12 handle, 33 % feed.py:7 poll\n",
            "\nin 4.0 % of the event loops' idle time the tasks could not be read: the loop went on too soon\n",
            "\n1.0 % of the samples of waiting tasks were lost\n",
            "\n9.0 % of the samples of waiting threads were taken less often",
            "\n3 times a thread was met for which there was no room",
            "\n10.0 % of the samples of waiting threads were lost\n\
             0.5 % because the kernel did not report that a thread was back on a CPU",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        for (greenlets, line) in
            [(990, "\ngreenlets waited in: 67 %"), (9, "\nasyncio tasks and greenlets waited in: 67 %")]
        {
            wall.tasks.get_or_insert_default().greenlets = greenlets;
            let text = lines(&Report::default(), &wall);
            assert!(text.contains(line), "{line}: {text}");
        }
    }
}
