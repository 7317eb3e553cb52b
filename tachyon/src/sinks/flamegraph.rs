//! Writes a profile as a flame graph: an SVG, or an HTML page with it and its reversed view. Both are self-contained.
//!
//! `inferno` draws it; search and zoom come from its script. Python code has warm colours, native code is blue, the
//! kernel grey-violet.

use super::label::{Kind, Label, RootOptions, Roots};
use super::need::Amounts;
use super::stacks::Counts;
use super::text::{cut, escape};
use super::{Sink, process_title};
use crate::profile::{Profile, Sample, ThreadId};
use crate::report::Report;
use foldhash::fast::RandomState;
use inferno::flamegraph::{self, Direction, Options, TextTruncateDirection, color};
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};
use std::io::{self, Write};

/// The page around the two graphs.
const PAGE: &str = include_str!("flamegraph.html");

/// Sums equal stacks up and writes the graph at the end. Memory grows with the number of distinct stacks.
pub struct FlamegraphSink<W> {
    out: W,
    counts: Counts,
    roots: RootOptions,
    html: bool,
    /// Most bytes of text that all stacks given to inferno may have, counting [`BOX`] for each box.
    most_bytes: usize,
}

impl<W: Write> FlamegraphSink<W> {
    /// Nothing is written to `out` before the end. `html`: a page with both views, otherwise an SVG with one. `roots`:
    /// what goes below the stacks.
    pub fn new(out: W, roots: RootOptions, html: bool) -> Self {
        Self { out, counts: Counts::default(), roots, html, most_bytes: MOST_BYTES }
    }
}

impl<W: Write> Sink for FlamegraphSink<W> {
    fn sample(&mut self, profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.counts.add_shown(profile, sample, 1);
        Ok(())
    }

    fn repeated(&mut self, profile: &Profile, sample: &Sample<'_>, times_us: &[u64]) -> io::Result<()> {
        self.counts.add_shown(profile, sample, times_us.len());
        Ok(())
    }

    fn limit(&mut self, memory_bytes: u64) {
        let share = usize::try_from(memory_bytes / 64).unwrap_or(usize::MAX);
        self.most_bytes = share.clamp(LEAST_BYTES, MOST_BYTES);
    }

    fn finish_bytes(&self, profile: &Profile) -> u64 {
        let amounts = Amounts::of(profile, &self.counts.stacks);
        // A frame is shown with its file.
        let name = (2 * amounts.text / amounts.frames.max(1) + 16).min(LONGEST_NAME as u64);
        let text = amounts.stack_frames.saturating_mul(name + BOX as u64).min(self.most_bytes as u64);
        amounts.sum([100, 6, 300, 1, 600]) + TIMES * text
    }

    fn finish(&mut self, profile: &Profile, report: &Report) -> io::Result<()> {
        let mut graph = Graph::new(profile, &self.counts, self.roots, report);
        graph.most_bytes = self.most_bytes;
        let mut out = io::BufWriter::new(&mut self.out);
        if self.html {
            let title = xml(&graph.title);
            let caption = xml(&graph.caption);
            for (place, part) in PAGE.split("@@").enumerate() {
                match (place % 2, part) {
                    (0, text) => out.write_all(text.as_bytes())?,
                    (_, "title") => out.write_all(title.as_bytes())?,
                    (_, "caption") => out.write_all(caption.as_bytes())?,
                    (_, "flames") => out.write_all(script_text(&graph.svg(View::Flames)?).as_bytes())?,
                    (_, "reversed") => out.write_all(script_text(&graph.svg(View::Reversed)?).as_bytes())?,
                    (_, other) => unreachable!("the page has no part {other}"),
                }
            }
        } else {
            out.write_all(graph.svg(View::Icicles)?.as_bytes())?;
        }
        out.flush()
    }
}

/// Which way up a graph is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum View {
    /// Roots at the bottom, which is where the page opens.
    Flames,
    /// Roots at the top, which is where viewers open a drawing.
    Icicles,
    /// Leaves at the top, their callers below.
    Reversed,
}

/// Most bytes of a name: boxes show far less, and the line with details of a box is no wider.
const LONGEST_NAME: usize = 160;
/// What a box takes besides its name, in bytes of text.
const BOX: usize = 48;
/// [`FlamegraphSink::most_bytes`]: inferno needs fourteen times as much while it draws, and a browser some more.
const MOST_BYTES: usize = 16 << 20;
const LEAST_BYTES: usize = 1 << 20;
const TIMES: u64 = 14;
/// The share of all samples below which inferno leaves a box out, as a divisor: a hundredth of a percent.
const NARROWEST: u64 = 10_000;

