//! A profile to the report: one HTML page with a flame graph, a time line, a table of functions, and filters.
//!
//! The page is committed ready-made (`prebuilt/report.html`, from `report-page/`); what is written here is its data: one
//! block of base64 with gzip inside, in which nothing can end the element that it stands in. Samples are kept in a
//! temporary file until the end, so memory grows with the number of distinct stacks. `docs/formats/report.md` has the
//! layout.

mod data;
mod tree;

use super::flamegraph::{caption, title, xml};
use super::spool::Spool;
use super::{Sink, stacks};
use crate::profile::{Merge, Profile, Sample};
use crate::report::Report;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::{self, Write};
use tachyon_common::event::status;
use tree::Tree;

/// The page without its data.
const PAGE: &str = include_str!("../../prebuilt/report.html");
/// Most nodes of the tree of stacks: more would take the browser seconds.
const MOST_NODES: usize = 1_500_000;

/// Writes the page at the end.
pub struct PageSink<W> {
    out: W,
    spool: Spool,
    total: u64,
    /// By number of [`Merge`].
    merges: [u64; 4],
}

impl<W: Write> PageSink<W> {
    /// Nothing is written to `out` before the end.
    pub fn new(out: W) -> Self {
        Self { out, spool: Spool::default(), total: 0, merges: [0; 4] }
    }
}

impl<W: Write> Sink for PageSink<W> {
    fn sample(&mut self, profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.total += 1;
        self.merges[usize::from(sample.merge.number())] += 1;
        self.spool.push_by_thread(profile, sample)
    }

    fn finish(&mut self, profile: &Profile, report: &Report) -> io::Result<()> {
        let (title, caption) = (xml(&title(profile)), xml(&caption(self.total, report)));
        let mut tree = Tree::new(profile, &self.spool.stacks);
        if tree.len() > MOST_NODES {
            tree.prune(&counts(&self.spool)?, MOST_NODES);
        }
        let mut out = io::BufWriter::with_capacity(1 << 16, &mut self.out);
        for (place, part) in PAGE.split("@@").enumerate() {
            match (place % 2, part) {
                (0, text) => out.write_all(text.as_bytes())?,
                (_, "title") => out.write_all(title.as_bytes())?,
                (_, "caption") => out.write_all(caption.as_bytes())?,
                (_, "data") => {
                    let base64 = base64::write::EncoderWriter::new(&mut out, &STANDARD);
                    let mut gzip = GzEncoder::new(base64, Compression::new(4));
                    data::write(&mut gzip, profile, report, &self.spool, &tree, self.merges)?;
                    gzip.finish()?.finish()?;
                }
                (_, other) => unreachable!("the page has no part {other}"),
            }
        }
        out.flush()
    }
}

/// How often each stack was seen.
fn counts(spool: &Spool) -> io::Result<Vec<u64>> {
    let mut counts = vec![0; spool.stacks.iter().len()];
    for thread in spool.threads() {
        spool.read(thread.0 as usize, |sample| {
            counts[sample.stack.0 as usize] += 1;
            Ok(())
        })?;
    }
    Ok(counts)
}

/// What a thread was doing, as the page tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    /// It ran; whether it held the GIL is not known.
    Ran = 0,
    /// It ran and held the GIL.
    Held = 1,
    /// It ran without the GIL.
    NotHeld = 2,
    /// It waited.
    Waited = 3,
}

impl State {
    fn of(status_byte: u8) -> Self {
        let bits = u32::from(status_byte);
        match stacks::gil_held(status_byte) {
            Some(true) => Self::Held,
            None => Self::Ran,
            Some(false) if bits & status::ON_CPU != 0 => Self::NotHeld,
            Some(false) => Self::Waited,
        }
    }
}

/// Samples by how their stacks were put together.
fn merged(merges: [u64; 4]) -> impl Iterator<Item = (&'static str, u64)> {
    (0..4).filter_map(move |number| Some((Merge::from_number(number).name()?, merges[usize::from(number)])))
}

#[cfg(test)]
mod tests;
