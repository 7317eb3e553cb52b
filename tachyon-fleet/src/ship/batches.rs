//! Which segments a backend gets as one batch: those of a recorder whose times fall into the same part of the day.
//!
//! A batch is due once its recorder has a later one, or when a while has passed since its end. A batch that was begun keeps its name.

use super::progress::Sending;
use super::spool::Item;
use std::collections::BTreeMap;
use std::time::{Duration, UNIX_EPOCH};

/// A batch that nothing follows is complete this long after its end.
const GRACE_S: f64 = 150.0;

/// Segments grouped into batches, and how many wait for others of their period. Without a `length` each is shipped separately.
pub(super) fn batches(pending: Vec<Item>, length: Option<Duration>, now_unix: f64) -> (Vec<Vec<Item>>, usize) {
    let Some(length) = length else {
        return (pending.into_iter().map(|item| vec![item]).collect(), 0);
    };
    let length_s = length.as_secs_f64();
    let window = |item: &Item| window(item, length_s);
    let mut latest: BTreeMap<String, f64> = BTreeMap::new();
    for item in &pending {
        if let Some(recorder) = recorder(item) {
            let latest = latest.entry(recorder.to_owned()).or_insert(0.0);
            *latest = latest.max(window(item));
        }
    }
    let mut batches: Vec<Vec<Item>> = Vec::new();
    for item in pending {
        let joins = batches.iter_mut().rev().find(|batch| {
            let first = &batch[0];
            item.recorder.is_some() && recorder(first) == recorder(&item) && window(first) == window(&item)
        });
        match joins {
            Some(batch) => batch.push(item),
            None => batches.push(vec![item]),
        }
    }
    let is_due = |batch: &Vec<Item>| {
        let first = &batch[0];
        let Some(recorder) = recorder(first) else { return true };
        let is_followed = latest.get(recorder).is_some_and(|latest| *latest > window(first));
        is_followed || now_unix > (window(first) + 1.0) * length_s + GRACE_S
    };
    let (due, not_due): (Vec<_>, Vec<_>) = batches.into_iter().partition(is_due);
    (due, not_due.iter().map(Vec::len).sum())
}

/// When a batch's period begins, seconds since 1970. `None`: it is a single segment.
#[expect(clippy::cast_possible_truncation, reason = "times of files are far from a number's ends")]
pub(super) fn begins_unix(items: &[Item], length: Option<Duration>) -> Option<i64> {
    let length_s = length?.as_secs_f64();
    let first = items.first().filter(|first| first.recorder.is_some())?;
    Some((window(first, length_s) * length_s) as i64)
}

/// The segment that this batch was named after when it was begun, if it is being sent. That segment may be gone, but under another name the
/// batch would be stored beside what has arrived instead of replacing it.
pub(super) fn begun(items: &[Item], length: Option<Duration>, sending: Option<&Sending>) -> Option<String> {
    let begins_unix = begins_unix(items, length)?;
    let sending = sending.filter(|sending| sending.window == Some(begins_unix))?;
    let was = Item::of_name(&sending.segment, 0, UNIX_EPOCH);
    (recorder(&was).is_some() && recorder(&was) == recorder(&items[0])).then(|| sending.segment.clone())
}

/// The recorder of a segment.
fn recorder(item: &Item) -> Option<&str> {
    item.recorder.as_ref().map(|(recorder, _)| recorder.as_str())
}

/// The number of a batch's period.
fn window(item: &Item, length_s: f64) -> f64 {
    (item.modified_unix / length_s).floor()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Option<Duration> = Some(Duration::from_secs(3600));

    /// A segment of recorder `a` or `b`, with its number and the time it was written.
    fn item(host: char, number: u64, unix: u64) -> Item {
        let modified = UNIX_EPOCH + Duration::from_secs(unix);
        Item::of_name(&format!("{host}-20261122T190113Z-{number:06}.tach"), 1, modified)
    }

    fn numbers(batches: &[Vec<Item>]) -> Vec<Vec<u64>> {
        let number = |item: &Item| item.recorder.as_ref().unwrap().1;
        batches.iter().map(|batch| batch.iter().map(number).collect()).collect()
    }

    #[test]
    fn a_batch_is_due_when_another_follows_or_nothing_came_for_a_while() {
        // Two of `a`'s first hour and one of its second; between them one of `b`'s first hour.
        let pending = || vec![item('a', 0, 10), item('b', 7, 20), item('a', 1, 3599), item('a', 2, 3600)];
        for (length, now_unix, due, not_due) in [
            (None, 3600.0, vec![vec![0], vec![7], vec![1], vec![2]], 0),
            (HOUR, 3600.0, vec![vec![0, 1]], 2),
            (HOUR, 3600.0 + GRACE_S, vec![vec![0, 1]], 2),
            (HOUR, 3601.0 + GRACE_S, vec![vec![0, 1], vec![7]], 1),
            (HOUR, 7201.0 + GRACE_S, vec![vec![0, 1], vec![7], vec![2]], 0),
        ] {
            let (batches, waiting) = batches(pending(), length, now_unix);
            assert_eq!((numbers(&batches), waiting), (due, not_due), "{length:?} {now_unix}");
        }
    }

    #[test]
    fn what_was_begun_keeps_its_name() {
        let name = "a-20261122T190113Z-000000.tach";
        let sending = |window| Sending { segment: name.to_owned(), parts: 1, of: 2, doubtful: false, window };
        for (items, length, window, expected) in [
            // The first of them is gone, and the batch is the same.
            (vec![item('a', 1, 3700)], HOUR, Some(3600), Some(name)),
            (vec![item('a', 1, 3700)], HOUR, Some(0), None),
            (vec![item('b', 1, 3700)], HOUR, Some(3600), None),
            (vec![item('a', 1, 3700)], None, None, None),
        ] {
            assert_eq!(begun(&items, length, Some(&sending(window))).as_deref(), expected, "{items:?}");
        }
        assert_eq!(begun(&[item('a', 1, 3700)], HOUR, None), None);
    }
}
