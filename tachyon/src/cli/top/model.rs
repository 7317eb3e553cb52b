//! The state of the view, and what actions do to it. It draws nothing and reads no keys.

mod action;
mod tab;

pub use action::{Action, Effect, Mode};
pub use tab::Tab;

use super::driver::Taken;
use super::seen::Seen;
use crate::analysis::live::{GroupRow, Live, LiveRow, Scope, Shares, Span, TaskRow};
use crate::analysis::{By, RowKind, Sum, ratio};
use crate::cli::report::text::{place, short};
use regex::{Regex, RegexBuilder};
use std::cmp::Ordering;
use std::rc::Rc;
use std::time::Duration;

/// What is watched.
#[derive(Clone, Debug)]
pub struct Title {
    /// For people.
    pub what: String,
    /// Samples requested per second of CPU time.
    pub rate_hz: f64,
}

/// A row of a table, ready to be shown.
#[derive(Clone, Debug, PartialEq)]
pub struct TableRow {
    /// Its four numbers; `None`: not known. The first two are shares, the others seconds.
    pub numbers: [Option<f64>; 4],
    /// What it is.
    pub name: String,
    /// Where it is: file and line, or a thread's process.
    pub place: String,
    /// What native code its self went into, most first: share, symbol, object.
    pub native: Vec<(f64, String, String)>,
    /// Its number, for its history.
    pub id: usize,
    /// Whose samples it has, if it is a thread or process.
    pub scope: Option<Scope>,
}

impl TableRow {
    /// Whether it is a task.
    #[must_use]
    pub const fn is_task(&self) -> bool {
        matches!(self.scope, Some(Scope::Task { .. }))
    }
}

/// What is sampled besides Python frames.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sampled {
    /// Native frames.
    pub native: bool,
    /// Asyncio tasks.
    pub tasks: bool,
}

/// The state of the view.
#[derive(Debug)]
pub struct Model {
    title: Title,
    delay: Duration,
    window: Duration,
    sampled: Sampled,
    seen: Seen,
    /// What is shown; it does not change while the view is paused.
    live: Rc<Live>,
    paused: bool,
    /// The counts have started over, and what is shown is from before.
    anew: bool,
    over: Option<String>,
    said: Option<String>,
    mode: Mode,
    tab: Tab,
    /// Column by which each kind of table is sorted: by self and total, by CPU time.
    sort: [usize; 2],
    scope: Scope,
    filter: String,
    pattern: Option<Regex>,
    native: bool,
    selected: usize,
    rows: Vec<TableRow>,
    /// Of the window, and since the start.
    shares: (Shares, Shares),
}

impl Model {
    /// A view that has seen nothing yet.
    #[must_use]
    pub fn new(title: Title, delay: Duration, window: Duration, sampled: Sampled) -> Self {
        Self {
            title,
            delay,
            window,
            sampled,
            seen: Seen::default(),
            live: Rc::default(),
            paused: false,
            anew: false,
            over: None,
            said: None,
            mode: Mode::Table,
            tab: Tab::default(),
            sort: [0, 0],
            scope: Scope::All,
            filter: String::new(),
            pattern: None,
            native: false,
            selected: 0,
            rows: Vec::new(),
            shares: Default::default(),
        }
    }

    /// Takes in a segment.
    pub fn add(&mut self, taken: &Taken) {
        // If it were still shared with what is shown, it would have to be copied.
        let shown = if self.paused { None } else { Some(std::mem::take(&mut self.live)) };
        drop(shown);
        if self.seen.add(taken) {
            self.say("too many different stacks to remember: the counts begin again");
            self.anew = true;
        }
        if !self.paused {
            self.go_on();
        }
    }

    /// Shows the current state.
    fn go_on(&mut self) {
        self.live = self.seen.live();
        if std::mem::take(&mut self.anew) {
            // Its threads are gone with everything else.
            self.scope = Scope::All;
        }
        self.renew();
    }

