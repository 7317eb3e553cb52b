//! `--rotate` and `--keep`: a directory of segments, each a whole file with its account beside it.
//!
//! A segment is `HOST-START-SEQ.EXT`, where START is the recorder's start in UTC, and `HOST-START-SEQ.json` is its account,
//! which exists before the file gets its name: if the file is visible, both can be read. Names sort in the order of time.

use super::files::Outputs;
use super::{json, kept};
use crate::cli::account::Rotated;
use crate::cli::output::{Destination, OutputPlan, create_directory, write_whole};
use crate::cli::plan::{Keep, Plan, Rotate};
use crate::recording::Segment;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Where segments go.
pub(in crate::cli) struct Rotation {
    directory: PathBuf,
    /// `HOST-START`.
    name: String,
    sequence: u64,
    keep: Vec<Keep>,
    format: crate::sinks::Format,
    /// Files of the segment that has just been cut.
    pub ended: Option<Outputs>,
    finished: u64,
    removed: u64,
}

impl Rotation {
    /// Creates the directory if needed.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn begin(plan: &Plan, rotate: &Rotate) -> anyhow::Result<Self> {
        let Destination::Path(directory) = &plan.output.destination else {
            unreachable!("the plan refuses --rotate with standard output")
        };
        create_directory(directory)?;
        let host = nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Ok(Self {
            directory: directory.clone(),
            name: free_name(directory, &plain(&host))?,
            sequence: 0,
            keep: rotate.keep.clone(),
            format: plan.output.format,
            ended: None,
            finished: 0,
            removed: 0,
        })
    }

    /// The plan of the next segment's file.
    pub fn next(&self, plan: &Plan) -> Plan {
        let path = self.path(self.sequence, self.format.extension());
        let output = OutputPlan { destination: Destination::Path(path), ..plan.output.clone() };
        Plan { output, ..plan.clone() }
    }

    /// The next segment's file has been created.
    pub fn opened(&mut self) {
        self.sequence += 1;
    }

    /// Changes the limits from now on.
    pub fn keep(&mut self, keep: &[Keep]) {
        self.keep = keep.to_vec();
    }

    /// The file of a segment.
    pub fn path(&self, sequence: u64, extension: &str) -> PathBuf {
        self.directory.join(format!("{}-{sequence:06}.{extension}", self.name))
    }

    /// Gives a segment's account and file their names, and removes what is too old.
    ///
    /// # Errors
    /// When one of them cannot be written. What was written of the file is kept.
    pub fn finish(&mut self, outputs: Outputs, segment: &Segment) -> anyhow::Result<()> {
        if let Some(error) = &segment.sink_error {
            let error = std::io::Error::new(error.kind(), error.to_string());
            return Err(kept(outputs.keep(), error).into());
        }
        let account = Destination::Path(self.path(segment.sequence, "json"));
        let written = write_whole(&account, true, &json(&segment.report)?);
        outputs.commit(self.format)?;
        self.finished += 1;
        written?;
        for keep in &self.keep {
            self.removed += remove_oldest(&self.directory, *keep)?;
        }
        Ok(())
    }

    /// How many segments were finished and removed.
    pub fn kept(&self) -> Rotated {
        Rotated { finished: self.finished, removed: self.removed }
    }
}

/// A `HOST-START` that no file in the directory has: if two recordings start in the same second, one waits for the next.
fn free_name(directory: &Path, host: &str) -> std::io::Result<String> {
    loop {
        let now = SystemTime::now();
        let name = format!("{host}-{}", compact_utc(now));
        let of_name = |entry: std::io::Result<fs::DirEntry>| {
            Ok(entry?.file_name().to_string_lossy().strip_prefix(&name).is_some_and(|rest| rest.starts_with('-')))
        };
        let taken: Vec<bool> = fs::read_dir(directory)?.map(of_name).collect::<std::io::Result<_>>()?;
        if !taken.contains(&true) {
            return Ok(name);
        }
        let into_second = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().subsec_nanos();
        std::thread::sleep(Duration::from_nanos(1_000_000_000 - u64::from(into_second)));
    }
}

/// A host's name as part of a file name.
fn plain(host: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let name: String = host.trim_start_matches('.').chars().map(plain).collect();
    if name.is_empty() { "host".to_owned() } else { name }
}

/// `20261122T190113Z`.
pub(crate) fn compact_utc(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string().replace(['-', ':'], "")
}

/// A finished segment, with all files that belong to it.
#[derive(Debug, Default)]
struct Finished {
    paths: Vec<PathBuf>,
    bytes: u64,
    modified: Option<SystemTime>,
}

