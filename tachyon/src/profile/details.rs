//! What a recording knows about a process beyond its names, if it was asked to look.

use std::collections::BTreeMap;

/// Whose a process is, where it runs, and what its environment says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Details {
    /// Real user id, as the profiler's user namespace numbers it; `None` when it could not be read.
    pub uid: Option<u32>,
    /// Path of its control group: in the unified hierarchy if there is one, otherwise in the first that is listed.
    pub cgroup: String,
    /// Requested variables that it was started with, in the order in which they were requested.
    pub environment: Vec<(String, String)>,
    /// Whether the environment could be read.
    pub is_whole: bool,
}

/// Longest label made from a variable, in characters: in JSON lines each sample has it.
const MAX_LABEL: usize = 256;

impl Details {
    /// The variables as labels, by name; a value that is too long is cut and ends in `…`.
    #[must_use]
    pub fn labels(&self) -> BTreeMap<String, String> {
        let cut = |value: &String| match value.char_indices().nth(MAX_LABEL) {
            Some((end, _)) => format!("{}…", &value[..end]),
            None => value.clone(),
        };
        self.environment.iter().map(|(name, value)| (name.clone(), cut(value))).collect()
    }

    /// The value of a variable.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.environment.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_value_is_cut_between_two_characters() {
        let environment = [("JOB", "é".repeat(MAX_LABEL)), ("LONG", "é".repeat(MAX_LABEL + 1))];
        let environment = environment.map(|(name, value)| (name.to_owned(), value)).into();
        let labels = Details { environment, ..Details::default() }.labels();
        assert_eq!(labels["JOB"].chars().count(), MAX_LABEL);
        assert_eq!(labels["LONG"], "é".repeat(MAX_LABEL) + "…");
    }
}
