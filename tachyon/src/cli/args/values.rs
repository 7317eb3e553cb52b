//! Values of options: what their text may be, and the message for an invalid text.

use crate::analysis::live::HISTORY;
use crate::cli::plan::Keep;
use crate::types::Pid;
use std::time::Duration;

/// Most samples per second: at 10 kHz one sample of 10 µs is a tenth of the program's time.
const MAX_RATE_HZ: u32 = 10_000;
const MIN_INTERVAL: Duration = Duration::from_micros(100);
/// Shortest `--rotate`.
const MIN_SEGMENT: Duration = Duration::from_millis(100);
/// Limits for `top`: updates more frequent than this are unreadable, and rarer ones are not a live view.
const MIN_DELAY: Duration = Duration::from_millis(100);
const MAX_DELAY: Duration = Duration::from_secs(3600);
const MAX_INTERVAL: Duration = Duration::from_secs(1);
/// Longest `--duration`: far beyond any use, and safe to add to a clock.
const MAX_DURATION: Duration = Duration::from_secs(366 * 24 * 3600);

pub(in crate::cli) fn pid(text: &str) -> Result<Pid, String> {
    match text.parse::<i32>() {
        Ok(pid @ 1..) => Ok(Pid(pid.unsigned_abs())),
        _ => Err("a pid is a number from 1, as `ps` shows it".to_owned()),
    }
}

fn time(text: &str, example: &str) -> Result<Duration, String> {
    if let Ok(number) = text.trim().parse::<f64>() {
        return Err(if number < 0.0 {
            format!("a time is positive, e.g. {example}")
        } else {
            format!("it has no unit, write e.g. {example}")
        });
    }
    humantime::parse_duration(text).map_err(|error| format!("{error}, write e.g. {example}"))
}

pub(in crate::cli) fn duration(text: &str) -> Result<Duration, String> {
    if text.trim() == "0" {
        return Err("must be longer than 0, leave it out to record until Ctrl-C".to_owned());
    }
    match time(text, "30s, 500ms or 5m")? {
        Duration::ZERO => Err("must be longer than 0, leave it out to record until Ctrl-C".to_owned()),
        duration if duration > MAX_DURATION => {
            Err("longer than a year, leave it out to record until Ctrl-C".to_owned())
        }
        duration => Ok(duration),
    }
}

/// Time between two updates of a live view.
pub(in crate::cli) fn delay(text: &str) -> Result<Duration, String> {
    let delay = time(text, "2s or 500ms")?;
    if (MIN_DELAY..=MAX_DELAY).contains(&delay) { Ok(delay) } else { Err("must be 100ms to 1h".to_owned()) }
}

/// The sliding window of a live view.
pub(in crate::cli) fn window(text: &str) -> Result<Duration, String> {
    let window = time(text, "10s or 1m")?;
    if (MIN_DELAY..=HISTORY).contains(&window) { Ok(window) } else { Err("must be 100ms to 1m".to_owned()) }
}

/// A time after a recording's start.
pub(in crate::cli) fn moment(text: &str) -> Result<Duration, String> {
    if text.trim() == "0" { Ok(Duration::ZERO) } else { time(text, "10s, 500ms or 1m") }
}

pub(in crate::cli) fn frequency(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(rate @ 1..=MAX_RATE_HZ) => Ok(rate),
        Ok(0) => Err("must be 1 to 10000 Hz: with 0 there are no samples".to_owned()),
        _ if text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty() => {
            Err("must be 1 to 10000 Hz: above, sampling would take more than a tenth of the program's time".to_owned())
        }
        _ => Err("must be a whole number from 1 to 10000, in Hz; for fractions use --interval".to_owned()),
    }
}

pub(in crate::cli) fn interval(text: &str) -> Result<Duration, String> {
    let interval = time(text, "10ms or 500us")?;
    if interval < MIN_INTERVAL {
        Err("must be 100us to 1s: below, sampling would take more than a tenth of the program's time".to_owned())
    } else if interval > MAX_INTERVAL {
        Err("must be 100us to 1s: rarer samples say nothing".to_owned())
    } else {
        Ok(interval)
    }
}

/// Length of a segment.
pub(in crate::cli) fn rotation(text: &str) -> Result<Duration, String> {
    let length = time(text, "60s or 5m")?;
    if (MIN_SEGMENT..=MAX_DURATION).contains(&length) {
        Ok(length)
    } else {
        Err("must be 100ms at least: a segment costs some milliseconds".to_owned())
    }
}

/// The name of a variable of the environment.
pub(in crate::cli) fn variable(text: &str) -> Result<String, String> {
    if let Some((name, _)) = text.split_once('=') {
        return Err(format!("a label has each process's own value, write --label-env {name}"));
    }
    if text.is_empty() || text.chars().any(char::is_control) {
        Err("must be a name, e.g. SLURM_JOB_ID".to_owned())
    } else {
        Ok(text.to_owned())
    }
}

/// Which segments are kept: by size or age.
pub(in crate::cli) fn keep(text: &str) -> Result<Keep, String> {
    const HELP: &str = "must be a size or an age with its unit, such as 2GiB or 7d";
    if text.parse::<f64>().is_ok() {
        return Err(HELP.to_owned());
    }
    // Both parsers accept `30m` and `30M`: the one means minutes, the other megabytes.
    let age = humantime::parse_duration(text).ok().filter(|age| *age > Duration::ZERO);
    let size = text.parse::<bytesize::ByteSize>().ok().map(|size| size.as_u64()).filter(|size| *size > 0);
    match (age, size) {
        (Some(age), None) => Ok(Keep::Age(age)),
        (Some(age), Some(_)) if !text.contains(|c: char| c.is_ascii_uppercase()) => Ok(Keep::Age(age)),
        (_, Some(size)) => Ok(Keep::Bytes(size)),
        (None, None) => Err(HELP.to_owned()),
    }
}

/// Bytes for unwind tables, whole pages of them.
pub(in crate::cli) fn unwind_memory(text: &str) -> Result<u32, String> {
    const MIN: u64 = 1 << 20;
    const MAX: u64 = 1 << 30;
    match text.parse::<bytesize::ByteSize>() {
        Ok(size) if (MIN..=MAX).contains(&size.as_u64()) => {
            u32::try_from(size.as_u64() & !0xfff).map_err(|error| error.to_string())
        }
        _ => Err("must be 1MiB to 1GiB, e.g. 64MiB".to_owned()),
    }
}

/// Smallest `--max-memory`: below this, the program and its maps alone would exceed it.
const MIN_MEMORY: u64 = 32 << 20;

/// Bytes from a number with a unit.
pub(in crate::cli) fn memory(text: &str) -> Result<u64, String> {
    match text.parse::<bytesize::ByteSize>() {
        Ok(size) if size.as_u64() >= MIN_MEMORY => Ok(size.as_u64()),
        Ok(_) => Err("must be 32MiB at least: the program and its maps need nearly as much".to_owned()),
        Err(_) => Err("must be a number of bytes with a unit, such as 128MiB or 1GiB".to_owned()),
    }
}

/// A share of one core from a percentage.
pub(in crate::cli) fn share(text: &str) -> Result<f64, String> {
    match text.strip_suffix('%').unwrap_or(text).trim_end().parse::<f64>() {
        Ok(percent) if (0.01..=10_000.0).contains(&percent) => Ok(percent / 100.0),
        _ => Err("must be a number of percent of one core, 0.01 to 10000, such as 1 or 0.5%".to_owned()),
    }
}
