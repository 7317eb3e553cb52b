//! One live line on a terminal while a recording runs; nothing elsewhere.

use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::Duration;

/// Numbers of a running recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Since its start.
    pub elapsed: Duration,
    /// Samples taken so far.
    pub samples: u64,
    /// Processes selected now.
    pub processes: u64,
    /// Samples lost so far, by whatever cause.
    pub lost: u64,
}

/// The live line. It has no thread of its own: [`Progress::show`] draws, at most ten times a second.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    duration: Option<Duration>,
}

impl Progress {
    /// A line on standard error if `wanted` (see [`super::plan::Plan::progress`]), otherwise nothing.
    #[must_use]
    pub fn new(wanted: bool, colours: bool, duration: Option<Duration>) -> Self {
        // indicatif itself also draws nothing if standard error is not a terminal.
        let target = if wanted { ProgressDrawTarget::stderr_with_hz(10) } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(duration.map(millis), target);
        let template = match (colours, duration) {
            (true, Some(_)) => "{bar:20.green} {wide_msg}",
            (false, Some(_)) => "{bar:20} {wide_msg}",
            (_, None) => "{wide_msg}",
        };
        bar.set_style(ProgressStyle::with_template(template).expect("a fixed template"));
        Self { bar, duration }
    }

    /// Redraws the line.
    pub fn show(&self, numbers: &Numbers) {
        self.bar.set_position(millis(numbers.elapsed));
        self.bar.set_message(line(numbers, self.duration));
    }

    /// Prints a message above the line, or plainly if there is none.
    pub fn print(&self, message: &str) {
        if self.bar.is_hidden() {
            eprint_line(message);
        } else {
            self.bar.println(message);
        }
    }

    /// Removes the line.
    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

/// `eprintln` panics when standard error is closed; this does not.
fn eprint_line(message: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{message}");
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn line(numbers: &Numbers, duration: Option<Duration>) -> String {
    let &Numbers { elapsed, samples, processes, lost } = numbers;
    let time = match duration {
        Some(duration) => format!("{}, {} left", clock(elapsed), clock(duration.saturating_sub(elapsed))),
        None => format!("{}, Ctrl-C ends", clock(elapsed)),
    };
    let plural = if processes == 1 { "process" } else { "processes" };
    let (samples, processes, lost) = (HumanCount(samples), HumanCount(processes), HumanCount(lost));
    format!("{time} · {samples} samples · {processes} {plural} · {lost} lost")
}

/// `0:07`, `12:34`, `1:02:03`.
pub(super) fn clock(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let numbers = Numbers { elapsed: Duration::from_millis(7_900), samples: 12_345, processes: 1, lost: 0 };
        let with_end = line(&numbers, Some(Duration::from_secs(30)));
        assert_eq!(with_end, "0:07, 0:22 left · 12,345 samples · 1 process · 0 lost");
        let numbers = Numbers { elapsed: Duration::from_secs(3723), processes: 3, lost: 2, ..numbers };
        assert_eq!(line(&numbers, None), "1:02:03, Ctrl-C ends · 12,345 samples · 3 processes · 2 lost");
    }
}
