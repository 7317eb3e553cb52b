//! Where the rows of a segment go: `TABLE/date=…/hour=…/service=…/HOST-START-SEQ.parquet`.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use std::time::{Duration, SystemTime};

/// Characters that are escaped. Hive's layout needs `=`, `/` and `%` escaped; others might not be safe in a shell.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'.').remove(b'_').remove(b'-');
/// Most bytes of a part: file systems allow 255, and a part contains more than a name.
const LONGEST: usize = 200;
/// Hive's name for "no value": the loss of a host belongs to no service. Engines read it as NULL.
pub const NO_SERVICE: &str = "__HIVE_DEFAULT_PARTITION__";
/// The last second of the year 9999, in which calendars of engines end.
const LAST_MS: i64 = 253_402_300_799_000;

/// A text as a part of a path.
#[must_use]
pub fn part(text: &str) -> String {
    let mut encoded = String::new();
    for character in text.chars() {
        let before = encoded.len();
        encoded.extend(utf8_percent_encode(character.encode_utf8(&mut [0; 4]), ESCAPED));
        if encoded.len() > LONGEST {
            encoded.truncate(before);
            break;
        }
    }
    encoded
}

/// Whether a [`part`] certainly contains its whole text: one more character would have fitted.
#[must_use]
pub fn is_whole(part: &str) -> bool {
    part.len() <= LONGEST - 3 * char::MAX_LEN_UTF8
}

/// The directory of an hour and a [`part`] that names a service, below its table.
#[must_use]
pub fn directory(slice_start_ms: i64, service: &str) -> String {
    format!("{}/service={service}", hour(slice_start_ms))
}

/// The directory of an hour.
#[must_use]
pub fn hour(ms: i64) -> String {
    let time = rfc3339(ms);
    format!("date={}/hour={}", &time[..10], &time[11..13])
}

/// `HOST-START-SEQ` of a segment: its file's own name, if it has that form; for other recordings START is their start, and
/// SEQ their name.
#[must_use]
pub fn segment_name(stem: &str, host: &str, start_ms: i64) -> String {
    if is_segment(stem) {
        return part(stem);
    }
    let start = rfc3339(start_ms).replace(['-', ':'], "");
    let host = if host.is_empty() { "unknown" } else { host };
    part(&format!("{host}-{start}-{stem}"))
}

/// Whether a file without its ending is named `HOST-20261122T190113Z-000042`.
pub(crate) fn is_segment(stem: &str) -> bool {
    let digits = |text: &str, len| text.len() >= len && text.bytes().all(|byte| byte.is_ascii_digit());
    let parts = || {
        let (rest, sequence) = stem.rsplit_once('-')?;
        let (host, start) = rest.rsplit_once('-')?;
        let (date, time) = start.strip_suffix('Z')?.split_once('T')?;
        let fits = digits(sequence, 6) && digits(date, 8) && digits(time, 6) && date.len() == 8 && time.len() == 6;
        Some(fits && !host.is_empty())
    };
    parts().unwrap_or(false)
}

/// Seconds since 1970 as milliseconds; `None`: not a date in the calendar.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "it is compared with the calendar's end first")]
pub fn milliseconds(unix: f64) -> Option<i64> {
    let ms = (unix * 1e3).round();
    (0.0..=LAST_MS as f64).contains(&ms).then_some(ms as i64)
}

/// A moment of the calendar; later ones become its end.
fn rfc3339(ms: i64) -> String {
    let since = Duration::from_millis(ms.clamp(0, LAST_MS).unsigned_abs());
    humantime::format_rfc3339_seconds(SystemTime::UNIX_EPOCH + since).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_paths_are_plain() {
        for (text, expected) in [
            ("app.py", "app.py"),
            ("my shop/ü", "my%20shop%2F%C3%BC"),
            ("a=b%", "a%3Db%25"),
            ("\n\u{1b}[2J", "%0A%1B%5B2J"),
        ] {
            assert_eq!(part(text), expected);
        }
        let long = part(&"ü".repeat(100));
        assert_eq!(long, "%C3%BC".repeat(33), "no character is cut in two");
    }

    #[test]
    fn hours_and_names() {
        assert_eq!(directory(1_795_374_073_123, "web"), "date=2026-11-22/hour=19/service=web");
        for (stem, expected) in [
            ("h-20261122T190113Z-000042", "h-20261122T190113Z-000042"),
            ("a-b.c-20261122T190113Z-1000042", "a-b.c-20261122T190113Z-1000042"),
            ("app", "h-20261122T190113Z-app"),
            ("20261122T190113Z-000042", "h-20261122T190113Z-20261122T190113Z-000042"),
            ("h-20261122T190113Z-42", "h-20261122T190113Z-h-20261122T190113Z-42"),
            ("h-20261122T1901é3Z-000042", "h-20261122T190113Z-h-20261122T1901%C3%A93Z-000042"),
        ] {
            assert_eq!(segment_name(stem, "h", 1_795_374_073_123), expected);
        }
    }

    #[test]
    fn what_is_no_date_is_found() {
        for unix in [f64::NAN, f64::INFINITY, -1.0, 1e300, 253_402_300_800.0] {
            assert_eq!(milliseconds(unix), None, "{unix}");
        }
        assert_eq!(milliseconds(1.5), Some(1500));
        assert_eq!(rfc3339(i64::MAX), "9999-12-31T23:59:59Z");
    }
}
