//! `ship --dry-run`: what would leave the host, and to whom. Nothing is sent, and nothing is written.

use super::backend::{Backend, Parts};
use super::progress::Progress;
use super::spool::{Item, Opened, Spool};
use crate::segment::Segment;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use tachyon::sinks::text::escape_controls;

/// Examples of a label's values.
const EXAMPLES: usize = 4;
/// Requests that are listed for each backend.
const REQUESTS: usize = 6;

/// What a label has.
#[derive(Default)]
struct Seen {
    values: BTreeSet<String>,
}

/// Tells it.
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
    let mut segments = BTreeMap::new();
    for backend in backends {
        let progress = Progress::open(state, &backend.name)?;
        let pending: Vec<&Item> = items.iter().filter(|item| !progress.has(item)).collect();
        let mut all = Parts::default();
        let (mut readable, mut samples) = (0, 0);
        for item in &pending {
            let Some(segment) = segment(spool, item, &mut segments) else { continue };
            readable += 1;
            let parts = backend.encode(&segment, now_unix)?;
            samples += segment.sample_count;
            all.parts.extend(parts.parts);
            all.parts.extend(backend.files(spool, item, &segment)?);
            for (reason, count) in parts.refused {
                *all.refused.entry(reason).or_default() += count;
            }
        }
        let bytes: usize = all.parts.iter().map(|part| part.bytes).sum();
        writeln!(out, "\n{}", escape_controls(&backend.name))?;
        writeln!(
            out,
            "  would get {} with {}: {}, {}",
            count(readable, "segment"),
            count(usize::try_from(samples).unwrap_or(usize::MAX), "sample"),
            count(all.parts.len(), "request"),
            size(bytes),
        )?;
        for part in all.parts.iter().take(REQUESTS) {
            writeln!(out, "  {:>10}  {}", size(part.bytes), escape_controls(&part.what))?;
        }
        if all.parts.len() > REQUESTS {
            writeln!(out, "  {:>10}  and {} more", "…", all.parts.len() - REQUESTS)?;
        }
        for (reason, samples) in all.refused {
            writeln!(out, "  it would not get {}: {}", count(usize::try_from(samples)?, "sample"), reason.name())?;
        }
    }
    for (name, why) in spool.news() {
        writeln!(out, "\nwould be set aside: {name}: {why}")?;
    }
    write_content(segments.values().flatten(), out)?;
    Ok(())
}

fn segment(spool: &mut Spool, item: &Item, known: &mut BTreeMap<String, Option<Arc<Segment>>>) -> Option<Arc<Segment>> {
    let read = || match spool.read(item) {
        Opened::Segment(segment) => Some(Arc::new(*segment)),
        Opened::Gone | Opened::Bad => None,
    };
    known.entry(item.key.clone()).or_insert_with(read).clone()
}

/// Labels and names: what somebody who cares for privacy looks at.
fn write_content<'a>(segments: impl Iterator<Item = &'a Arc<Segment>>, out: &mut dyn Write) -> io::Result<()> {
    let mut labels: BTreeMap<String, Seen> = BTreeMap::new();
    let (mut functions, mut files) = (BTreeSet::new(), BTreeSet::new());
    for segment in segments {
        let mut told = BTreeSet::new();
        for row in &segment.samples {
            if !told.insert((&row.host, &row.service, &row.labels)) {
                continue;
            }
            for (name, value) in row.labels.by_name(&row.host, &row.service) {
                labels.entry(name).or_default().values.insert(value);
            }
        }
        functions.extend(segment.frames.values().map(|frame| (Arc::clone(&frame.file), Arc::clone(&frame.function))));
        files.extend(segment.frames.values().map(|frame| Arc::clone(&frame.file)));
    }
    if labels.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nWhat tells about the host and its programs:")?;
    let width = labels.keys().map(|name| escape_controls(name).chars().count()).max().unwrap_or(0);
    for (name, seen) in &labels {
        let examples: Vec<String> =
            seen.values.iter().take(EXAMPLES).map(|value| escape_controls(&short(value)).into_owned()).collect();
        let more = if seen.values.len() > EXAMPLES { ", …" } else { "" };
        let (name, number) = (escape_controls(name), seen.values.len());
        writeln!(out, "  {name:width$}  {number:>6}  {}{more}", examples.join(", "))?;
    }
    let example = files.iter().find(|file| file.starts_with('/')).map_or("", |file| file);
    writeln!(
        out,
        "  and names of {} in {}{}",
        count(functions.len(), "function"),
        count(files.len(), "file"),
        if example.is_empty() { String::new() } else { format!(", such as {}", escape_controls(&short(example))) },
    )?;
    writeln!(
        out,
        "No source text, values of variables, or command lines, unless a label has them. Rules of agent.toml drop labels."
    )
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