    /// There is nothing more to come. The first reason counts.
    pub fn over(&mut self, why: String) {
        self.over.get_or_insert(why);
    }

    /// Shows a message until the next key.
    pub fn say(&mut self, message: &str) {
        self.said = Some(message.to_owned());
    }

    /// Carries out an action.
    pub fn apply(&mut self, action: Action) -> Effect {
        self.said = None;
        match action {
            Action::Quit => return Effect::Quit,
            Action::Redraw => return Effect::Redraw,
            Action::Suspend => return Effect::Suspend,
            Action::Write => return Effect::Write,
            Action::Pause => {
                self.paused = !self.paused;
                if !self.paused {
                    self.go_on();
                }
            }
            Action::Sort(column) => {
                self.sort[usize::from(self.tab.is_group())] = column;
                self.selected = 0;
                self.sort_rows();
            }
            Action::Filter => self.mode = Mode::Typing(self.filter.clone()),
            Action::Type(_) | Action::Erase | Action::EraseAll => self.edit(action),
            Action::Accept => self.mode = Mode::Table,
            Action::Back => self.back(),
            Action::Thread(by) => self.step_thread(by),
            Action::Select(by) => {
                let last = self.rows.len().saturating_sub(1);
                self.selected = self.selected.saturating_add_signed(by).min(last);
            }
            Action::Enter => {
                if let Some(scope) = self.rows.get(self.selected).and_then(|row| row.scope) {
                    self.scope = scope;
                    self.show(Tab::Functions);
                }
            }
            Action::Show(Tab::Tasks) if !self.sampled.tasks => self.say("tasks are not sampled: add --async"),
            Action::Show(tab) => self.show(tab),
            Action::NextTab(by) => {
                let tabs: Vec<Tab> = self.tabs().collect();
                let count = tabs.len();
                let at = tabs.iter().position(|tab| *tab == self.tab).unwrap_or(0);
                self.show(tabs[(at + count).saturating_add_signed(by) % count]);
            }
            Action::Native if !self.sampled.native => self.say("native frames are not sampled: leave out --no-native"),
            Action::Native => self.native = !self.native,
            Action::Help => self.mode = Mode::Help,
        }
        Effect::None
    }

    fn edit(&mut self, action: Action) {
        let Mode::Typing(text) = &mut self.mode else { return };
        match action {
            Action::Type(character) => text.push(character),
            Action::Erase => drop(text.pop()),
            _ => text.clear(),
        }
        let text = text.clone();
        // As in editors: a capital letter makes the search case-sensitive.
        let any_case = !text.chars().any(char::is_uppercase);
        match RegexBuilder::new(&text).case_insensitive(any_case).build() {
            Ok(pattern) => {
                self.pattern = (!text.is_empty()).then_some(pattern);
                self.filter = text;
                self.selected = 0;
                self.renew();
            }
            // It may become one when more is typed.
            Err(_) => self.say("not a regular expression yet"),
        }
    }

    fn back(&mut self) {
        match self.mode {
            Mode::Table if self.pattern.is_some() => self.clear_filter(),
            Mode::Table => {
                self.scope = Scope::All;
                self.selected = 0;
                self.renew();
            }
            Mode::Typing(_) => self.clear_filter(),
            Mode::Help => {}
        }
        self.mode = Mode::Table;
    }

    fn clear_filter(&mut self) {
        self.filter.clear();
        self.pattern = None;
        self.selected = 0;
        self.renew();
    }

    fn show(&mut self, tab: Tab) {
        self.tab = tab;
        self.selected = 0;
        self.renew();
    }

    /// Steps through: all threads, then each that was met, then all again.
    fn step_thread(&mut self, by: isize) {
        let threads = self.live.groups(By::Thread, self.window);
        let at = match self.scope {
            Scope::Thread(_) => threads.iter().position(|row| row.scope == self.scope).map_or(0, |at| at + 1),
            Scope::Process(_) | Scope::Task { .. } | Scope::NoTask | Scope::All => 0,
        };
        let count = threads.len() + 1;
        let next = (at + count).saturating_add_signed(by) % count;
        self.scope = next.checked_sub(1).map_or(Scope::All, |thread| threads[thread].scope);
        // The table of all threads has nothing to show for one.
        if !self.tab.is_code() {
            self.tab = Tab::Functions;
        }
        self.selected = 0;
        self.renew();
    }

