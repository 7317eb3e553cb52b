//! A profile to a flame graph: an SVG, or an HTML page with it and its reversed view. Both need nothing else.
//!
//! `inferno` draws; search and zoom are its script's. Python code is warm, native code blue, the kernel grey-violet.

use super::label::{Kind, Label, roots};
use super::stacks::Counts;
use super::text::escape;
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
    by_thread: bool,
    html: bool,
}

impl<W: Write> FlamegraphSink<W> {
    /// Nothing is written to `out` before the end. `html`: a page with both views, else an SVG with one. `by_thread`
    /// puts threads at the root.
    pub fn new(out: W, by_thread: bool, html: bool) -> Self {
        Self { out, counts: Counts::default(), by_thread, html }
    }
}

impl<W: Write> Sink for FlamegraphSink<W> {
    fn sample(&mut self, profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.counts.add_shown(profile, sample);
        Ok(())
    }

    fn finish(&mut self, profile: &Profile, report: &Report) -> io::Result<()> {
        let mut graph = Graph::new(profile, &self.counts, self.by_thread, report);
        let mut out = io::BufWriter::new(&mut self.out);
        if self.html {
            let [flames, icicles] = [graph.svg(false)?, graph.svg(true)?];
            let title = xml(&graph.title);
            let caption = xml(&graph.caption);
            for (place, part) in PAGE.split("@@").enumerate() {
                match (place % 2, part) {
                    (0, text) => out.write_all(text.as_bytes())?,
                    (_, "title") => out.write_all(title.as_bytes())?,
                    (_, "caption") => out.write_all(caption.as_bytes())?,
                    (_, "flames") => out.write_all(script_text(&flames).as_bytes())?,
                    (_, "reversed") => out.write_all(script_text(&icicles).as_bytes())?,
                    (_, other) => unreachable!("the page has no part {other}"),
                }
            }
        } else {
            out.write_all(graph.svg(false)?.as_bytes())?;
        }
        out.flush()
    }
}

struct Graph {
    /// Root first, `;` between frames, then the count.
    lines: Vec<String>,
    colours: color::PaletteMap,
    title: String,
    caption: String,
}

impl Graph {
    fn new(profile: &Profile, counts: &Counts, by_thread: bool, report: &Report) -> Self {
        let mut colours = color::PaletteMap::default();
        // inferno's own root.
        colours.insert("", colour(Kind::Special, ""));
        let mut names: Vec<Option<String>> = vec![None; profile.frames.len()];
        let mut lines: HashMap<String, u64, RandomState> = HashMap::default();
        let mut total = 0;
        for (key, count) in counts.sorted() {
            total += count;
            let mut line = String::new();
            for root in roots(profile, ThreadId(key.thread), by_thread) {
                let name = frame_name(&root);
                colours.insert(&name, colour(Kind::Special, &name));
                push(&mut line, &name);
            }
            for frame in counts.stacks.get(key.stack).iter().rev() {
                let name = names[frame.0 as usize].get_or_insert_with(|| {
                    let label = Label::of(profile, profile.frames.get(*frame));
                    let name = frame_name(&label.to_text());
                    colours.insert(&name, colour(label.kind, &name));
                    name
                });
                push(&mut line, name);
            }
            if line.is_empty() {
                line.push_str("<no frames>");
            }
            *lines.entry(line).or_default() += count;
        }
        let mut lines: Vec<_> = lines.into_iter().map(|(line, count)| format!("{line} {count}")).collect();
        lines.sort_unstable();
        Self { lines, colours, title: title(profile), caption: caption(total, report) }
    }

    fn svg(&mut self, reversed: bool) -> io::Result<String> {
        let mut options = Options::default();
        options.title.clone_from(&self.title);
        options.subtitle = Some(self.caption.clone());
        options.palette_map = Some(&mut self.colours);
        options.text_truncate_direction = TextTruncateDirection::Right;
        options.hash = true;
        options.deterministic = true;
        options.reverse_stack_order = reversed;
        if reversed {
            options.direction = Direction::Inverted;
            options.title.push_str(": callers of leaves");
        }
        if self.lines.is_empty() {
            // inferno takes an empty profile for an error.
            return Ok(EMPTY.replace("@@", &xml(&format!("{}: {}", self.title, self.caption))));
        }
        let mut svg = Vec::new();
        flamegraph::from_lines(&mut options, self.lines.iter().map(String::as_str), &mut svg)?;
        String::from_utf8(svg).map_err(io::Error::other)
    }
}

const EMPTY: &str = "<?xml version=\"1.0\" standalone=\"no\"?>\n<svg version=\"1.1\" width=\"1200\" height=\"60\" \
     xmlns=\"http://www.w3.org/2000/svg\"><text x=\"10\" y=\"35\" font-family=\"monospace\">@@</text></svg>\n";

fn title(profile: &Profile) -> String {
    match &profile.processes[..] {
        [process] if process.pid != 0 => shown(&process_title(process)),
        [_] | [] => "Flame graph".to_owned(),
        processes => format!("{} processes", processes.len()),
    }
}

/// Totals and loss.
fn caption(total: u64, report: &Report) -> String {
    let lost: u64 = report.loss.values().sum();
    let mut caption = format!("{total} samples");
    if report.duration_s > 0.0 {
        caption.push_str(&format!(" in {:.1} s", report.duration_s));
    }
    if report.effective_rate_hz > 0.0 && report.effective_rate_hz < report.rate_hz {
        caption.push_str(&format!(" at {:.1} Hz on the mean", report.effective_rate_hz));
    } else if report.rate_hz > 0.0 {
        caption.push_str(&format!(" at {} Hz", report.rate_hz));
    }
    if report.cut {
        caption.push_str(", recovered: what was lost is unknown");
        return caption;
    }
    #[expect(clippy::cast_precision_loss, reason = "a share for people")]
    let share = if lost == 0 { 0.0 } else { lost as f64 * 100.0 / (total + lost) as f64 };
    caption.push_str(&format!(", {lost} lost ({share:.1} %)"));
    if let Some(not_fired) = report.not_fired.filter(|&count| count > 0) {
        caption.push_str(&format!(", about {not_fired} not taken"));
    }
    caption
}

fn push(line: &mut String, name: &str) {
    if !line.is_empty() {
        line.push(';');
    }
    line.push_str(name);
}

fn shown(name: &str) -> String {
    escape(name, |_| false).into_owned()
}

/// A name that inferno takes as it is: `;` separates frames, and a number at a line's end is a count.
fn frame_name(name: &str) -> String {
    let name = escape(name.trim(), |character| character == ';');
    match name.rsplit_once(' ') {
        Some((before, last)) if last.parse::<f64>().is_ok() => format!("{before}\u{a0}{last}"),
        _ if name.is_empty() => "?".to_owned(),
        _ if name.starts_with('#') => format!("\u{a0}{name}"),
        _ => name.into_owned(),
    }
}

/// One hue for each kind, its shade by the name.
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

fn xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// An SVG as the JSON string of a script element, which nothing in it can end.
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
        let mut sink = FlamegraphSink::new(Vec::new(), false, html);
        for stack in names {
            let frames: Vec<_> = stack.iter().map(|name| profile.special_frame(name)).collect();
            sink.sample(
                &profile,
                &Sample { thread: ThreadId(0), time_us: 0, status: 0, frames: &frames, merge: Merge::None },
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
    fn hues_tell_kinds() {
        for name in ["f", "g", "something_long"] {
            let (python, native) = (colour(Kind::Python, name), colour(Kind::Native, name));
            assert!(python.r > python.b && native.b > native.r);
        }
    }
}