/// Removes the oldest segments until the rest is within the limit, but never the newest one. Returns how many.
///
/// # Errors
/// When the directory cannot be read, or a file not be removed.
fn remove_oldest(directory: &Path, keep: Keep) -> std::io::Result<u64> {
    let mut segments = finished(directory)?;
    let mut bytes: u64 = segments.values().map(|segment| segment.bytes).sum();
    let mut removed = 0;
    while segments.len() > 1
        && let Some(oldest) = segments.first_entry()
    {
        let too_much = match keep {
            Keep::Bytes(most) => bytes > most,
            Keep::Age(oldest_kept) => oldest.get().modified.is_some_and(|time| age(time) > oldest_kept),
        };
        if !too_much {
            break;
        }
        let segment = oldest.remove();
        bytes -= segment.bytes;
        removed += 1;
        for path in segment.paths {
            match fs::remove_file(path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(removed)
}

fn age(time: SystemTime) -> Duration {
    time.elapsed().unwrap_or_default()
}

/// The finished segments of a directory, whichever recording made them, oldest first: by START, then by SEQ.
fn finished(directory: &Path) -> std::io::Result<BTreeMap<(String, u64, String), Finished>> {
    let mut segments: BTreeMap<_, Finished> = BTreeMap::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(key) = name.to_str().and_then(segment_of) else { continue };
        // One that another recorder has just removed does not count.
        let Ok(metadata) = entry.metadata() else { continue };
        if metadata.is_file() {
            let segment = segments.entry(key).or_default();
            segment.bytes += metadata.len();
            segment.modified = segment.modified.max(metadata.modified().ok());
            segment.paths.push(entry.path());
        }
    }
    Ok(segments)
}

/// START, SEQ and HOST of a finished segment's file; `None` for a file that is still being written, or is not a segment.
fn segment_of(name: &str) -> Option<(String, u64, String)> {
    let (stem, ending) = name.split_once('.').filter(|(stem, _)| stem.contains("Z-")).or_else(|| {
        // The host's name may itself contain this.
        let at = name.rfind("Z-")?;
        let dot = at + name[at..].find('.')?;
        Some((&name[..dot], &name[dot + 1..]))
    })?;
    if ending.ends_with("part") || ending.contains(".part.") {
        return None;
    }
    let (rest, sequence) = stem.rsplit_once('-')?;
    let (host, start) = rest.rsplit_once('-')?;
    let is_start = start.len() == 16
        && start.bytes().enumerate().all(|(at, byte)| match at {
            8 => byte == b'T',
            15 => byte == b'Z',
            _ => byte.is_ascii_digit(),
        });
    let is_sequence = sequence.len() >= 6 && sequence.bytes().all(|byte| byte.is_ascii_digit());
    (is_start && is_sequence).then_some((start.to_owned(), sequence.parse().ok()?, host.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_told_by_their_names() {
        for (name, expected) in [
            ("web-1-20261122T190113Z-000000.tach", Some(("20261122T190113Z", 0, "web-1"))),
            ("a.b.example-20261122T190113Z-000012.json", Some(("20261122T190113Z", 12, "a.b.example"))),
            ("h-20261122T190113Z-1000000.0001.tach", Some(("20261122T190113Z", 1_000_000, "h"))),
            ("h-20261122T190113Z-000001.tach.part", None),
            ("h-20261122T190113Z-000001.tach.part.journal", None),
            ("h-20261122T190113Z-00001.tach", None),
            ("h-20261122190113Z-000001.tach", None),
            ("notes.json", None),
            ("", None),
        ] {
            let expected = expected.map(|(start, sequence, host)| (start.to_owned(), sequence, host.to_owned()));
            assert_eq!(segment_of(name), expected, "{name}");
        }
        assert_eq!(plain("a b/../c"), "a_b_.._c");
        assert_eq!(plain(""), "host");
    }

    #[test]
    fn what_is_too_old_goes_with_all_its_files() {
        let directory = tempfile::tempdir().unwrap();
        for (sequence, hours) in [(0, 30), (1, 20), (2, 1), (3, 0)] {
            for extension in ["tach", "json"] {
                let path = directory.path().join(format!("h-20261122T190113Z-{sequence:06}.{extension}"));
                let file = fs::File::create(path).unwrap();
                file.set_modified(SystemTime::now() - Duration::from_secs(hours * 3600)).unwrap();
            }
        }
        assert_eq!(remove_oldest(directory.path(), Keep::Age(Duration::from_secs(21 * 3600))).unwrap(), 1);
        assert_eq!(remove_oldest(directory.path(), Keep::Age(Duration::from_secs(2 * 3600))).unwrap(), 1);
        let left = finished(directory.path()).unwrap();
        assert_eq!(left.keys().map(|(_, sequence, _)| *sequence).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 4);
        assert_eq!(remove_oldest(directory.path(), Keep::Age(Duration::from_nanos(1))).unwrap(), 1, "the newest stays");
    }

    #[test]
    fn the_oldest_go_first_with_all_their_files() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: usize| fs::write(directory.path().join(name), vec![0; bytes]).unwrap();
        for sequence in 0..5 {
            write(&format!("h-20261122T190113Z-{sequence:06}.tach"), 900);
            write(&format!("h-20261122T190113Z-{sequence:06}.json"), 100);
        }
        // An earlier recorder's segment, from a host whose name sorts last; and files that are not segments.
        write("z-20260101T000000Z-000007.tach", 1000);
        write("precious.tach", 100_000);
        write("h-20261122T190113Z-000005.tach.part", 100_000);
        assert_eq!(remove_oldest(directory.path(), Keep::Bytes(3500)).unwrap(), 3);
        let left = finished(directory.path()).unwrap();
        assert_eq!(left.keys().map(|(_, sequence, _)| *sequence).collect::<Vec<_>>(), [2, 3, 4]);
        assert!(left.values().all(|segment| segment.paths.len() == 2));
        assert_eq!(remove_oldest(directory.path(), Keep::Bytes(1)).unwrap(), 2, "the newest stays");
        assert_eq!(remove_oldest(directory.path(), Keep::Age(Duration::ZERO)).unwrap(), 0);
        for name in ["precious.tach", "h-20261122T190113Z-000005.tach.part"] {
            assert!(directory.path().join(name).exists(), "{name}");
        }
    }
}