    /// Makes the rows anew.
    fn renew(&mut self) {
        let live = Rc::clone(&self.live);
        let of = |span| live.shares(span, self.scope);
        self.shares = (of(Span::Window(self.window)), of(Span::Whole));
        let selected = self.rows.get(self.selected).map(|row| (row.name.clone(), row.place.clone()));
        let mut rows: Vec<TableRow> = match self.tab {
            Tab::Functions | Tab::Lines => {
                let rows = live.rows(self.tab.by(), self.window, self.scope);
                rows.into_iter().map(|row| self.code_row(row)).collect()
            }
            Tab::Threads | Tab::Processes => {
                let rows = live.groups(self.tab.by(), self.window).into_iter().enumerate();
                rows.map(|(id, row)| self.group_row(id, row)).collect()
            }
            Tab::Tasks => {
                let all = live.shares(Span::Window(self.window), Scope::All).sum.samples;
                let rows = live.task_rows(self.window).into_iter().enumerate();
                rows.map(|(id, row)| task_row(id, row, all)).collect()
            }
        };
        if let Some(pattern) = &self.pattern {
            rows.retain(|row| pattern.is_match(&row.name) || pattern.is_match(&row.place));
        }
        self.rows = rows;
        self.sort_rows();
        // The row that the user has selected stays selected; the first is always whatever leads.
        if self.selected > 0 {
            let found = |(name, place): &(String, String)| {
                self.rows.iter().position(|row| row.name == *name && row.place == *place)
            };
            self.selected = selected.as_ref().and_then(found).unwrap_or(0);
        }
    }

    fn code_row(&self, row: LiveRow) -> TableRow {
        let all = self.shares.0.sum.samples;
        let share = |sum: Sum| Some(ratio(sum.samples, all));
        let native = row
            .native
            .iter()
            .map(|(symbol, object, samples)| (ratio(*samples, all), symbol.to_string(), short(object).to_owned()));
        TableRow {
            numbers: [share(row.own), share(row.total), seconds(row.own_whole), seconds(row.total_whole)],
            native: native.collect(),
            name: row.name.function.as_deref().unwrap_or(&row.name.name).to_owned(),
            place: match row.name.kind {
                RowKind::Python => place(&row.name, row.hottest_line),
                _ => String::new(),
            },
            id: row.id,
            scope: None,
        }
    }

    fn group_row(&self, id: usize, row: GroupRow) -> TableRow {
        let length = self.shares.0.seconds;
        let share = |sum: Sum| Some(if length > 0.0 { sum.cpu_us as f64 / 1e6 / length } else { 0.0 });
        TableRow {
            numbers: [share(row.sum), row.gil.and_then(share), seconds(row.whole), row.gil_whole.and_then(seconds)],
            native: Vec::new(),
            name: row.name,
            place: row.process,
            id,
            scope: Some(row.scope),
        }
    }

    fn sort_rows(&mut self) {
        let column = self.sorted_by();
        self.rows.sort_by(|a, b| {
            let number = |row: &TableRow, column: usize| row.numbers[column].unwrap_or(-1.0);
            let by = |column: usize| number(b, column).total_cmp(&number(a, column));
            // Equal rows are sorted by the other columns: if the window says nothing, the whole recording decides.
            let order = [column, 0, 1, 2, 3].into_iter().fold(Ordering::Equal, |order, column| order.then(by(column)));
            order.then_with(|| (&a.name, &a.place).cmp(&(&b.name, &b.place)))
        });
    }

