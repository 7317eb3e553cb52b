//! Stacks of threads that waited: in every format, their leaf says so, and for what.

use super::{FrameId, Profile, SPECIAL_FILENAME, ThreadId};

const BEFORE: &str = "<waiting: ";
const AFTER: &str = ">";

/// The name of that leaf.
#[must_use]
pub fn waiting(cause: &str) -> String {
    format!("{BEFORE}{cause}{AFTER}")
}

/// What was waited for, according to a leaf of that name; `None`: it is some other name.
#[must_use]
pub fn waited_for(name: &str) -> Option<&str> {
    name.strip_prefix(BEFORE)?.strip_suffix(AFTER)
}

/// Name of the frame, above the line that waits, that says who ended the wait, if that was asked for.
#[must_use]
pub fn woken_by(waker: &str) -> String {
    format!("<woken by: {waker}>")
}

/// Who ended the wait, according to a frame of that name; `None`: it is some other name.
#[must_use]
pub fn waker_of(name: &str) -> Option<&str> {
    name.strip_prefix("<woken by: ")?.strip_suffix('>')
}

/// What is known about a wait apart from its stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wait<'a> {
    /// Samples that it stands for.
    pub weight: u64,
    /// When it began, in microseconds on `CLOCK_MONOTONIC`.
    pub since_us: u64,
    /// How long it lasted, or has lasted so far, in microseconds.
    pub wait_us: u64,
    /// Number of the system call on this machine's processor; `None`: in none, or not known.
    pub syscall: Option<u32>,
    /// Address of the futex, if it waited for one.
    pub futex: Option<u64>,
    /// The last part of that, in which it was ready to run but had no CPU, in microseconds. `None`: not known.
    pub queued_us: Option<u64>,
    /// Id of the thread that woke it; `None`: no thread did, or it is not known.
    pub waker: Option<u32>,
    /// That thread and its stack, leaf first, if they were asked for and it is recorded, too.
    pub waker_stack: Option<(ThreadId, &'a [FrameId])>,
    /// Who held the GIL, if the thread waited for the GIL and that is known.
    pub holder: Option<Holder>,
}

/// The thread that held the GIL while another one waited for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its id; `None`: not known.
    pub tid: Option<u32>,
    /// Its innermost Python frame.
    pub frame: FrameId,
}

impl Wait<'_> {
    /// The name of its system call.
    #[must_use]
    pub fn syscall_name(&self) -> Option<&'static str> {
        syscalls::Sysno::new(self.syscall? as usize).map(|call| call.name())
    }
}

impl Profile {
    /// What the thread of a stack, leaf first, waited for; `None`: it ran.
    #[must_use]
    pub fn waits_for(&self, stack: &[FrameId]) -> Option<&str> {
        let leaf = self.frames.get(*stack.first()?);
        let name = waited_for(self.strings.get(leaf.function))?;
        (self.strings.get(leaf.filename) == SPECIAL_FILENAME).then_some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Frame;

    #[test]
    fn only_a_leaf_of_ours_waits() {
        let mut profile = Profile::default();
        let leaf = profile.special_frame(&waiting("socket"));
        let (file, name) = (profile.strings.intern("app.py"), profile.strings.intern(&waiting("lock")));
        let own = profile.frames.intern(Frame::without_location(file, name));
        assert_eq!(profile.waits_for(&[leaf, own]), Some("socket"));
        assert_eq!(profile.waits_for(&[own, leaf]), None);
        assert_eq!(profile.waits_for(&[]), None);
    }
}
