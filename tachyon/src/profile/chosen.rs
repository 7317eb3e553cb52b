//! Stacks of chosen events (`--event`): in every format, their root says which event it was and how many a sample
//! stands for.

use super::{FrameId, Profile, SPECIAL_FILENAME};

const BEFORE: &str = "<event: ";
const AFTER: &str = ">";

/// The event of asyncio tasks that wait concurrently while their loop is idle. Their waits are not part of their thread's time:
/// each of them waits for all of it.
pub const TASK_WAIT: &str = "task-wait";

/// The name of that root for an event, as users write it: with its period, unless that is 1.
#[must_use]
pub fn event_root(event: &str) -> String {
    format!("{BEFORE}{event}{AFTER}")
}

/// Which event a root of that name stands for, and how many of them a sample stands for; `None`: it is some other name.
#[must_use]
pub fn event_of_root(name: &str) -> Option<(&str, u64)> {
    let event = name.strip_prefix(BEFORE)?.strip_suffix(AFTER)?;
    let period = event.rsplit_once(':').and_then(|(name, period)| Some((name, period.parse().ok()?)));
    Some(period.unwrap_or((event, 1)))
}

impl Profile {
    /// Which event a stack, leaf first, was taken at, and how many of them it stands for; `None`: the clock.
    #[must_use]
    pub fn event_of(&self, stack: &[FrameId]) -> Option<(&str, u64)> {
        let root = self.frames.get(*stack.last()?);
        let event = event_of_root(self.strings.get(root.function))?;
        (self.strings.get(root.filename) == SPECIAL_FILENAME).then_some(event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Frame;

    #[test]
    fn only_a_root_of_ours_tells_an_event() {
        let mut profile = Profile::default();
        let root = profile.special_frame(&event_root("page-faults"));
        let every_tenth = profile.special_frame(&event_root("sched:sched_switch:10"));
        let (file, name) = (profile.strings.intern("app.py"), profile.strings.intern(&event_root("page-faults")));
        let own = profile.frames.intern(Frame::without_location(file, name));
        assert_eq!(profile.event_of(&[own, root]), Some(("page-faults", 1)));
        assert_eq!(profile.event_of(&[own, every_tenth]), Some(("sched:sched_switch", 10)));
        assert_eq!(profile.event_of(&[root, own]), None);
        assert_eq!(profile.event_of(&[]), None);
    }
}
