//! Draws the model: what is on the screen, at any size. Names of programs are made harmless before they are shown.

use super::keys::HELP;
use super::model::{Mode, Model, Tab, TableRow};
use crate::cli::escape::escape;
use crate::cli::table::{Colour, cut, heat, percent};
use indicatif::HumanCount;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;
use unicode_width::UnicodeWidthStr as _;

/// Widths of the four columns of numbers.
const NUMBERS: [usize; 4] = [8, 9, 10, 11];
/// Cells of the histories.
const HISTORY: usize = 30;
/// A screen at least this wide has room for a history in each row.
const ROOM_FOR_HISTORIES: u16 = 120;
/// Most native functions shown under a function.
const NATIVE_SHOWN: usize = 3;
/// Narrowest name of a row.
const NARROWEST: usize = 10;

const LEVELS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Draws all of it.
pub fn draw(frame: &mut Frame<'_>, model: &Model, colours: bool) {
    let paint = Paint { colours };
    let whole = frame.area();
    if *model.mode() == Mode::Help {
        return draw_help(frame, whole, paint);
    }
    let [head, heading, table, foot] =
        Layout::vertical([Constraint::Length(4), Constraint::Length(1), Constraint::Fill(1), Constraint::Length(1)])
            .areas(whole);
    frame.render_widget(Paragraph::new(head_lines(model, head, paint)), head);
    let columns = Columns::of(whole.width);
    frame.render_widget(Paragraph::new(columns.heading(model, paint)), heading);
    draw_table(frame, table, model, &columns, paint);
    frame.render_widget(Paragraph::new(foot_line(model, foot, paint)), foot);
}

/// Styles, without colours if they are not wanted.
#[derive(Clone, Copy)]
struct Paint {
    colours: bool,
}

impl Paint {
    fn colour(self, colour: Color) -> Style {
        if self.colours { Style::new().fg(colour) } else { Style::new() }
    }

    fn heat(self, share: f64) -> Style {
        match heat(share) {
            Colour::Hot => self.colour(Color::Red).add_modifier(Modifier::BOLD),
            Colour::Warm => self.colour(Color::Yellow),
            _ => Style::new(),
        }
    }

    fn bold(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    fn dim(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    fn marked(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }
}

fn head_lines(model: &Model, area: Rect, paint: Paint) -> Vec<Line<'static>> {
    let width = usize::from(area.width);
    let (window, whole) = model.shares();
    let state = match (model.is_over(), model.paused()) {
        (_, true) => " PAUSED ",
        (Some(_), _) => " ENDED ",
        _ => "",
    };
    let after = format!(" · {} Hz · {}", rate(model.title().rate_hz), clock(whole.seconds));
    let room = width.saturating_sub("tachyon-bpf top · ".width() + after.width() + state.width() + 1);
    let mut title = vec![
        Span::styled("tachyon-bpf top", paint.bold()),
        Span::raw(" · "),
        Span::raw(cut(&model.title().what, room.max(1))),
        Span::raw(after),
    ];
    if !state.is_empty() {
        title.extend([Span::raw(" "), Span::styled(state, paint.marked())]);
    }
    let history = model.history();
    let cpus: Vec<f64> = history.iter().map(|(cpus, _)| *cpus).collect();
    let most = cpus.iter().copied().fold(1.0, f64::max);
    let mut texts = Vec::new();
    if let Some(gil) = window.gil {
        texts.push(format!("GIL {}", percent(gil)));
    }
    if window.waiting > 0.0 {
        texts.push(format!("waiting {}", percent(window.waiting)));
    }
    texts.push(format!("GC {}", percent(window.gc)));
    if window.native > 0.0 {
        texts.push(format!("native {}", percent(window.native)));
    }
    if window.exceptions > 0.0 {
        texts.push(format!("exceptions {}", percent(window.exceptions)));
    }
    let (in_use, texts) = (format!("CPUs {:.2} ", window.cpus()), format!("  {}", texts.join("  ")));
    let cells = HISTORY.min(model.steps_a_minute()).min(width.saturating_sub(in_use.width() + texts.width()));
    let history = sparkline(&cpus, cells, model.steps_a_minute(), most);
    let shares =
        vec![Span::styled(in_use, paint.bold()), Span::styled(history, paint.colour(Color::Green)), Span::raw(texts)];
    let counts = format!(
        "{:.0} s: {} samples · all: {} · {} · profiler {} of a CPU",
        model.window(),
        HumanCount(window.sum.samples),
        HumanCount(whole.sum.samples),
        if whole.lost == 0 { "none lost".to_owned() } else { format!("{} lost", HumanCount(whole.lost)) },
        percent(window.profiler()),
    );
    vec![
        Line::from(title),
        Line::from(shares),
        Line::from(Span::styled(counts, paint.dim())),
        tabs(model, paint, width),
    ]
}

fn tabs(model: &Model, paint: Paint, width: usize) -> Line<'static> {
    let mut spans = vec![Span::styled("Tab ", paint.dim())];
    for tab in model.tabs() {
        let style = if tab == model.tab() { paint.marked() } else { Style::new() };
        spans.push(Span::styled(format!(" {} ", tab.name()), style));
    }
    let mut rest = vec![match model.counts() {
        (threads, _) if model.tab().is_group() => format!("{threads} threads met"),
        _ if model.tab() == Tab::Tasks => format!("{} tasks", model.rows().iter().filter(|row| row.is_task()).count()),
        _ => escape(&model.scope_name()).into_owned(),
    }];
    if !model.filter().is_empty() {
        rest.push(format!("/{}/", escape(model.filter())));
    }
    if model.native() && model.tab().is_code() {
        rest.push("with native code".to_owned());
    }
    let used: usize = spans.iter().map(Span::width).sum();
    spans.push(Span::raw(format!("  {}", cut(&rest.join(" · "), width.saturating_sub(used + 2).max(1)))));
    Line::from(spans)
}

