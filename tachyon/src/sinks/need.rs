//! How much memory finishing a file takes, estimated from what has been taken so far. The factors are measured
//! (`tachyon/tests/finish_memory.rs` holds each sink to its estimate).

use super::stacks::Stacks;
use crate::profile::Profile;

/// How much a profile has of each thing.
#[derive(Clone, Copy, Debug)]
pub(in crate::sinks) struct Amounts {
    /// Distinct stacks.
    pub stacks: u64,
    /// Frames of all of them.
    pub stack_frames: u64,
    /// Distinct frames.
    pub frames: u64,
    /// Bytes of all texts.
    pub text: u64,
    /// Threads, and processes.
    pub threads: u64,
}

impl Amounts {
    pub fn of(profile: &Profile, stacks: &Stacks) -> Self {
        Self {
            stacks: stacks.iter().len() as u64,
            stack_frames: stacks.frame_count() as u64,
            frames: profile.frames.len() as u64,
            text: profile.strings.bytes() as u64,
            threads: (profile.threads.len() + profile.processes.len()) as u64,
        }
    }

    /// The sum with this much for each: stacks, frames of stacks, frames, bytes of text, threads.
    pub const fn sum(self, [stack, stack_frame, frame, text, thread]: [u64; 5]) -> u64 {
        let Self { stacks, stack_frames, frames, text: bytes, threads } = self;
        stacks * stack + stack_frames * stack_frame + frames * frame + bytes * text + threads * thread
    }
}

/// Memory for tables that are written one after the other, and for processes and threads as a document, with their
/// accounts.
pub(super) fn of_tables(profile: &Profile) -> u64 {
    1024 * (profile.threads.len() + profile.processes.len()) as u64 + 100 * profile.frames.len() as u64
}
