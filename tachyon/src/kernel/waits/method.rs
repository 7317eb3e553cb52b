//! Where the stacks of waiting threads are taken. Whether a kick meets its thread is first tried out on every CPU.
//!
//! Nothing guarantees that the interrupt comes at once. If it does not (in an emulator, or with a kernel that does such work in
//! a thread), stacks are taken when threads leave their CPUs.

use super::super::error::{KernelError, program_error};
use super::super::object::Kernel;
use super::super::options::Options;
use super::super::programs::{load_programs, tracepoint};
use super::{INTERRUPT, KICK, WAKE, Waits};
use aya::Ebpf;
use aya::programs::{RawTracePointRunOptions, TestRun as _};
use std::time::{Duration, Instant};
use tachyon_common::wait::{METHOD, method};

/// The program that the kicks are tried out with.
pub(in crate::kernel) const TRY: &str = "try_kick";

/// Kicks that are tried on each CPU.
const TRIES: u64 = 3;
/// How often all of that is tried.
const ATTEMPTS: u32 = 2;
/// A kick comes after microseconds, or once a guest's virtual CPU has its turn again.
const PATIENCE: Duration = Duration::from_millis(100);

/// Where the stacks of waiting threads are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WaitMethod {
    /// When the wait is over, by an interrupt that meets the thread before it goes on.
    #[default]
    Kick,
    /// When the wait begins, for some waits that stand for all.
    SwitchOut,
}

impl WaitMethod {
    /// Its name in accounts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kick => "kick",
            Self::SwitchOut => "switch_out",
        }
    }
}

/// What a recording of waits would use here: only the two programs for the try are loaded.
///
/// # Errors
/// When the kernel lacks something or refuses.
pub fn wait_method() -> Result<WaitMethod, KernelError> {
    let options = Options { waits: Waits::Alone, ..Options::default() };
    let mut kernel = Kernel::open(&options)?;
    load_programs(kernel.ebpf.as_mut().ok_or(KernelError::Verifying)?, &[TRY, KICK])?;
    let works = kernel.attach_wait_program(KICK, INTERRUPT).is_ok() && kernel.kicks_are_met();
    Ok(if works { WaitMethod::Kick } else { WaitMethod::SwitchOut })
}

/// `TACHYON_WAIT_METHOD`: to test the other method.
fn asked() -> Option<WaitMethod> {
    let asked = std::env::var("TACHYON_WAIT_METHOD").ok()?;
    [WaitMethod::Kick, WaitMethod::SwitchOut].into_iter().find(|method| method.name() == asked)
}

impl Kernel {
    /// Attaches what waits need but the hook that finds them, and tries out the kick. Returns the method that is used from then on.
    pub(super) fn prepare_wait_programs(&mut self) -> Result<WaitMethod, KernelError> {
        let kicked = self.attach_wait_program(KICK, INTERRUPT);
        let works = kicked.is_ok() && self.kicks_are_met();
        let method = asked().unwrap_or(if works { WaitMethod::Kick } else { WaitMethod::SwitchOut });
        if method == WaitMethod::Kick {
            // If the kick was asked for, its failure is the error.
            kicked?;
        } else {
            // Kicks are no longer used, and on arm64 their tracepoint fires for every interrupt that CPUs send each other.
            let kick = self.waits.as_mut().and_then(|waits| waits.links.pop());
            if let (Some((name, link)), Some(ebpf)) = (kick, self.ebpf.as_mut()) {
                tracepoint(ebpf, name)?.detach(link).map_err(program_error(name))?;
            }
            self.verdicts.set(METHOD, method::SWITCH_OUT, 0).map_err(KernelError::map("VERDICTS"))?;
        }
        if self.samplers.contains(&WAKE) {
            self.attach_wait_program(WAKE, "sched_waking")?;
        }
        Ok(method)
    }

    pub(super) fn attach_wait_program(&mut self, name: &'static str, point: &str) -> Result<(), KernelError> {
        let ebpf = self.ebpf.as_mut().ok_or(KernelError::Verifying)?;
        let link = tracepoint(ebpf, name)?.attach(point).map_err(|source| {
            let what = format!("raw tracepoint {point}, which waiting threads are sampled by");
            KernelError::Attach { what, source }
        })?;
        if let Some(waits) = &mut self.waits {
            waits.links.push((name, link));
        }
        Ok(())
    }

    /// Whether each kick on each CPU meets what ran when it was raised, at the second attempt if not at the first: a hypervisor may be late
    /// once, which a recording counts, while a kernel that has no kicks never has any.
    fn kicks_are_met(&mut self) -> bool {
        (0..ATTEMPTS).any(|_| self.all_kicks_are_met())
    }

    fn all_kicks_are_met(&mut self) -> bool {
        let (Ok(cpus), Some(before)) = (aya::util::online_cpus(), self.tries_met()) else { return false };
        let mut tried = 0;
        for cpu in cpus {
            for _ in 0..TRIES {
                let Some(ebpf) = self.ebpf.as_mut() else { return false };
                tried += 1;
                if !try_on(ebpf, cpu) || !self.have_met(before + tried) {
                    return false;
                }
            }
        }
        tried > 0
    }

    /// How many kicks have met their thread so far.
    fn tries_met(&self) -> Option<u64> {
        Some(self.waits(self.bank()).ok()??.before.tries_met)
    }

    /// Whether that many kicks have met their thread by now, or do so soon.
    fn have_met(&self, tried: u64) -> bool {
        let begun = Instant::now();
        while self.tries_met().is_none_or(|met| met < tried) {
            if begun.elapsed() > PATIENCE {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }
}

fn try_on(ebpf: &mut Ebpf, cpu: u32) -> bool {
    let options = RawTracePointRunOptions { cpu: Some(cpu), ..RawTracePointRunOptions::new() };
    tracepoint(ebpf, TRY).is_ok_and(|program| program.test_run(options).is_ok())
}