/// How wide the columns are.
struct Columns {
    name: usize,
    place: usize,
    history: usize,
}

impl Columns {
    fn of(width: u16) -> Self {
        let history = if width >= ROOM_FOR_HISTORIES { HISTORY } else { 0 };
        let used = NUMBERS.iter().sum::<usize>() + 1 + if history > 0 { history + 2 } else { 0 };
        let room = usize::from(width).saturating_sub(used);
        let name = (room / 2).max(NARROWEST);
        Self { name, place: room.saturating_sub(name + 2), history }
    }

    fn heading(&self, model: &Model, paint: Paint) -> Line<'static> {
        let mut spans = Vec::new();
        for (at, (text, width)) in model.tab().headings().into_iter().zip(NUMBERS).enumerate() {
            let (mark, style) = if at == model.sorted_by() { ("▼", paint.bold()) } else { ("", paint.dim()) };
            spans.push(Span::styled(format!("{:>width$}", format!("{mark}{text} ")), style));
        }
        let [name, place] = match model.tab() {
            Tab::Functions => ["FUNCTION", "FILE, HOTTEST LINE"],
            Tab::Lines => ["FUNCTION", "LINE"],
            Tab::Threads => ["THREAD", "PROCESS"],
            Tab::Processes => ["PROCESS", ""],
            Tab::Tasks => ["TASK", "PROCESS"],
        };
        let history =
            if self.history > 0 { format!(" {} ", padded("LAST MINUTE", self.history)) } else { String::new() };
        let text = format!("{history} {}  {}", padded(name, self.name), padded(place, self.place));
        spans.push(Span::styled(text, paint.dim()));
        Line::from(spans)
    }

    fn row(&self, row: &TableRow, history: Option<&str>, selected: bool, tab: Tab, paint: Paint) -> Line<'static> {
        let mut spans = Vec::new();
        for (at, (number, width)) in row.numbers.iter().zip(NUMBERS).enumerate() {
            let text = match (number, at) {
                (None, _) => "–".to_owned(),
                (Some(share), 0 | 1) => percent(*share),
                (Some(seconds), _) => format!("{seconds:.2}"),
            };
            let style = match number {
                Some(share) if at == 0 && !tab.is_group() => paint.heat(*share),
                _ => Style::new(),
            };
            spans.push(Span::styled(format!("{:>width$}", format!("{text} ")), style));
        }
        if let Some(history) = history {
            spans.push(Span::styled(format!(" {history} "), paint.colour(Color::Green)));
        }
        let (name, place) = (padded(&escape(&row.name), self.name), padded(&escape(&row.place), self.place));
        spans.push(Span::raw(format!(" {name}  ")));
        spans.push(Span::styled(place, paint.dim()));
        let line = Line::from(spans);
        if selected { line.style(paint.marked()) } else { line }
    }

    fn native(&self, (share, symbol, object): &(f64, String, String), paint: Paint) -> Line<'static> {
        let before: usize = NUMBERS[1..].iter().sum::<usize>() + if self.history > 0 { self.history + 2 } else { 0 };
        let name = padded(&format!("  {}", escape(symbol)), self.name);
        let place = padded(&escape(object), self.place);
        let share = format!("{:>width$}", format!("{} ", percent(*share)), width = NUMBERS[0]);
        Line::from(Span::styled(format!("{share}{} {name}  {place}", " ".repeat(before)), paint.dim()))
    }
}

