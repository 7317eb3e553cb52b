//! Tables for people: on a terminal of any width, in a pipe, and as Markdown.

use super::escape::escape;
use indicatif::HumanCount;
use std::borrow::Cow;
use std::io::{self, Write};
use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

/// The kind of output, and what it supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Text; `width`: columns of the terminal, `None` if there is no limit.
    Text {
        /// See above.
        width: Option<usize>,
        /// Colours are wanted.
        colours: bool,
    },
    /// Markdown.
    Markdown,
}

/// Nothing narrower than this is readable: then lines are longer than the terminal is wide.
const NARROWEST: usize = 40;

impl Style {
    /// The style for standard output.
    #[must_use]
    pub fn of_stdout() -> Self {
        use std::io::IsTerminal as _;
        let is_terminal = io::stdout().is_terminal();
        let unset = |name: &str| std::env::var_os(name).is_none_or(|value| value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let told = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
        let found = || terminal_size::terminal_size_of(io::stdout()).map(|(width, _)| usize::from(width.0));
        let width = if is_terminal { found().or(told).or(Some(80)) } else { told };
        let width = width.map(|width| width.max(NARROWEST));
        Self::Text { width, colours: is_terminal && !dumb && unset("NO_COLOR") }
    }

    /// Text without colours, of any width.
    #[must_use]
    pub const fn plain() -> Self {
        Self::Text { width: None, colours: false }
    }

    /// As many of the parts as fit into one line, and whether those are all of them.
    #[must_use]
    pub fn fitting(self, used: usize, parts: &[String]) -> (String, bool) {
        let mut line = String::new();
        for (index, part) in parts.iter().enumerate() {
            let separator = if index > 0 { ", " } else { "" };
            let needed = used + line.width() + separator.width() + part.width() + ", …".width();
            if index > 0 && matches!(self, Self::Text { width: Some(width), .. } if needed > width) {
                return (line, false);
            }
            line += separator;
            line += part;
        }
        (line, true)
    }

    /// Rows of the terminal, if standard output is one.
    #[must_use]
    pub fn height() -> Option<usize> {
        terminal_size::terminal_size_of(io::stdout()).map(|(_, height)| usize::from(height.0))
    }

    /// A text in a colour, if colours are wanted.
    #[must_use]
    pub fn paint(self, text: &str, colour: Colour) -> String {
        match (self, colour) {
            (Self::Text { colours: true, .. }, Colour::Hot) => format!("\x1b[1;31m{text}\x1b[0m"),
            (Self::Text { colours: true, .. }, Colour::Warm) => format!("\x1b[33m{text}\x1b[0m"),
            (Self::Text { colours: true, .. }, Colour::Good) => format!("\x1b[32m{text}\x1b[0m"),
            (Self::Text { colours: true, .. }, Colour::Dim) => format!("\x1b[2m{text}\x1b[0m"),
            (Self::Text { colours: true, .. }, Colour::Bold) => format!("\x1b[1m{text}\x1b[0m"),
            _ => text.to_owned(),
        }
    }
}

/// How a text is highlighted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Colour {
    /// Like normal text.
    #[default]
    Plain,
    /// Much of the time.
    Hot,
    /// Some of it.
    Warm,
    /// Less than it was.
    Good,
    /// Beside the point.
    Dim,
    /// A heading.
    Bold,
}

/// How a column is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// Numbers: as wide as the widest, to the right.
    Number,
    /// Numbers that a narrow terminal omits.
    Extra,
    /// Numbers that only a wide terminal shows.
    Spare,
    /// Text whose end says most, such as a path or a qualified name: it is cut at the front.
    Text,
}

/// One cell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    text: String,
    colour: Colour,
}

impl Cell {
    /// A cell with a text that may contain anything.
    #[must_use]
    pub fn new(text: &str, colour: Colour) -> Self {
        Self { text: escape(text).into_owned(), colour }
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self::new(&text, Colour::Plain)
    }
}

/// `100th`.
#[must_use]
pub fn ordinal(number: u64) -> String {
    let suffix = match (number % 100, number % 10) {
        (11..=13, _) => "th",
        (_, 1) => "st",
        (_, 2) => "nd",
        (_, 3) => "rd",
        _ => "th",
    };
    format!("{}{suffix}", HumanCount(number))
}

/// A table.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<(&'static str, Column)>,
    rows: Vec<Vec<Cell>>,
}

/// Below this width there are no [`Column::Extra`] columns.
const ROOM_FOR_EXTRAS: usize = 72;
/// Below this width there are no [`Column::Spare`] columns.
const ROOM_FOR_SPARES: usize = 100;
/// Text columns are never cut to less than this.
const NARROWEST_TEXT: usize = 12;
/// Text columns are not aligned beyond this if there is no limit on lines.
const WIDEST_TEXT: usize = 80;