    /// Whether there is anything to show yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.live.steps().len() == 0
    }

    /// For each row on the screen, its share of a CPU in each step of the last minute.
    #[must_use]
    pub fn histories(&self, rows: &[TableRow]) -> Vec<Vec<f64>> {
        if self.tab.is_code() {
            let ids: Vec<usize> = rows.iter().map(|row| row.id).collect();
            return self.live.histories(self.tab.by(), self.scope, &ids);
        }
        let of = |scope| self.live.history(scope).into_iter().map(|(cpus, _)| cpus).collect();
        rows.iter().map(|row| of(row.scope.unwrap_or_default())).collect()
    }

    /// CPUs in use in each step of the last minute, and those of them whose thread held the GIL.
    #[must_use]
    pub fn history(&self) -> Vec<(f64, f64)> {
        self.live.history(self.scope)
    }

    /// Number of steps in a minute.
    #[must_use]
    pub fn steps_a_minute(&self) -> usize {
        let steps = crate::analysis::live::HISTORY.as_millis() / self.delay.as_millis().max(1);
        usize::try_from(steps).unwrap_or(usize::MAX).max(1)
    }

    /// Threads and processes met so far.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        (self.live.profile().threads.len(), self.live.profile().processes.len())
    }

    /// What is watched.
    #[must_use]
    pub fn title(&self) -> &Title {
        &self.title
    }

    /// Length of the window that is shown; shorter than requested if there is no more yet.
    #[must_use]
    pub fn window(&self) -> f64 {
        self.shares.0.seconds
    }

    /// Of the window, and since the start.
    #[must_use]
    pub fn shares(&self) -> &(Shares, Shares) {
        &self.shares
    }

    /// All rows, in order.
    #[must_use]
    pub fn rows(&self) -> &[TableRow] {
        &self.rows
    }

    /// Index of the selected row.
    #[must_use]
    pub fn selected(&self) -> usize {
        self.selected
    }

    /// What is shown.
    #[must_use]
    pub fn tab(&self) -> Tab {
        self.tab
    }

    /// The tables there are.
    pub fn tabs(&self) -> impl Iterator<Item = Tab> + use<> {
        let has_tasks = self.sampled.tasks;
        Tab::ALL.into_iter().filter(move |tab| *tab != Tab::Tasks || has_tasks)
    }

    /// The column that rows are sorted by.
    #[must_use]
    pub fn sorted_by(&self) -> usize {
        self.sort[usize::from(self.tab.is_group())]
    }

    /// Whose samples are shown, for people.
    #[must_use]
    pub fn scope_name(&self) -> String {
        self.live.scope_name(self.scope)
    }

    /// What rows have to match; empty: no filter.
    #[must_use]
    pub fn filter(&self) -> &str {
        &self.filter
    }

    /// Whether native code is shown.
    #[must_use]
    pub fn native(&self) -> bool {
        self.native
    }

    /// Whether the view is paused.
    #[must_use]
    pub fn paused(&self) -> bool {
        self.paused
    }

    /// Why nothing more comes.
    #[must_use]
    pub fn is_over(&self) -> Option<&str> {
        self.over.as_deref()
    }

    /// A message.
    #[must_use]
    pub fn said(&self) -> Option<&str> {
        self.said.as_deref()
    }

    /// What keys mean at the moment.
    #[must_use]
    pub fn mode(&self) -> &Mode {
        &self.mode
    }

    /// All that was seen, even while the view is paused.
    #[must_use]
    pub fn seen(&self) -> &Seen {
        &self.seen
    }
}

fn task_row(id: usize, row: TaskRow, all: u64) -> TableRow {
    let share = |sum: Sum| Some(ratio(sum.samples, all));
    TableRow {
        numbers: [share(row.own), share(row.total), seconds(row.own_whole), seconds(row.total_whole)],
        native: Vec::new(),
        name: row.name,
        place: row.process,
        id,
        scope: Some(row.scope),
    }
}

fn seconds(sum: Sum) -> Option<f64> {
    Some(sum.cpu_us as f64 / 1e6)
}

#[cfg(test)]
mod tests;
