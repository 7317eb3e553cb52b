//! How many stacks of waits a CPU takes at most.

use crate::maps::Waiting;
use crate::verdicts;
use tachyon_common::limits::{MAX_WAITS_A_TENTH, WAITS_A_TENTH};
use tachyon_common::wait::{self, SeenThread};

/// A tenth of a second, nanoseconds: for so long stacks are counted.
pub const TENTH: u64 = 100_000_000;

/// Whether this CPU has taken as many stacks lately as it may at most. Before that, threads that begin to wait get longer periods.
#[inline(always)]
pub fn is_too_much(waiting: &mut Waiting, seen: &SeenThread, wait_ns: u64, now: u64) -> bool {
    if waiting.tenth != now / TENTH {
        waiting.tenth = now / TENTH;
        waiting.stacks = 0;
        waiting.foreseen = 0;
        relax(now);
    }
    waiting.stacks += 1;
    let widening = verdicts::word(wait::WIDENING) as u32;
    waiting.foreseen += wait::foreseen(verdicts::word(wait::PERIOD), (seen.widening, widening), wait_ns);
    if waiting.foreseen >= WAITS_A_TENTH / 2 * wait::ONE_STACK {
        verdicts::set_word(wait::BUSY_AT, now);
    }
    if waiting.foreseen > WAITS_A_TENTH * wait::ONE_STACK {
        widen(now);
    }
    waiting.stacks > MAX_WAITS_A_TENTH
}

/// Doubles the periods of waits that begin from now on, at most once in a tenth of a second.
#[inline(always)]
fn widen(now: u64) {
    let widening = verdicts::word(wait::WIDENING);
    if widening < u64::from(wait::MAX_WIDENING) && now.wrapping_sub(verdicts::word(wait::WIDENED_AT)) >= TENTH {
        verdicts::set_word(wait::WIDENED_AT, now);
        verdicts::set_word(wait::WIDENING, widening + 1);
    }
}

/// Halves them when no CPU has taken half as many stacks as it may for a second.
#[inline(always)]
fn relax(now: u64) {
    let widening = verdicts::word(wait::WIDENING);
    let since = |word| now.wrapping_sub(verdicts::word(word));
    if widening > 0 && since(wait::BUSY_AT) >= 10 * TENTH && since(wait::WIDENED_AT) >= 10 * TENTH {
        verdicts::set_word(wait::WIDENED_AT, now);
        verdicts::set_word(wait::WIDENING, widening - 1);
    }
}
