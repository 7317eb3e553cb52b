//! What keys mean, and what somebody wants.

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

/// What somebody wants.
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
    /// Take one back.
    Erase,
    /// Take all back.
    EraseAll,
    /// The filter is done.
    Accept,
    /// Away from here: from the help, a filter, a scope.
    Back,
    /// So many threads further.
    Thread(isize),
    /// So many rows further.
    Select(isize),
    /// Into the thread or process of the selected row.
    Enter,
    /// Show a table.
    Show(Tab),
    /// So many tables further.
    NextTab(isize),
    /// Native code on or off.
    Native,
    /// Write a file.
    Write,
    /// Help.
    Help,
    /// Draw all anew.
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
    /// Draw all anew.
    Redraw,
    /// Stop this process.
    Suspend,
}
