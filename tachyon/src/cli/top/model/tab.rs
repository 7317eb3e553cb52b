//! The tables that the view has.

use crate::analysis::By;

/// Which table is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tab {
    /// Functions.
    #[default]
    Functions,
    /// Lines of functions.
    Lines,
    /// Threads.
    Threads,
    /// Processes.
    Processes,
    /// Asyncio tasks.
    Tasks,
}

impl Tab {
    /// All, in the order in which Tab goes through them.
    pub const ALL: [Self; 5] = [Self::Functions, Self::Lines, Self::Threads, Self::Processes, Self::Tasks];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Functions => "functions",
            Self::Lines => "lines",
            Self::Threads => "threads",
            Self::Processes => "processes",
            Self::Tasks => "tasks",
        }
    }

    /// What has a row.
    #[must_use]
    pub const fn by(self) -> By {
        match self {
            Self::Functions => By::Function,
            Self::Lines => By::Line,
            Self::Threads => By::Thread,
            Self::Processes => By::Process,
            Self::Tasks => By::Task,
        }
    }

    /// Whether its rows are code.
    #[must_use]
    pub const fn is_code(self) -> bool {
        matches!(self, Self::Functions | Self::Lines)
    }

    /// Whether its rows are threads, processes or tasks: with CPU time and the GIL, not self and total.
    #[must_use]
    pub const fn is_group(self) -> bool {
        matches!(self, Self::Threads | Self::Processes)
    }

    /// Headings of its four columns of numbers.
    #[must_use]
    pub const fn headings(self) -> [&'static str; 4] {
        if self.is_group() {
            ["1 CPU", "2 GIL", "3 CPU s", "4 GIL s"]
        } else {
            ["1 SELF", "2 TOTAL", "3 SELF s", "4 TOTAL s"]
        }
    }
}