impl Table {
    /// A table with these headings.
    #[must_use]
    pub fn new(columns: Vec<(&'static str, Column)>) -> Self {
        Self { columns, rows: Vec::new() }
    }

    /// Adds a row, which has a cell for each column.
    pub fn push(&mut self, row: Vec<Cell>) {
        debug_assert_eq!(row.len(), self.columns.len());
        self.rows.push(row);
    }

    /// Whether it has no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Writes it.
    ///
    /// # Errors
    /// When `out` cannot be written.
    pub fn write(&self, style: Style, out: &mut dyn Write) -> io::Result<()> {
        match style {
            Style::Text { width, .. } => self.write_text(style, width, out),
            Style::Markdown => self.write_markdown(out),
        }
    }

    fn write_markdown(&self, out: &mut dyn Write) -> io::Result<()> {
        let headings: Vec<_> = self.columns.iter().map(|(heading, _)| heading.to_lowercase()).collect();
        writeln!(out, "| {} |", headings.join(" | "))?;
        let rules = self.columns.iter().map(|(_, column)| if *column == Column::Text { "---" } else { "---:" });
        writeln!(out, "| {} |", rules.collect::<Vec<_>>().join(" | "))?;
        for row in &self.rows {
            let cells = row.iter().zip(&self.columns).map(|(cell, (_, column))| match column {
                Column::Text if !cell.text.trim().is_empty() => code_span(&cell.text),
                _ => cell.text.trim().to_owned(),
            });
            writeln!(out, "| {} |", cells.collect::<Vec<_>>().join(" | "))?;
        }
        Ok(())
    }

    fn write_text(&self, style: Style, width: Option<usize>, out: &mut dyn Write) -> io::Result<()> {
        let shown: Vec<usize> = (0..self.columns.len())
            .filter(|&place| {
                let needed = match self.columns[place].1 {
                    Column::Extra => ROOM_FOR_EXTRAS,
                    Column::Spare => ROOM_FOR_SPARES,
                    Column::Number | Column::Text => 0,
                };
                width.is_none_or(|width| width >= needed)
            })
            .collect();
        let widths = self.widths(&shown, width);
        let line = |cells: &mut dyn Iterator<Item = (&str, Colour)>| {
            let mut text = String::new();
            for ((cell, colour), &place) in cells.zip(&shown) {
                let cell = if width.is_some() { cut(cell, widths[place]) } else { cell.to_owned() };
                let room = " ".repeat(widths[place].saturating_sub(cell.width()));
                let cell = style.paint(&cell, colour);
                text += if text.is_empty() { "" } else { "  " };
                text += &if self.columns[place].1 == Column::Text { cell + &room } else { room + &cell };
            }
            text.trim_end().to_owned()
        };
        let headings = line(&mut shown.iter().map(|&place| (self.columns[place].0, Colour::Plain)));
        writeln!(out, "{}", style.paint(&headings, Colour::Dim))?;
        for row in &self.rows {
            let mut cells = shown.iter().map(|&place| (row[place].text.as_str(), row[place].colour));
            writeln!(out, "{}", line(&mut cells))?;
        }
        Ok(())
    }

    /// The columns' widths: numbers get what they need, and the texts share the rest.
    fn widths(&self, shown: &[usize], width: Option<usize>) -> Vec<usize> {
        let wanted = |place: usize| {
            let cells = self.rows.iter().map(|row| row[place].text.width());
            cells.chain([self.columns[place].0.width()]).max().unwrap_or(0)
        };
        let mut widths: Vec<usize> = (0..self.columns.len()).map(wanted).collect();
        let Some(width) = width else {
            // Nothing is cut, but one endless name must not push away the columns of all others.
            widths.iter_mut().for_each(|width| *width = (*width).min(WIDEST_TEXT));
            return widths;
        };
        let is_text = |place: &&usize| self.columns[**place].1 == Column::Text;
        let mut texts: Vec<usize> = shown.iter().filter(is_text).copied().collect();
        let numbers: usize = shown.iter().filter(|place| !is_text(place)).map(|&place| widths[place]).sum();
        let mut room = width.saturating_sub(numbers + 2 * (shown.len() - 1));
        // The one that needs least gets what it needs, and the rest is left for the others.
        texts.sort_by_key(|&place| widths[place]);
        for (index, &place) in texts.iter().enumerate() {
            let fair = (room / (texts.len() - index)).max(NARROWEST_TEXT);
            widths[place] = widths[place].min(fair);
            room = room.saturating_sub(widths[place]);
        }
        widths
    }
}

/// The end of a text that is too wide, with its indentation. A qualified name loses the part that only says it is local:
/// `render.<genexpr>`.
pub(super) fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let text = &*text.replace(".<locals>", "");
    if text.width() <= width {
        return text.to_owned();
    }
    let indented = text.len() - text.trim_start().len();
    let (indent, text) = text.split_at(indented);
    let mut room = width.saturating_sub(indent.width() + 1);
    let mut from = text.len();
    for (place, character) in text.char_indices().rev() {
        let Some(rest) = room.checked_sub(character.width().unwrap_or(0)) else { break };
        (room, from) = (rest, place);
    }
    format!("{indent}…{}", &text[from..])
}

