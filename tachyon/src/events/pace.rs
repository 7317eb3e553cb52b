//! How soon the ring is read again: a wake-up for each sample would cost more than the samples do, but with each delay a name
//! may be gone.

use super::reader::kind_and_bank;
use std::mem::offset_of;
use std::time::{Duration, Instant};
use tachyon_common::event::{RawFrame, SampleRecord, kind};
use tachyon_common::stop::StopReason;

/// How often the ring is read while samples meet nothing new. Together with the stages after the reader, this is what a
/// killed recording loses: less than its last second.
const CALM: Duration = Duration::from_millis(800);

/// The same while they meet new threads and code objects: their names are read from processes that may not live long.
const PROMPT: Duration = Duration::from_millis(200);
/// How long something new makes the reader read sooner.
const PROMPT_FOR: Duration = Duration::from_secs(5);

/// The same while samples meet code whose unwind rules are not made yet: the sooner the ring is read, the fewer samples are cut
/// there. Of a page that was met before this is known, and it may never have any: the file's rules make no sense, or there was no
/// room for their table.
const BRISK: Duration = Duration::from_millis(20);
/// How long such a sample makes the reader read sooner: more such code often follows, so it reads again after this long, and then
/// each time when twice as much has passed.
const BRISK_FOR: Duration = Duration::from_millis(500);
/// How long this is done at the beginning: nothing that samples first meet has rules, and a short program is over by then.
const BEGINNING: Duration = Duration::from_secs(1);

/// Number of slots for threads that have been met, and for pages of code without rules; if two share a slot, each counts as new again
/// and again.
const SLOTS: usize = 1 << 10;

/// What no page is smaller than, as a power of two.
const PAGE_BITS: u32 = 12;

/// What was met, and how soon that makes the reader read again.
#[derive(Debug)]
pub(super) struct Pace {
    /// Thread ids, each in the slot that follows from the id.
    threads: Box<[u32]>,
    /// Pages in which a walk found no rules, each in the slot that follows from the process and the page.
    pages: Box<[u64]>,
    begun: Instant,
    /// When something new was last met, and when code without rules was that is new.
    new: Instant,
    without_rules: Option<Instant>,
    now: Instant,
}

impl Pace {
    /// Starts with everything counting as new.
    pub fn new(now: Instant) -> Self {
        let (threads, pages) = (vec![0; SLOTS].into(), vec![0; SLOTS].into());
        Self { threads, pages, begun: now, new: now, without_rules: None, now }
    }

    /// A read of the ring begins.
    pub fn look(&mut self, now: Instant) {
        self.now = now;
    }

    /// It met a record.
    pub fn meet(&mut self, record: &[u8]) {
        let word =
            |at: usize| record.get(at..).and_then(|bytes| bytes.first_chunk()).map(|word| u32::from_ne_bytes(*word));
        match kind_and_bank(record) {
            Some((kind::SAMPLE | kind::WAIT, _)) => {
                let tid = word(offset_of!(SampleRecord, tid)).unwrap_or(0);
                let place = &mut self.threads[tid as usize % SLOTS];
                if std::mem::replace(place, tid) != tid {
                    self.new = self.now;
                }
                let native_stop = record.get(offset_of!(SampleRecord, native_stop));
                if native_stop == Some(&(StopReason::NoUnwindTables as u8)) {
                    let tgid = word(offset_of!(SampleRecord, tgid)).unwrap_or(0);
                    let place = page_of(tgid, outermost_address(record).unwrap_or(0));
                    let known = &mut self.pages[(place >> 32) as usize % SLOTS];
                    if std::mem::replace(known, place) != place {
                        self.without_rules = Some(self.now);
                    }
                }
            }
            Some((kind::CODE, _)) => self.new = self.now,
            _ => {}
        }
    }

    /// How long after this read the next one is due.
    pub fn wait(&self) -> Duration {
        let passed = |since: Instant| self.now.saturating_duration_since(since);
        let without_rules = self.without_rules.map(passed).filter(|passed| *passed < BRISK_FOR);
        if passed(self.begun) < BEGINNING {
            BRISK
        } else if let Some(passed) = without_rules {
            passed.max(BRISK)
        } else if passed(self.new) < PROMPT_FOR {
            PROMPT
        } else {
            CALM
        }
    }
}

