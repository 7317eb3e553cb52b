//! `ship --dry-run`: what would leave the host, and where it would go. Nothing is sent, and nothing is written.

use super::backend::{Backend, Parts};
use super::progress::Progress;
use super::spool::{Item, Opened, Spool};
use crate::net::push::Reason;
use crate::segment::Segment;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use tachyon::sinks::text::escape_controls;

/// Most examples of a label's values.
const EXAMPLES: usize = 4;
/// Most requests that are listed for each backend.
const REQUESTS: usize = 6;

/// What a backend would get.
struct Told<'a> {
    backend: &'a Backend,
    progress: Progress,
    segments: usize,
    samples: u64,
    requests: usize,
    bytes: usize,
    /// The first requests: bytes, and what they are.
    first: Vec<(usize, String)>,
    refused: BTreeMap<Reason, u64>,
}

/// Information about the host and its programs.
#[derive(Default)]
struct Content {
    /// Values of labels.
    labels: BTreeMap<String, BTreeSet<String>>,
    /// By file.
    functions: BTreeSet<(Arc<str>, Arc<str>)>,
}

/// Writes it out. One segment is in memory at a time: a spool may have days of them.
///
/// # Errors
/// When the spool cannot be read, or `out` fails.
pub fn run(
    spool: &mut Spool,
    state: &Path,
    backends: &[Backend],
    now_unix: f64,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let items = spool.look()?.items;
    writeln!(out, "Nothing is sent. In {}: {}.", shown(spool.directory()), count(items.len(), "file"))?;
    let of_all = backends.iter().map(|backend| Told::new(backend, state));
    let mut of_all = of_all.collect::<anyhow::Result<Vec<_>>>()?;
    let mut content = Content::default();
    for item in &items {
        if of_all.iter().all(|told| told.progress.has(item)) {
            continue;
        }
        let Opened::Segment(segment) = spool.read(item) else { continue };
        for told in of_all.iter_mut().filter(|told| !told.progress.has(item)) {
            told.add(spool, item, &segment, now_unix)?;
        }
        content.add(&segment);
    }
    for told in &of_all {
        told.write(out)?;
    }
    for (name, why) in spool.news() {
        writeln!(out, "\nwould be set aside: {name}: {why}")?;
    }
    content.write(out)?;
    Ok(())
}

impl<'a> Told<'a> {
    fn new(backend: &'a Backend, state: &Path) -> anyhow::Result<Self> {
        let progress = Progress::open(state, &backend.name)?;
        let (first, refused) = (Vec::new(), BTreeMap::new());
        Ok(Self { backend, progress, segments: 0, samples: 0, requests: 0, bytes: 0, first, refused })
    }

    fn add(&mut self, spool: &Spool, item: &Item, segment: &Segment, now_unix: f64) -> anyhow::Result<()> {
        let Parts { mut parts, refused } = self.backend.encode(segment, now_unix)?;
        parts.extend(self.backend.files(spool, item, segment)?);
        self.segments += 1;
        self.samples += segment.sample_count;
        self.requests += parts.len();
        self.bytes += parts.iter().map(|part| part.bytes).sum::<usize>();
        let more = REQUESTS.saturating_sub(self.first.len());
        self.first.extend(parts.into_iter().take(more).map(|part| (part.bytes, part.what)));
        for (reason, count) in refused {
            *self.refused.entry(reason).or_default() += count;
        }
        Ok(())
    }

    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let number = |samples: u64| count(usize::try_from(samples).unwrap_or(usize::MAX), "sample");
        writeln!(out, "\n{}", escape_controls(&self.backend.name))?;
        writeln!(
            out,
            "  would get {} with {}: {}, {}",
            count(self.segments, "segment"),
            number(self.samples),
            count(self.requests, "request"),
            size(self.bytes),
        )?;
        for (bytes, what) in &self.first {
            writeln!(out, "  {:>10}  {}", size(*bytes), escape_controls(what))?;
        }
        if self.requests > self.first.len() {
            writeln!(out, "  {:>10}  and {} more", "…", self.requests - self.first.len())?;
        }
        for (reason, samples) in &self.refused {
            writeln!(out, "  it would not get {}: {}", number(*samples), reason.name())?;
        }
        Ok(())
    }
}

impl Content {
    fn add(&mut self, segment: &Segment) {
        let mut told = BTreeSet::new();
        for row in &segment.samples {
            if !told.insert((&row.host, &row.service, &row.labels)) {
                continue;
            }
            for (name, value) in row.labels.by_name(&row.host, &row.service) {
                self.labels.entry(name).or_default().insert(value);
            }
        }
        let names = segment.frames.values().map(|frame| (Arc::clone(&frame.file), Arc::clone(&frame.function)));
        self.functions.extend(names);
    }

    /// Writes labels and names: what matters for privacy.
    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        if self.labels.is_empty() {
            return Ok(());
        }
        writeln!(out, "\nWhat tells about the host and its programs:")?;
        let width = self.labels.keys().map(|name| escape_controls(name).chars().count()).max().unwrap_or(0);
        for (name, values) in &self.labels {
            let examples: Vec<String> =
                values.iter().take(EXAMPLES).map(|value| escape_controls(&short(value)).into_owned()).collect();
            let more = if values.len() > EXAMPLES { ", …" } else { "" };
            let (name, number) = (escape_controls(name), values.len());
            writeln!(out, "  {name:width$}  {number:>6}  {}{more}", examples.join(", "))?;
        }
        let files: BTreeSet<&Arc<str>> = self.functions.iter().map(|(file, _)| file).collect();
        let example = files.iter().find(|file| file.starts_with('/'));
        writeln!(
            out,
            "  and names of {} in {}{}",
            count(self.functions.len(), "function"),
            count(files.len(), "file"),
            example.map_or_else(String::new, |file| format!(", such as {}", escape_controls(&short(file)))),
        )?;
        writeln!(
            out,
            "No source text, values of variables, or command lines, unless a label has them. Rules of agent.toml drop labels."
        )
    }
}

fn short(text: &str) -> String {
    let mut characters = text.chars();
    let short: String = characters.by_ref().take(40).collect();
    if characters.next().is_some() { short + "…" } else { short }
}

fn count(number: usize, what: &str) -> String {
    let number_of = indicatif::HumanCount(number as u64);
    if number == 1 { format!("1 {what}") } else { format!("{number_of} {what}s") }
}

fn size(bytes: usize) -> String {
    bytesize::ByteSize(bytes as u64).display().si().to_string()
}

fn shown(path: &Path) -> String {
    escape_controls(&path.display().to_string()).into_owned()
}
