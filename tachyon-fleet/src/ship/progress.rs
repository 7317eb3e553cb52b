//! What a backend has received: kept in a file of its own, so that backends that are down do not hold back others.

use super::spool::Item;
use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Version of the file's format.
const VERSION: u32 = 1;

/// Progress of one backend.
#[derive(Debug)]
pub struct Progress {
    path: PathBuf,
    kept: Kept,
}

/// What is kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Kept {
    version: u32,
    /// Its name.
    backend: String,
    /// Numbers of segments that are done, by recorder (`HOST-START`): ranges, both ends included.
    #[serde(default)]
    recorders: BTreeMap<String, Vec<[u64; 2]>>,
    /// Other files that are done.
    #[serde(default)]
    files: BTreeSet<String>,
    /// What is being sent.
    #[serde(default)]
    sending: Option<Sending>,
}

/// What is being sent: if this is found at a start, it is unknown whether it arrived.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sending {
    /// The first segment of it.
    pub segment: String,
    /// Parts that have arrived.
    pub parts: usize,
    /// Of this many.
    pub of: usize,
    /// Whether the next one may have arrived.
    pub doubtful: bool,
    /// For a batch: when its period begins, seconds since 1970. Whatever has left the spool meanwhile, the batch of that period keeps its
    /// name.
    #[serde(default)]
    pub window: Option<i64>,
}

impl Progress {
    /// Reads it, or starts from nothing.
    ///
    /// # Errors
    /// When it cannot be read, or is not what this program writes: then it is unknown what was shipped.
    pub fn open(state: &Path, backend: &str) -> anyhow::Result<Self> {
        // Names are for people, and may contain anything.
        let digest = Sha256::digest(backend);
        let number: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let path = state.join(format!("{number}.json"));
        let cannot = || format!("cannot read the progress of {backend} in {}", path.display());
        let kept = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Kept { version: VERSION, backend: backend.to_owned(), ..Kept::default() }
            }
            other => {
                let kept: Kept = serde_json::from_slice(&other.with_context(cannot)?).with_context(cannot)?;
                anyhow::ensure!(kept.version == VERSION, "{}: it is of another version, {}", cannot(), kept.version);
                kept
            }
        };
        Ok(Self { path, kept })
    }

    /// Whether a file is done.
    #[must_use]
    pub fn has(&self, item: &Item) -> bool {
        match &item.recorder {
            Some((recorder, number)) => self.kept.recorders.get(recorder).is_some_and(|ranges| covers(ranges, *number)),
            None => self.kept.files.contains(&item.key),
        }
    }

    /// What was being sent when it was last written.
    #[must_use]
    pub fn sending(&self) -> Option<&Sending> {
        self.kept.sending.as_ref()
    }

    /// To be called before something is sent.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn begin(&mut self, sending: Sending) -> anyhow::Result<()> {
        self.kept.sending = Some(sending);
        self.write()
    }

    /// To be called after all of it has arrived, or will never be accepted.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn done(&mut self, items: &[Item]) -> anyhow::Result<()> {
        for item in items {
            match &item.recorder {
                Some((recorder, number)) => add(self.kept.recorders.entry(recorder.clone()).or_default(), *number),
                None => drop(self.kept.files.insert(item.key.clone())),
            }
        }
        self.kept.sending = None;
        self.write()
    }

    /// Forgets what is no longer in the spool.
    pub fn keep(&mut self, items: &[Item]) {
        let recorders: BTreeSet<&str> =
            items.iter().filter_map(|item| item.recorder.as_ref()).map(|(recorder, _)| recorder.as_str()).collect();
        let files: BTreeSet<&str> = items.iter().map(|item| item.key.as_str()).collect();
        self.kept.recorders.retain(|recorder, _| recorders.contains(recorder.as_str()));
        self.kept.files.retain(|file| files.contains(file.as_str()));
    }

    fn write(&self) -> anyhow::Result<()> {
        let text = serde_json::to_vec(&self.kept)?;
        write_whole(&self.path, &text)
    }
}