/// The address at which the walk of a sample's native stack ended.
fn outermost_address(record: &[u8]) -> Option<u64> {
    let count = |at: usize| Some(usize::from(u16::from_ne_bytes(*record.get(at..)?.first_chunk()?)));
    let python = count(offset_of!(SampleRecord, python_frames))? * size_of::<RawFrame>();
    let last = count(offset_of!(SampleRecord, native_frames))?.checked_sub(1)? * size_of::<u64>();
    let address = record.get(size_of::<SampleRecord>() + python + last..)?.first_chunk()?;
    Some(u64::from_ne_bytes(*address))
}

/// A process's page, mixed into a number that is not 0 for any.
fn page_of(tgid: u32, address: u64) -> u64 {
    // An odd factor loses nothing (2^64 divided by the golden ratio).
    ((address >> PAGE_BITS) ^ u64::from(tgid) << 52).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use tachyon_common::event::RecordHeader;

    fn sample(tid: u32, native_stop: StopReason) -> Vec<u8> {
        let mut bytes = vec![0; size_of::<SampleRecord>()];
        bytes[offset_of!(RecordHeader, kind)..][..2].copy_from_slice(&kind::SAMPLE.to_ne_bytes());
        bytes[offset_of!(SampleRecord, tid)..][..4].copy_from_slice(&tid.to_ne_bytes());
        bytes[offset_of!(SampleRecord, native_stop)] = native_stop as u8;
        bytes
    }

    /// A sample of thread 7 whose native stack ends at this address, for want of rules.
    fn cut_at(address: u64) -> Vec<u8> {
        let mut bytes = sample(7, StopReason::NoUnwindTables);
        bytes[offset_of!(SampleRecord, python_frames)] = 1;
        bytes[offset_of!(SampleRecord, native_frames)] = 2;
        bytes.extend([0xff; size_of::<RawFrame>()]);
        bytes.extend([1_u64, address].map(u64::to_ne_bytes).as_flattened());
        bytes
    }

    #[test]
    fn what_is_new_is_looked_at_sooner() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let mut wait = |seconds: f64, records: &[Vec<u8>]| {
            pace.look(start + Duration::from_secs_f64(seconds));
            records.iter().for_each(|record| pace.meet(record));
            pace.wait()
        };
        let known = sample(7, StopReason::Complete);
        let code = [kind::CODE.to_ne_bytes().to_vec(), vec![0; 60]].concat();
        for (line, (seconds, records, expected)) in [
            (0.0, vec![], BRISK),
            (0.9, vec![known.clone()], BRISK),
            (1.2, vec![known.clone()], PROMPT),
            (5.8, vec![known.clone()], PROMPT),
            (5.95, vec![known.clone()], CALM),
            (6.0, vec![known.clone(), sample(8, StopReason::Complete)], PROMPT),
            (10.0, vec![known.clone(), sample(8, StopReason::Complete)], PROMPT),
            (11.1, vec![known.clone()], CALM),
            (12.0, vec![code], PROMPT),
            (18.0, vec![], CALM),
            // Unknown code is read soonest, until it is known that it has no rules.
            (19.0, vec![cut_at(0x7f00_0000_1010)], BRISK),
            (19.02, vec![known.clone()], BRISK),
            (19.125, vec![known.clone()], Duration::from_millis(125)),
            (19.25, vec![known.clone()], Duration::from_millis(250)),
            (19.6, vec![known], CALM),
            (19.7, vec![cut_at(0x7f00_0000_1fff)], CALM),
            (19.8, vec![cut_at(0x7f00_0000_2000)], BRISK),
            (20.4, vec![cut_at(0x7f00_0000_1010), cut_at(0x7f00_0000_2000)], CALM),
            (20.5, vec![sample(7, StopReason::NoUnwindTables)], BRISK),
            // A malformed record has nothing new.
            (21.1, vec![vec![1]], CALM),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(wait(seconds, &records), expected, "line {line}");
        }
    }
}
