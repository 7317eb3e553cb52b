//! Turns kernel addresses of samples into frames of the profile.

use crate::events::Frames;
use crate::profile::{FrameId, Profile};
use crate::symbolize::KernelSymbols;
use std::collections::HashMap;

/// Names the kernel's frames.
pub(in crate::recording) struct KernelFrames {
    symbols: KernelSymbols,
    known: HashMap<u64, FrameId>,
    ids: Vec<FrameId>,
}

impl KernelFrames {
    /// Knows these functions.
    pub fn new(symbols: KernelSymbols) -> Self {
        Self { symbols, known: HashMap::new(), ids: Vec::new() }
    }

    /// A new profile begins, with no frames yet.
    pub fn begin_profile(&mut self) {
        self.known.clear();
    }

    /// The kernel's frames of a sample, leaf first; for a wait, from where the scheduler was called.
    pub fn of(&mut self, profile: &mut Profile, frames: Frames<'_>, waits: bool) -> &[FrameId] {
        self.ids.clear();
        let name = |address: u64| self.symbols.name(address.wrapping_sub(1));
        let above = if waits { above_the_wait(frames.kernel().map(name)) } else { 0 };
        for (at, address) in frames.kernel().enumerate().skip(above) {
            // A caller's address is its return address; the call may have been its last instruction.
            let address = if at == 0 { address } else { address.wrapping_sub(1) };
            let symbols = &self.symbols;
            let id = *self.known.entry(address).or_insert_with(|| match symbols.name(address) {
                Some(name) => profile.special_frame(&format!("[k] {name}")),
                // One frame for all: without names an address tells nobody anything.
                None => profile.special_frame("[k] <unknown>"),
            });
            self.ids.push(id);
        }
        &self.ids
    }
}

/// How many of the functions, leaf first, belong to the switch itself or to an interrupt that came on top.
pub(in crate::recording) fn above_the_wait<'a>(names: impl Iterator<Item = Option<&'a str>>) -> usize {
    // Interrupts go no deeper.
    const LOOKED_AT: usize = 24;
    let is_scheduler = |name: &str| {
        let name = name.split('.').next().unwrap_or(name);
        SCHEDULER.contains(&name)
    };
    let scheduler = names.take(LOOKED_AT).map(|name| name.is_some_and(is_scheduler));
    scheduler.zip(1..).filter_map(|(is, count)| is.then_some(count)).last().unwrap_or(0)
}

/// Functions that change the running thread (`kernel/sched/core.c`).
const SCHEDULER: [&str; 10] = [
    "finish_task_switch",
    "__switch_to_asm",
    "__schedule",
    "__schedule_loop",
    "schedule",
    "schedule_preempt_disabled",
    "preempt_schedule",
    "preempt_schedule_common",
    "preempt_schedule_irq",
    "preempt_schedule_notrace",
];

#[cfg(test)]
mod tests {
    use super::above_the_wait;

    #[test]
    fn a_wait_is_shown_from_where_it_begins() {
        let above = |names: &[&'static str]| above_the_wait(names.iter().map(|name| Some(*name)));
        let kicked = [
            "irq_work_run",
            "__sysvec_irq_work",
            "finish_task_switch.isra.0",
            "__schedule",
            "schedule",
            "futex_do_wait",
        ];
        assert_eq!(above(&kicked), 5);
        assert_eq!(above(&["futex_do_wait", "do_futex"]), 0);
        assert_eq!(above(&[]), 0);
        assert_eq!(above_the_wait([None, None].into_iter()), 0);
    }
}