fn draw_table(frame: &mut Frame<'_>, area: Rect, model: &Model, columns: &Columns, paint: Paint) {
    let height = usize::from(area.height);
    let natives = |row: &TableRow| {
        if model.native() && model.tab().is_code() { row.native.len().min(NATIVE_SHOWN) } else { 0 }
    };
    // The first row from which the selected one is still visible; its native code may not fit.
    let (rows, selected) = (model.rows(), model.selected());
    let mut first = selected;
    let mut used = 1;
    while let Some(before) = first.checked_sub(1) {
        used += 1 + natives(&rows[before]);
        if used > height {
            break;
        }
        first = before;
    }
    let shown: Vec<TableRow> = rows.iter().skip(first).take(height).cloned().collect();
    if shown.is_empty() {
        frame.render_widget(Paragraph::new(Line::styled(nothing(model), paint.dim())), area);
        return;
    }
    let minute = model.steps_a_minute();
    let histories = (columns.history > 0).then(|| model.histories(&shown));
    let most = model.history().iter().map(|(cpus, _)| *cpus).fold(0.0, f64::max);
    let mut lines = Vec::new();
    for (at, row) in shown.iter().enumerate() {
        let history = histories.as_ref().map(|all| sparkline(&all[at], columns.history, minute, most));
        lines.push(columns.row(row, history.as_deref(), first + at == selected, model.tab(), paint));
        lines.extend(row.native.iter().take(natives(row)).map(|native| columns.native(native, paint)));
    }
    lines.truncate(height);
    frame.render_widget(Paragraph::new(lines), area);
}

/// Why a table is empty.
fn nothing(model: &Model) -> String {
    let because = match model.is_over() {
        _ if model.is_empty() => "starting",
        _ if !model.filter().is_empty() => "no row matches: Esc shows all",
        Some(why) => why,
        None => "no samples yet: none of its threads ran on a CPU",
    };
    format!("  {because}")
}

fn foot_line(model: &Model, area: Rect, paint: Paint) -> Line<'static> {
    let width = usize::from(area.width);
    if let Mode::Typing(text) = model.mode() {
        let mut spans =
            vec![Span::styled(format!("/{}", escape(text)), paint.bold()), Span::styled(" ", paint.marked())];
        let hint = model.said().unwrap_or("Enter keeps it, Esc shows all");
        spans.push(Span::styled(format!("  {}", escape(hint)), paint.dim()));
        return Line::from(spans);
    }
    if let Some(said) = model.said() {
        return Line::styled(cut(said, width.max(1)), paint.bold());
    }
    if let (Some(over), false) = (model.is_over(), model.paused()) {
        return Line::styled(cut(&format!("{over} · w writes a file · q quits"), width.max(1)), paint.bold());
    }
    let keys = [
        ("q", "quit"),
        ("p", "pause"),
        ("1-4", "sort"),
        ("/", "filter"),
        ("←→", "threads"),
        ("n", "native"),
        ("w", "write"),
        ("?", "help"),
    ];
    let mut spans = Vec::new();
    for (key, what) in keys {
        spans.push(Span::styled(key, paint.bold()));
        spans.push(Span::raw(format!(" {what}  ")));
    }
    Line::from(spans)
}

fn draw_help(frame: &mut Frame<'_>, area: Rect, paint: Paint) {
    let mut lines = vec![Line::styled("Keys", paint.bold())];
    for (keys, what) in HELP {
        lines.push(Line::from(vec![Span::styled(format!("  {keys:<14}"), paint.bold()), Span::raw(what)]));
    }
    lines.push(Line::raw(""));
    let about = [
        "Columns 1 and 2 are of the sliding window, 3 and 4 (seconds of CPU time) since",
        "the start. SELF: in the function and in native code it called. TOTAL: also in",
        "Python functions it called. CPU and GIL: share of one CPU. Threads that wait are",
        "sampled with --wall only, and their time is a line's too. Any key goes back.",
    ];
    lines.extend(about.into_iter().map(Line::raw));
    frame.render_widget(Paragraph::new(lines), area);
}

/// A text as wide as its column.
fn padded(text: &str, width: usize) -> String {
    if width == 0 {
        return String::new();
    }
    let text = cut(text, width);
    let room = width.saturating_sub(text.width());
    text + &" ".repeat(room)
}

/// The last minute in that many cells, newest last; a full cell stands for `most`.
fn sparkline(steps: &[f64], cells: usize, minute: usize, most: f64) -> String {
    let each = minute.div_ceil(cells.max(1)).max(1);
    let cell = |steps: &[f64]| {
        let mean = steps.iter().sum::<f64>() / steps.len() as f64;
        level(if most > 0.0 { mean / most } else { 0.0 })
    };
    let newest_first: Vec<char> = steps.rchunks(each).take(cells).map(cell).collect();
    let shown: String = newest_first.iter().rev().collect();
    " ".repeat(cells.saturating_sub(newest_first.len())) + &shown
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is between 0 and 8")]
fn level(share: f64) -> char {
    // A little must look like more than nothing.
    let least = if share > 0.0 { 1.0 } else { 0.0 };
    LEVELS[(share * 8.0).round().clamp(least, 8.0) as usize]
}

fn rate(rate_hz: f64) -> String {
    if rate_hz.fract() < 0.005 { format!("{rate_hz:.0}") } else { format!("{rate_hz:.1}") }
}

/// `0:07`, `1:02:03`.
fn clock(seconds: f64) -> String {
    crate::cli::progress::clock(std::time::Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

#[cfg(test)]
mod tests;
