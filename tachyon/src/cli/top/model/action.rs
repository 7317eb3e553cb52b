//! What keys mean, and what the user wants.

use super::Tab;

/// What keys mean at the moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// They are commands.
    #[default]
    Table,
    /// They are a filter's text.
    Typing(String),
    /// They end the help.
    Help,
}

/// What the user wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// End the view.
    Quit,
    /// Stop or go on.
    Pause,
    /// Sort by a column.
    Sort(usize),
    /// Begin to type a filter.
    Filter,
    /// Type a letter of it.
    Type(char),
    /// Delete one letter.
    Erase,
    /// Delete all letters.
    EraseAll,
    /// The filter is done.
    Accept,
    /// Leave the help, a filter or a scope.
    Back,
    /// Move by this many threads.
    Thread(isize),
    /// Move by this many rows.
    Select(isize),
    /// Into the thread or process of the selected row.
    Enter,
    /// Show a table.
    Show(Tab),
    /// Move by this many tables.
    NextTab(isize),
    /// Native code on or off.
    Native,
    /// Write a file.
    Write,
    /// Help.
    Help,
    /// Redraw everything.
    Redraw,
    /// Stop this process.
    Suspend,
}

/// What the model cannot do itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// End the view.
    Quit,
    /// Write a file.
    Write,
    /// Redraw everything.
    Redraw,
    /// Stop this process.
    Suspend,
}