struct Graph {
    names: Vec<String>,
    /// Names of frames, root first, and how often.
    stacks: Vec<(Box<[u32]>, u64)>,
    total: u64,
    colours: color::PaletteMap,
    title: String,
    caption: String,
    most_bytes: usize,
}

impl Graph {
    fn new(profile: &Profile, counts: &Counts, roots: RootOptions, report: &Report) -> Self {
        let mut colours = color::PaletteMap::default();
        // inferno's own root.
        colours.insert("", colour(Kind::Special, ""));
        let mut names = Names::default();
        let mut of_frames: Vec<Option<u32>> = vec![None; profile.frames.len()];
        let mut stacks: HashMap<Box<[u32]>, u64, RandomState> = HashMap::default();
        let (mut total, mut stack) = (0, Vec::new());
        let roots = Roots::new(profile, roots);
        for (key, count) in counts.sorted() {
            total += count;
            stack.clear();
            for root in roots.of(ThreadId(key.thread)) {
                stack.push(names.id(&mut colours, Kind::Special, &root));
            }
            for frame in counts.stacks.get(key.stack).iter().rev() {
                stack.push(*of_frames[frame.0 as usize].get_or_insert_with(|| {
                    let label = Label::of(profile, profile.frames.get(*frame));
                    names.id(&mut colours, label.kind, &label.to_text())
                }));
            }
            if stack.is_empty() {
                stack.push(names.id(&mut colours, Kind::Special, "<no frames>"));
            }
            match stacks.get_mut(stack.as_slice()) {
                Some(sum) => *sum += count,
                None => drop(stacks.insert(stack.as_slice().into(), count)),
            }
        }
        let (stacks, names) = (stacks.into_iter().collect(), names.texts);
        Self {
            names,
            stacks,
            total,
            colours,
            title: title(profile),
            caption: caption(total, report),
            most_bytes: MOST_BYTES,
        }
    }

    fn svg(&mut self, view: View) -> io::Result<String> {
        let mut options = Options::default();
        options.title.clone_from(&self.title);
        options.subtitle = Some(self.caption.clone());
        options.text_truncate_direction = TextTruncateDirection::Right;
        options.hash = true;
        options.deterministic = true;
        if view != View::Flames {
            options.direction = Direction::Inverted;
        }
        if view == View::Reversed {
            options.title.push_str(": callers of leaves");
            self.stacks.iter_mut().for_each(|(stack, _)| stack.reverse());
        }
        let lines = self.lines();
        if view == View::Reversed {
            self.stacks.iter_mut().for_each(|(stack, _)| stack.reverse());
        }
        if lines.is_empty() {
            // inferno treats an empty profile as an error.
            return Ok(EMPTY.replace("@@", &xml(&format!("{}: {}", self.title, self.caption))));
        }
        options.palette_map = Some(&mut self.colours);
        let mut svg = Vec::new();
        flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), &mut svg)?;
        String::from_utf8(svg).map_err(io::Error::other)
    }

    /// What inferno draws: stacks in order, each with its count. Frames too rare to be drawn count for their callers, so
    /// the width of what is drawn does not change; with very many stacks, rare ones are left out sooner.
    fn lines(&mut self) -> Vec<String> {
        self.stacks.sort_unstable();
        let mut least = self.total.div_ceil(NARROWEST);
        loop {
            let (path, lines, most_bytes) = (Vec::new(), Vec::new(), self.most_bytes);
            let mut lines = Lines { names: &self.names, least, path, bytes: 0, lines, most_bytes };
            lines.put(&self.stacks, 0);
            if lines.bytes <= self.most_bytes || least >= self.total {
                lines.lines.sort_unstable();
                return lines.lines;
            }
            least = 2 * least.max(1);
        }
    }
}

/// Stacks on their way to inferno.
struct Lines<'a> {
    names: &'a [String],
    /// Fewest samples of a frame that is shown.
    least: u64,
    path: Vec<u32>,
    bytes: usize,
    lines: Vec<String>,
    most_bytes: usize,
}