/// The beginning of a text that is too wide.
pub(super) fn cut_end(text: &str, width: usize) -> Cow<'_, str> {
    if text.width() <= width {
        return Cow::Borrowed(text);
    }
    let mut room = width.saturating_sub(1);
    let fits = |character: &char| match room.checked_sub(character.width().unwrap_or(0)) {
        Some(rest) => {
            room = rest;
            true
        }
        None => false,
    };
    Cow::Owned(text.chars().take_while(fits).chain(['…']).collect())
}

/// Text in a form that Markdown shows unchanged, even in a table.
fn code_span(text: &str) -> String {
    let text = text.trim().replace('|', "\\|");
    // A fence must be longer than any run of backticks inside.
    let longest = text.split(|character| character != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat(longest + 1);
    let space = if longest > 0 { " " } else { "" };
    format!("{fence}{space}{text}{space}{fence}")
}

/// A share for people.
#[must_use]
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// How much a share weighs, as a colour.
#[must_use]
pub fn heat(share: f64) -> Colour {
    match share {
        0.2.. => Colour::Hot,
        0.05.. => Colour::Warm,
        _ => Colour::Plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(table: &Table, style: Style) -> String {
        let mut out = Vec::new();
        table.write(style, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn table() -> Table {
        let mut table = Table::new(vec![
            ("SELF", Column::Number),
            ("SECONDS", Column::Extra),
            ("FUNCTION", Column::Text),
            ("FILE", Column::Text),
        ]);
        let cell = |text: &str| Cell::new(text, Colour::Plain);
        table.push(vec![
            Cell::new("40.0 %", Colour::Hot),
            cell("1.00"),
            cell("Worker.run.<locals>.inner_function_with_a_name"),
            cell("/srv/application/packages/worker.py:41"),
        ]);
        table.push(vec![cell("1.0 %"), cell("0.1"), cell("日本\x1b[2J`|"), cell("x.py")]);
        table
    }

    #[test]
    fn fits_any_width() {
        for width in [40, 60, 80, 100, 200] {
            let shown = text(&table(), Style::Text { width: Some(width), colours: false });
            assert!(shown.lines().all(|line| line.width() <= width), "{width}:\n{shown}");
            assert_eq!(shown.contains("SECONDS"), width >= 72);
            assert!(shown.contains(".py:41") && !shown.contains('\x1b'), "{shown}");
        }
        let whole = text(&table(), Style::plain());
        assert!(
            whole.contains("Worker.run.<locals>.inner_function_with_a_name  /srv/application/packages/worker.py:41")
        );
        let narrow = text(&table(), Style::Text { width: Some(60), colours: false });
        let expected = [
            "  SELF  FUNCTION                   FILE",
            "40.0 %  …ner_function_with_a_name  …on/packages/worker.py:41",
            " 1.0 %  日本\\x1b[2J`|              x.py",
        ];
        assert_eq!(narrow.lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn local_functions_keep_the_name_they_are_in() {
        assert_eq!(cut("render.<locals>.<genexpr>", 25), "render.<locals>.<genexpr>");
        assert_eq!(cut("render.<locals>.<genexpr>", 20), "render.<genexpr>");
        assert_eq!(cut("render.<locals>.<genexpr>", 12), "…r.<genexpr>");
    }

    #[test]
    fn colours_only_where_wanted() {
        let shown = text(&table(), Style::Text { width: None, colours: true });
        assert!(shown.contains("\x1b[1;31m40.0 %\x1b[0m"), "{shown:?}");
    }

    #[test]
    fn markdown_shows_names_as_they_are() {
        let shown = text(&table(), Style::Markdown);
        assert!(shown.starts_with("| self | seconds | function | file |\n| ---: | ---: | --- | --- |\n"), "{shown}");
        assert!(shown.contains("`` 日本\\x1b[2J`\\| ``"), "{shown}");
    }
}
