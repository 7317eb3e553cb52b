//! Which samples count, by the frames in them.

use super::aggregate::{Aggregate, Place};
use regex::Regex;

/// As pprof's `-focus` and `-ignore`: patterns are searched for anywhere in a function's name, its file or its object.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Only samples with a frame that matches.
    pub focus: Option<Regex>,
    /// No sample with a frame that matches.
    pub ignore: Option<Regex>,
}

impl Filter {
    /// By stack: whether its samples count.
    #[must_use]
    pub fn stacks(&self, aggregate: &Aggregate) -> Vec<bool> {
        let found = |pattern: &Option<Regex>| -> Option<Vec<bool>> {
            let pattern = pattern.as_ref()?;
            Some(aggregate.places().iter().map(|place| matches(pattern, place)).collect())
        };
        let (focus, ignore) = (found(&self.focus), found(&self.ignore));
        let keeps = |stack: &[super::PlaceId]| {
            let any = |wanted: &[bool]| stack.iter().any(|place| wanted[place.0 as usize]);
            focus.as_deref().is_none_or(any) && !ignore.as_deref().is_some_and(any)
        };
        aggregate.stacks().iter().map(|stack| keeps(stack)).collect()
    }
}

/// Whether a place has a name that matches.
pub(super) fn matches(pattern: &Regex, place: &Place) -> bool {
    pattern.is_match(&place.function) || pattern.is_match(&place.file)
}