impl Lines<'_> {
    /// Adds the lines of stacks, sorted, that are the same up to `depth`. What is too rare counts here.
    fn put(&mut self, stacks: &[(Box<[u32]>, u64)], depth: usize) {
        let mut own = 0;
        for group in stacks.chunk_by(|(a, _), (b, _)| a.get(depth) == b.get(depth)) {
            let count: u64 = group.iter().map(|(_, count)| count).sum();
            match group.first().and_then(|(stack, _)| stack.get(depth)) {
                Some(&name) if count >= self.least || depth == 0 => {
                    self.path.push(name);
                    self.bytes += BOX;
                    self.put(group, depth + 1);
                    self.path.pop();
                }
                _ => own += count,
            }
        }
        if own > 0 {
            let names: Vec<&str> = self.path.iter().map(|&name| self.names[name as usize].as_str()).collect();
            self.bytes += names.iter().map(|name| name.len() + 1).sum::<usize>();
            // Beyond that, only the size matters.
            if self.bytes <= self.most_bytes {
                self.lines.push(format!("{} {own}", names.join(";")));
            }
        }
    }
}

/// Names as inferno gets them, each once.
#[derive(Default)]
struct Names {
    texts: Vec<String>,
    ids: HashMap<String, u32, RandomState>,
}

impl Names {
    fn id(&mut self, colours: &mut color::PaletteMap, kind: Kind, name: &str) -> u32 {
        let name = frame_name(&cut(name, LONGEST_NAME));
        if let Some(&id) = self.ids.get(&name) {
            return id;
        }
        colours.insert(&name, colour(kind, &name));
        let id = u32::try_from(self.texts.len()).expect("fewer than 2^32 names fit in memory");
        self.texts.push(name.clone());
        self.ids.insert(name, id);
        id
    }
}

const EMPTY: &str = "<?xml version=\"1.0\" standalone=\"no\"?>\n<svg version=\"1.1\" width=\"1200\" height=\"60\" \
     xmlns=\"http://www.w3.org/2000/svg\"><text x=\"10\" y=\"35\" font-family=\"monospace\">@@</text></svg>\n";

pub(super) fn title(profile: &Profile) -> String {
    match &profile.processes[..] {
        [process] if process.pid != 0 => shown(&process_title(process)),
        [_] | [] => "Flame graph".to_owned(),
        processes => format!("{} processes", processes.len()),
    }
}

/// Totals and loss.
pub(super) fn caption(total: u64, report: &Report) -> String {
    let lost: u64 = report.loss.values().sum();
    let mut caption = format!("{total} samples");
    if report.duration_s > 0.0 {
        caption.push_str(&format!(" in {:.1} s", report.duration_s));
    }
    if !report.events.is_empty() {
        caption.push_str(&format!(" of {}", report.event));
    } else if report.effective_rate_hz > 0.0 && report.effective_rate_hz < report.rate_hz {
        caption.push_str(&format!(" at {:.1} Hz on the mean", report.effective_rate_hz));
    } else if report.rate_hz > 0.0 {
        // Intervals in other programs' files are rounded.
        caption.push_str(&format!(" at {} Hz", (report.rate_hz * 10.0).round() / 10.0));
    }
    if report.cut {
        caption.push_str(", recovered: what was lost is unknown");
        return caption;
    }
    #[expect(clippy::cast_precision_loss, reason = "a share for people")]
    let share = if lost == 0 { 0.0 } else { lost as f64 * 100.0 / (total + lost) as f64 };
    caption.push_str(&format!(", {lost} lost ({share:.1} %)"));
    if let Some((missed, _)) = report.missed() {
        caption.push_str(&format!(", about {missed} missed"));
    }
    caption
}

fn shown(name: &str) -> String {
    escape(&cut(name, LONGEST_NAME), |_| false).into_owned()
}

/// A name that inferno takes unchanged: `;` separates frames, and a number at a line's end is a count.
fn frame_name(name: &str) -> String {
    let name = escape(name.trim(), |character| character == ';');
    match name.rsplit_once(' ') {
        Some((before, last)) if last.parse::<f64>().is_ok() => format!("{before}\u{a0}{last}"),
        _ if name.is_empty() => "?".to_owned(),
        _ if name.starts_with('#') => format!("\u{a0}{name}"),
        _ => name.into_owned(),
    }
}

/// One hue for each kind, with the shade chosen by the name.
fn colour(kind: Kind, name: &str) -> color::Color {
    let hash = foldhash::fast::FixedState::default().hash_one(Bytes(name.as_bytes()));
    let shade = |low: u8, width: u8, shift: u32| low + u8::try_from((hash >> shift) % u64::from(width)).unwrap_or(0);
    match kind {
        Kind::Python => color::Color { r: shade(225, 30, 0), g: shade(120, 100, 8), b: shade(40, 40, 16) },
        Kind::Native => color::Color { r: shade(80, 50, 0), g: shade(150, 50, 8), b: shade(215, 40, 16) },
        Kind::Kernel => color::Color { r: shade(170, 30, 0), g: shade(150, 30, 8), b: shade(200, 40, 16) },
        Kind::Special => color::Color { r: shade(190, 25, 0), g: shade(190, 25, 0), b: shade(190, 25, 0) },
    }
}

