//! What a recording knows of a process beyond its names, where it was asked to look.

/// Whose a process is, where it runs, and what its environment says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Details {
    /// Real user id, as the profiler's user namespace numbers it; `None` when it could not be read.
    pub uid: Option<u32>,
    /// Path of its control group: of the unified hierarchy where there is one, else of the first that is listed.
    pub cgroup: String,
    /// Variables that were asked for and that it was started with, in the order in which they were asked for.
    pub environment: Vec<(String, String)>,
    /// Whether the environment could be read.
    pub is_whole: bool,
}

impl Details {
    /// The value of a variable.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.environment.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}