/// Writes a state file atomically, so that it is complete even after a power cut.
///
/// # Errors
/// When it cannot be written.
pub fn write_whole(path: &Path, text: &[u8]) -> anyhow::Result<()> {
    let cannot = || format!("cannot write {}", path.display());
    let directory = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::Builder::new().prefix(".new-").tempfile_in(directory).with_context(cannot)?;
    file.write_all(text).with_context(cannot)?;
    file.as_file().sync_data().with_context(cannot)?;
    file.persist(path).map_err(|error| error.error).with_context(cannot)?;
    Ok(())
}

fn covers(ranges: &[[u64; 2]], number: u64) -> bool {
    let after = ranges.partition_point(|[first, _]| *first <= number);
    after > 0 && number <= ranges[after - 1][1]
}

/// Adds a number; ranges stay sorted, and no two touch.
fn add(ranges: &mut Vec<[u64; 2]>, number: u64) {
    if covers(ranges, number) {
        return;
    }
    let at = ranges.partition_point(|[first, _]| *first <= number);
    let joins_before = at > 0 && ranges[at - 1][1].checked_add(1) == Some(number);
    let joins_after = ranges.get(at).is_some_and(|[first, _]| number.checked_add(1) == Some(*first));
    match (joins_before, joins_after) {
        (true, true) => {
            ranges[at - 1][1] = ranges[at][1];
            ranges.remove(at);
        }
        (true, false) => ranges[at - 1][1] = number,
        (false, true) => ranges[at][0] = number,
        (false, false) => ranges.insert(at, [number, number]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_sets() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..200 {
            let (mut ranges, mut set) = (Vec::new(), BTreeSet::new());
            for _ in 0..random.usize(..40) {
                let number = random.u64(..30);
                add(&mut ranges, number);
                set.insert(number);
            }
            assert!((0..31).all(|number| covers(&ranges, number) == set.contains(&number)), "{ranges:?} {set:?}");
            assert!(ranges.windows(2).all(|pair| pair[0][1] + 1 < pair[1][0]), "{ranges:?}");
        }
        let mut last = vec![[0, u64::MAX - 1]];
        add(&mut last, u64::MAX);
        assert_eq!(last, [[0, u64::MAX]]);
    }

    #[test]
    fn it_is_there_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let item = |name: &str| Item::of_name(name, 7, std::time::SystemTime::UNIX_EPOCH);
        let items = ["h-20261122T190113Z-000000.tach", "h-20261122T190113Z-000002.tach", "app.tach"].map(item);
        let mut progress = Progress::open(dir.path(), "otlp x").unwrap();
        progress
            .begin(Sending { segment: items[0].key.clone(), parts: 0, of: 1, doubtful: false, window: None })
            .unwrap();
        assert_eq!(Progress::open(dir.path(), "otlp x").unwrap().sending().map(|it| it.parts), Some(0));
        progress.done(&[items[0].clone(), items[2].clone()]).unwrap();
        let mut again = Progress::open(dir.path(), "otlp x").unwrap();
        assert_eq!(items.each_ref().map(|item| again.has(item)), [true, false, true]);
        assert_eq!(again.sending(), None);
        let other = Progress::open(dir.path(), "otlp y").unwrap();
        assert!(items.iter().all(|item| !other.has(item)));
        again.keep(&items[1..]);
        assert_eq!(again.kept.recorders.len(), 1, "of a recorder with files left all is kept");
        again.keep(&items[2..]);
        assert!(again.kept.recorders.is_empty() && !again.kept.files.is_empty());
        fs::write(&again.path, "{").unwrap();
        assert!(
            Progress::open(dir.path(), "otlp x")
                .unwrap_err()
                .to_string()
                .contains("cannot read the progress of otlp x")
        );
    }
}