/// Bytes without the length that slices put before them.
struct Bytes<'a>(&'a [u8]);

impl Hash for Bytes<'_> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        state.write(self.0);
    }
}

pub(super) fn xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// An SVG as a JSON string inside a script element, which nothing in it can close.
fn script_text(svg: &str) -> String {
    let text = serde_json::to_string(svg).expect("a string becomes JSON");
    text.replace('<', "\\u003c")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Merge, Process, Thread};

    fn written(html: bool, names: &[&[&str]]) -> String {
        let mut profile = Profile::default();
        profile.processes.push(Process { pid: 9, comm: "a<b".into(), ..Process::default() });
        profile.threads.push(Thread { ns_tid: 5, ..Thread::default() });
        let mut sink = FlamegraphSink::new(Vec::new(), RootOptions::default(), html);
        for stack in names {
            let frames: Vec<_> = stack.iter().map(|name| profile.special_frame(name)).collect();
            sink.sample(
                &profile,
                &Sample { thread: ThreadId(0), time_us: 0, status: 0, frames: &frames, merge: Merge::None, work: None },
            )
            .unwrap();
        }
        let report = Report { loss: [("ring_full".to_owned(), 2)].into(), duration_s: 1.0, ..Report::default() };
        sink.finish(&profile, &report).unwrap();
        String::from_utf8(sink.out).unwrap()
    }

    #[test]
    fn names_and_caption() {
        let svg = written(false, &[&["op 5", "a;b"], &["</script>", "libz.so!deflate"]]);
        for text in ["a&lt;b (9)", "2 samples in 1.0 s, 2 lost (50.0 %)", "op\u{a0}5 (1 samples", "a\\x3bb (1 samples"]
        {
            assert!(svg.contains(text), "{text}");
        }
        assert!(svg.contains("&lt;/script&gt;"));
    }

    #[test]
    fn page_is_whole() {
        let page = written(true, &[&["</script>"]]);
        assert!(!page.contains("@@"));
        assert!(page.contains("\\u003c/script>") || page.contains("&lt;/script"));
        assert!(page.contains(": callers of leaves"));
        for html in [false, true] {
            assert!(written(html, &[]).contains("0 samples"));
            assert!(written(html, &[&[]]).contains("no frames"));
        }
    }

    #[test]
    fn few_samples_with_long_names_make_a_small_picture() {
        let names: Vec<String> = (0..256).map(|number| format!("{}{number}", "n".repeat(60_000))).collect();
        let stack: Vec<&str> = names.iter().map(String::as_str).collect();
        let stacks: Vec<&[&str]> = (0..10).map(|number| &stack[number..]).collect();
        let svg = written(false, &stacks);
        // Whole names would take 300 MB.
        assert!(svg.len() < 10 * 256 * 1000 && svg.contains("…#"), "{} bytes", svg.len());
        assert!(svg.contains("10 samples in"));
    }

    #[test]
    fn what_is_too_rare_to_be_drawn_counts_for_its_caller() {
        let names: Vec<String> = ["main", "often", "rare", "leaf"].map(str::to_owned).into();
        let put = |least, counts: [u64; 3]| {
            let paths: [&[u32]; 3] = [&[0], &[0, 1], &[0, 2, 3]];
            let stacks: Vec<_> = paths.into_iter().map(Into::into).zip(counts).collect();
            let (path, text) = (Vec::new(), Vec::new());
            let mut lines = Lines { names: &names, least, path, bytes: 0, lines: text, most_bytes: MOST_BYTES };
            lines.put(&stacks, 0);
            lines.lines.sort();
            lines.lines
        };
        assert_eq!(put(0, [5, 90, 1]), ["main 5", "main;often 90", "main;rare;leaf 1"]);
        assert_eq!(put(2, [5, 90, 1]), ["main 6", "main;often 90"]);
        assert_eq!(put(99, [5, 90, 1]), ["main 96"], "roots stay");
    }

    #[test]
    fn hues_tell_kinds() {
        for name in ["f", "g", "something_long"] {
            let (python, native) = (colour(Kind::Python, name), colour(Kind::Native, name));
            assert!(python.r > python.b && native.b > native.r);
        }
    }
}
