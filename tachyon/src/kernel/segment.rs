//! Cuts the counters of the timer's program at a moment of the monotonic clock ([`tachyon_common::segment`]).

use super::error::KernelError;
use super::object::Kernel;
use super::pod::Pod;
use super::waits::WaitTotals;
use crate::types::KtimeNs;
use aya::maps::PerCpuValues;
use std::time::{Duration, Instant};
use tachyon_common::event::Counters;
use tachyon_common::segment::{BANKS, CUT_AT, CUT_DUE, SELECTED};

/// A cut takes effect this long after it was requested: by then user space has announced it to every CPU.
const NOTICE: Duration = Duration::from_millis(1);
/// A kick comes after microseconds or, if its CPU goes offline, not at all.
const LONGEST_KICK: Duration = Duration::from_millis(100);
/// A run takes microseconds, and longer only while a hypervisor does not run the CPU.
const LONGEST_RUN: Duration = Duration::from_secs(2);

/// A bank of counters whose segment has ended.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cut {
    /// Which bank.
    pub bank: u32,
    /// When: runs that began before it are in [`Cut::counters`], all others are not.
    pub at: KtimeNs,
    /// Sum of that bank's counters since the object was loaded.
    pub counters: Counters,
    /// Whether a run was still under way when waiting was given up: then the counters do not balance.
    pub unsettled: bool,
    /// What became of the bank's waits since the object was loaded; `None` if waits are not wanted.
    pub waits: Option<WaitTotals>,
}

impl Kernel {
    /// The bank that runs count in now.
    #[must_use]
    pub const fn bank(&self) -> u32 {
        self.bank
    }

    /// Ends a segment: from a moment on, runs count in the other bank. Returns once no run of the old one is under way.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn cut(&mut self) -> Result<Cut, KernelError> {
        let at = KtimeNs(KtimeNs::now().0 + u64::try_from(NOTICE.as_nanos()).unwrap_or(0));
        let old = self.bank;
        self.select(CUT_AT, at.0)?;
        self.select(SELECTED, u64::from(old) | CUT_DUE)?;
        std::thread::sleep(NOTICE);
        let asked = Instant::now();
        loop {
            // A run that began just before the moment may not have counted itself yet: it does so within its first instructions.
            let due = KtimeNs::now() >= at;
            let (counters, settled) = self.bank_counters(old)?;
            let waits = self.waits(old)?;
            let are_over = waits.is_none_or(|waits| waits.are_settled()) || asked.elapsed() > LONGEST_KICK;
            if (due && settled && are_over) || asked.elapsed() > LONGEST_RUN {
                self.select(SELECTED, u64::from(old ^ 1))?;
                self.bank = old ^ 1;
                let waits = waits.map(WaitTotals::without_kicks_to_come);
                return Ok(Cut { bank: old, at, counters, unsettled: !settled, waits });
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn select(&mut self, index: u32, value: u64) -> Result<(), KernelError> {
        self.verdicts.set(index, value, 0).map_err(KernelError::map("VERDICTS"))
    }

    /// Sum of one bank's counters of all CPUs, and whether no run is under way in it. (What the hooks lost is in no bank.)
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn bank_counters(&self, bank: u32) -> Result<(Counters, bool), KernelError> {
        let per_cpu: PerCpuValues<Pod<Counters>> = self.counters.get(&bank, 0).map_err(KernelError::map("COUNTERS"))?;
        let (mut sum, mut settled) = (Counters::default(), true);
        for Pod(cpu) in per_cpu.iter() {
            add(&mut sum, cpu);
            settled &= cpu.is_settled();
        }
        Ok((sum, settled))
    }

    /// Sum of the counters of all CPUs and both banks, and of what the hooks lost.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn counters(&self) -> Result<Counters, KernelError> {
        let mut sum = Counters::default();
        for bank in 0..BANKS {
            add(&mut sum, &self.bank_counters(bank)?.0);
        }
        sum.events_lost += self.lost(0)? + self.lost(1)?;
        Ok(sum)
    }
}

/// Adds what another CPU or another bank counted.
fn add(sum: &mut Counters, more: &Counters) {
    each(sum, more, |sum, more| sum + more);
}

/// What was counted between two readings of the same bank.
#[must_use]
pub fn since(before: &Counters, now: &Counters) -> Counters {
    let mut since = *now;
    each(&mut since, before, u64::saturating_sub);
    since
}

fn each(into: &mut Counters, other: &Counters, of: impl Fn(u64, u64) -> u64) {
    let Counters {
        ran,
        idle,
        filtered,
        not_python,
        sent,
        loss,
        code_ring_full,
        codes_sent,
        events_lost,
        codes_put_off,
    } = into;
    for (into, other) in [
        (ran, other.ran),
        (idle, other.idle),
        (filtered, other.filtered),
        (not_python, other.not_python),
        (sent, other.sent),
        (code_ring_full, other.code_ring_full),
        (codes_sent, other.codes_sent),
        (codes_put_off, other.codes_put_off),
        (events_lost, other.events_lost),
    ] {
        *into = of(*into, other);
    }
    for (into, other) in loss.iter_mut().zip(other.loss) {
        *into = of(*into, other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_a_segment_are_the_difference_of_two_readings() {
        let mut before = Counters { ran: 5, idle: 2, sent: 3, ..Counters::default() };
        let mut now = Counters { ran: 12, idle: 4, sent: 7, events_lost: 1, ..Counters::default() };
        (before.loss[1], now.loss[1]) = (1, 4);
        let since = since(&before, &now);
        assert_eq!((since.ran, since.idle, since.sent, since.loss[1], since.events_lost), (7, 2, 4, 3, 1));
        let mut sum = before;
        add(&mut sum, &since);
        assert_eq!(sum, now);
    }
}
