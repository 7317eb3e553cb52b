//! Which of two banks of counters a run counts in: how a recording is cut without a gap.
//!
//! A segment ends at a moment of the monotonic clock. Runs that begin before it count in one bank, those that begin at or
//! after it in the other, and each record says which; so a segment's counters and its samples belong together to the unit,
//! though nothing is detached. User space writes the moment first ([`CUT_AT`]), then says that a cut is due
//! ([`SELECTED`]), waits until no run of the old bank is left, and selects the other bank for good.

use crate::event::Counters;

/// Banks of counters.
pub const BANKS: u32 = 2;
/// The first bank of waits: each bank has one of waits behind it, which counts ticks.
pub const WAIT_BANKS: u32 = BANKS;
/// Banks, those of waits included.
pub const ALL_BANKS: u32 = 2 * BANKS;
/// Index in the `VERDICTS` map of what selects a bank: the number of the bank in the lowest bit, and [`CUT_DUE`]. It lies
/// beside the counts of changes, which every run reads too: one line of the cache for all of them.
pub const SELECTED: u32 = 2;
/// Index in the `VERDICTS` map of the moment of the cut, nanoseconds of `CLOCK_MONOTONIC`.
pub const CUT_AT: u32 = 3;
/// Bit of [`SELECTED`]: runs from [`CUT_AT`] on count in the other bank. Both bits lie in one byte, which no writer tears.
pub const CUT_DUE: u64 = 2;

/// The bank of a run that begins now. `moment` gives [`CUT_AT`] and the time; it is asked only while a cut is due.
#[inline(always)]
#[must_use]
pub fn bank(selected: u64, moment: impl FnOnce() -> (u64, u64)) -> u32 {
    // A branch, and the compiler is not to make a number of it: the processor predicts it, and fetches the counters while the word is
    // still on its way from memory. An index computed from the word would have to wait for one cache line after the other, a tenth of
    // the time of a run that finds nothing selected.
    let bank = if selected & 1 == 0 { 0 } else { core::hint::black_box(1) };
    if selected & CUT_DUE == 0 {
        return bank;
    }
    let (cut_at, now) = moment();
    if now >= cut_at { bank ^ 1 } else { bank }
}

impl Counters {
    /// Runs that have come to an end.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.idle + self.filtered + self.not_python + self.sent + self.loss.iter().sum::<u64>()
    }

    /// Whether no run of these counters (of one CPU, in one bank) is under way: a run counts itself first and its end last.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.ran == self.ended()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_decides_while_a_cut_is_due() {
        for (selected, cut_at, now, expected) in [
            (0, 0, 9, 0),
            (1, 0, 9, 1),
            (CUT_DUE, 10, 9, 0),
            (CUT_DUE, 10, 10, 1),
            (CUT_DUE | 1, 10, 9, 1),
            (CUT_DUE | 1, 10, 11, 0),
        ] {
            assert_eq!(bank(selected, || (cut_at, now)), expected, "{selected} {cut_at} {now}");
        }
        assert_eq!(bank(1, || unreachable!("no cut is due")), 1);
    }

    #[test]
    fn a_run_is_under_way_until_it_has_counted_its_end() {
        let mut counters = Counters { ran: 3, idle: 1, sent: 1, ..Counters::default() };
        assert!(!counters.is_settled());
        counters.loss[2] += 1;
        assert!(counters.is_settled());
    }
}
