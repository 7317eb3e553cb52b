//! Stacks of threads that waited: their leaf says so, and for what, in every format.

use super::{FrameId, Profile, SPECIAL_FILENAME};

const BEFORE: &str = "<waiting: ";
const AFTER: &str = ">";

/// The name of that leaf.
#[must_use]
pub fn waiting(cause: &str) -> String {
    format!("{BEFORE}{cause}{AFTER}")
}

impl Profile {
    /// What the thread of a stack, leaf first, waited for; `None`: it ran.
    #[must_use]
    pub fn waits_for(&self, stack: &[FrameId]) -> Option<&str> {
        let leaf = self.frames.get(*stack.first()?);
        let name = self.strings.get(leaf.function).strip_prefix(BEFORE)?.strip_suffix(AFTER)?;
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
