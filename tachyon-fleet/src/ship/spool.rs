//! The spool: what there is to ship, and what is set aside because it cannot be read.
//!
//! The spool may be any directory, and whoever can write there may be hostile: only regular files of the directory's own user are opened,
//! without following links; what costs too much is given up; and whatever cannot be read is moved to `bad/` and counted, and does not hold
//! back anything else.

use super::progress::write_whole;
use crate::place;
use crate::segment::{self, Options, Segment};
use anyhow::{Context as _, anyhow};
use nix::sys::stat::{SFlag, fstat};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use tachyon::advice::Told;
use tachyon::sinks::text::escape_controls;

/// Where unreadable files are moved to.
const BAD: &str = "bad";
/// Files that could not be moved there, because the spool belongs to another user.
const BAD_LIST: &str = "bad.json";
/// Records what is being read, and how many processes ended while reading it: a process that finds this at its start
/// adds one.
const READING: &str = "reading";
/// This many are no accident: a process may be killed for any reason.
const DEATHS: u32 = 3;
/// Largest account that is read: a host with 10,000 processes has 5 MB.
const LARGEST_ACCOUNT: u64 = 16 << 20;
/// Most files that are remembered as bad.
const MOST_BAD: usize = 10_000;

/// A file to ship.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// Its name; for a file that is not a segment also its time, because another file may get its name.
    pub key: String,
    /// Name.
    pub name: String,
    /// `HOST-START` and number of a segment.
    pub recorder: Option<(String, u64)>,
    /// Sort key by time: START of a segment, or the time of another file.
    order: (String, u64),
    /// Its last change, seconds since 1970.
    pub modified_unix: f64,
    /// Size.
    pub bytes: u64,
}

impl Item {
    /// By name, size and time of the last change.
    #[must_use]
    pub fn of_name(name: &str, bytes: u64, modified: SystemTime) -> Self {
        let stem = name.strip_suffix(".tach").unwrap_or(name);
        let since = modified.duration_since(UNIX_EPOCH).unwrap_or_default();
        let recorder = stem.rsplit_once('-').filter(|_| place::is_segment(stem)).and_then(|(recorder, number)| {
            let number: u64 = number.parse().ok()?;
            Some((recorder.to_owned(), number))
        });
        let (key, order) = match &recorder {
            Some((recorder, number)) => {
                let start = recorder.rsplit_once('-').map_or("", |(_, start)| start);
                (name.to_owned(), (start.to_owned(), *number))
            }
            None => {
                let time = humantime::format_rfc3339_seconds(modified).to_string().replace(['-', ':'], "");
                (format!("{name}@{}", since.as_nanos()), (time, 0))
            }
        };
        Self { key, name: name.to_owned(), recorder, order, modified_unix: since.as_secs_f64(), bytes }
    }
}

/// The spool.
#[derive(Debug)]
pub struct Spool {
    directory: PathBuf,
    state: PathBuf,
    /// Nothing is written: neither to the spool nor to the state.
    read_only: bool,
    largest: u64,
    options: Options,
    /// The reason, by key.
    bad: BTreeMap<String, String>,
    /// Keys of files that were moved away: backends that looked before still ask for them.
    moved: BTreeSet<String>,
    /// The file during whose reading processes ended, and how many.
    deadly: Option<(String, u32)>,
    /// Files set aside since the last call.
    news: Vec<(String, String)>,
}

/// What a look found.
#[derive(Debug, Default)]
pub struct Look {
    /// Files to ship, oldest first.
    pub items: Vec<Item>,
    /// Files that are set aside, including earlier ones.
    pub bad: usize,
}

/// The outcome of reading a file.
#[derive(Debug)]
pub enum Opened {
    /// It was read.
    Segment(Box<Segment>),
    /// It is gone: the agent keeps the spool within its limits.
    Gone,
    /// It cannot be read, and is set aside.
    Bad,
}

impl Spool {
    /// A spool, and where to keep what is known about it.
    ///
    /// # Errors
    /// When the list of bad files cannot be read.
    pub fn new(
        directory: &Path,
        state: &Path,
        largest: u64,
        options: Options,
        read_only: bool,
    ) -> anyhow::Result<Self> {
        let list = state.join(BAD_LIST);
        let bad = match fs::read(&list) {
            Ok(text) => serde_json::from_slice(&text).with_context(|| format!("cannot read {}", list.display()))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(anyhow!(error).context(format!("cannot read {}", list.display()))),
        };
        let (directory, state) = (directory.to_owned(), state.to_owned());
        let (moved, news) = (BTreeSet::new(), Vec::new());
        let mut spool = Self { directory, state, read_only, largest, options, bad, moved, deadly: None, news };
        if let Ok(text) = fs::read_to_string(spool.state.join(READING)) {
            spool.ended_over(&text)?;
        }
        Ok(spool)
    }

    /// The process that was reading this file did not survive.
    fn ended_over(&mut self, text: &str) -> anyhow::Result<()> {
        let (before, key) = text.split_once(' ').unwrap_or_default();
        let deaths = before.parse::<u32>().unwrap_or(0).saturating_add(1);
        if deaths < DEATHS {
            self.deadly = Some((key.to_owned(), deaths));
            return Ok(());
        }
        let met = self.look()?.items.into_iter().find(|item| item.key == key);
        if let Some(item) = met {
            self.set_aside(&item, "three processes in a row that read it were killed, or ran out of memory");
        }
        self.end_reading();
        Ok(())
    }

    /// Reads with other limits from now on.
    pub fn renew(&mut self, largest: u64, options: Options) {
        (self.largest, self.options) = (largest, options);
    }

    /// Where it is.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Files that were set aside since the last call, with the reason.
    pub fn news(&mut self) -> Vec<(String, String)> {
        std::mem::take(&mut self.news)
    }

    /// Looks for files to ship.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn look(&mut self) -> anyhow::Result<Look> {
        let cannot = || format!("cannot read the spool {}", self.directory.display());
        let mut items = Vec::new();
        let mut met = BTreeSet::new();
        let mut refused = Vec::new();
        for entry in fs::read_dir(&self.directory).with_context(cannot)? {
            let name = entry.with_context(cannot)?.file_name();
            if !is_recording(&name) {
                continue;
            }
            // Without following a link.
            let Ok(stat) = fs::symlink_metadata(self.directory.join(&name)) else { continue };
            let modified = stat.modified().unwrap_or(UNIX_EPOCH);
            let shown = name.to_string_lossy();
            let item = Item::of_name(&shown, stat.len(), modified);
            met.insert(item.key.clone());
            if self.bad.contains_key(&item.key) {
                continue;
            }
            if name.to_str().is_none_or(|name| name.contains(char::is_control)) {
                refused.push((name, item, "its name has control characters, or is no UTF-8"));
                continue;
            }
            items.push(item);
        }
        for (name, item, why) in refused {
            self.move_away(&name, &item.key, why);
        }
        self.bad.retain(|key, _| met.contains(key));
        items.sort_by(|a, b| (&a.order, &a.name).cmp(&(&b.order, &b.name)));
        Ok(Look { items, bad: self.bad.len() })
    }

    /// Whether a file was set aside.
    #[must_use]
    pub fn is_bad(&self, key: &str) -> bool {
        self.bad.contains_key(key) || self.moved.contains(key)
    }

    /// Reads a file, or sets it aside.
    pub fn read(&mut self, item: &Item) -> Opened {
        if self.bad.contains_key(&item.key) {
            return Opened::Bad;
        }
        let path = self.directory.join(&item.name);
        self.begin_reading(&item.key);
        let outcome = self.try_read(&path);
        self.end_reading();
        match outcome {
            Ok(segment) => Opened::Segment(Box::new(segment)),
            Err(_) if fs::symlink_metadata(&path).is_err() => {
                if self.moved.contains(&item.key) {
                    Opened::Bad
                } else {
                    Opened::Gone
                }
            }
            Err(error) => {
                self.set_aside(item, &Told::of(&error).message);
                Opened::Bad
            }
        }
    }

    fn try_read(&self, path: &Path) -> anyhow::Result<Segment> {
        let file = self.open(path, self.largest)?;
        segment::read_open(file, path, self.options, &|account| self.open(account, LARGEST_ACCOUNT))
    }

    /// The bytes of a file and of its account, as they are.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn bytes(&self, item: &Item) -> io::Result<(Vec<u8>, Option<Vec<u8>>)> {
        use io::Read as _;
        let read = |path: &Path, largest| {
            let mut bytes = Vec::new();
            self.open(path, largest)?.take(largest).read_to_end(&mut bytes)?;
            Ok::<_, io::Error>(bytes)
        };
        let path = self.directory.join(&item.name);
        let account = match read(&path.with_extension("json"), LARGEST_ACCOUNT) {
            Ok(account) => Some(account),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        Ok((read(&path, self.largest)?, account))
    }

    /// Opens a file of the spool: a regular one, owned by the spool's user, this process's user or root, and not too large.
    fn open(&self, path: &Path, largest: u64) -> io::Result<File> {
        let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|error| {
            let is_link = error.raw_os_error() == Some(libc::ELOOP);
            if is_link { io::Error::other("it is a symbolic link") } else { error }
        })?;
        let stat = fstat(&file)?;
        let kind = SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT;
        if kind != SFlag::S_IFREG {
            let what = match kind {
                SFlag::S_IFIFO => "a FIFO",
                SFlag::S_IFDIR => "a directory",
                SFlag::S_IFSOCK => "a socket",
                _ => "a device",
            };
            return Err(io::Error::other(format!("it is {what}")));
        }
        let owner = fs::metadata(&self.directory)?.uid();
        let us = nix::unistd::geteuid().as_raw();
        if ![owner, us, 0].contains(&stat.st_uid) {
            return Err(io::Error::other(format!("it belongs to user {}, and the spool to {owner}", stat.st_uid)));
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if size > largest {
            return Err(io::Error::other(format!(
                "it has {size} bytes, and a segment at most {largest} (spool.largest)"
            )));
        }
        Ok(file)
    }

    /// Moves a file and its account out of the way, or remembers not to read it.
    fn set_aside(&mut self, item: &Item, why: &str) {
        let name = OsStr::new(&item.name).to_owned();
        self.move_away(&name, &item.key, why);
    }

    fn move_away(&mut self, name: &OsStr, key: &str, why: &str) {
        self.news.push((escape_controls(&name.to_string_lossy()).into_owned(), why.to_owned()));
        if !self.read_only && self.to_bad(name).is_ok() {
            if self.moved.len() < MOST_BAD {
                self.moved.insert(key.to_owned());
            }
            return;
        }
        if self.bad.len() < MOST_BAD {
            self.bad.insert(key.to_owned(), why.to_owned());
        }
        if !self.read_only {
            // What is not remembered will be found again at the next start.
            let text = serde_json::to_vec(&self.bad).unwrap_or_default();
            let _forgotten = write_whole(&self.state.join(BAD_LIST), &text);
        }
    }

    fn to_bad(&self, name: &OsStr) -> io::Result<()> {
        let bad = self.directory.join(BAD);
        match fs::DirBuilder::new().mode(0o750).create(&bad) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        // Someone may have put a link there.
        if !fs::symlink_metadata(&bad)?.is_dir() {
            return Err(io::Error::other("it is no directory"));
        }
        let free = |name: &OsStr| {
            let numbered = |number: u32| {
                let mut name = name.to_owned();
                name.push(format!(".{number}"));
                name
            };
            let names = std::iter::once(name.to_owned()).chain((1..1000).map(numbered));
            names.map(|name| bad.join(name)).find(|path| fs::symlink_metadata(path).is_err())
        };
        let to = free(name).ok_or_else(|| io::Error::other("there are too many of that name"))?;
        fs::rename(self.directory.join(name), to)?;
        let account = Path::new(name).with_extension("json");
        if let Some(to) = free(account.as_os_str()) {
            // Most have one.
            let _none = fs::rename(self.directory.join(&account), to);
        }
        Ok(())
    }

    fn begin_reading(&self, key: &str) {
        if !self.read_only {
            // It protects against files that kill their reader; without it everything else still works.
            let deaths = self.deadly.as_ref().filter(|(deadly, _)| deadly == key).map_or(0, |(_, deaths)| *deaths);
            let _unprotected = fs::write(self.state.join(READING), format!("{deaths} {key}"));
        }
    }

    fn end_reading(&self) {
        if !self.read_only {
            let _gone = fs::remove_file(self.state.join(READING));
        }
    }
}

/// Finished recordings: `.part` is being written, `.broken` could not be recovered.
fn is_recording(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    bytes.ends_with(b".tach") && !bytes.starts_with(b".")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt as _;
    use std::os::unix::fs::symlink;
    use std::time::Duration;

    fn spool(directory: &Path, state: &Path) -> Spool {
        let options = Options { slice: Duration::from_secs(60), start: None };
        Spool::new(directory, state, 1 << 20, options, false).unwrap()
    }

    #[test]
    fn segments_come_in_order_of_time() {
        let dir = tempfile::tempdir().unwrap();
        let state = tempfile::tempdir().unwrap();
        for name in [
            "z-20261122T190113Z-000010.tach",
            "z-20261122T190113Z-000009.tach",
            "a-20261123T000000Z-000000.tach",
            "b-20261121T000000Z-1000000.tach",
            "b-20261121T000000Z-000003.tach.part",
            "b-20261121T000000Z-000003.json",
            ".hidden.tach",
            "state.json",
        ] {
            fs::write(dir.path().join(name), "x").unwrap();
        }
        let look = spool(dir.path(), state.path()).look().unwrap();
        let names: Vec<&str> = look.items.iter().map(|item| item.name.as_str()).collect();
        let expected = [
            "b-20261121T000000Z-1000000.tach",
            "z-20261122T190113Z-000009.tach",
            "z-20261122T190113Z-000010.tach",
            "a-20261123T000000Z-000000.tach",
        ];
        assert_eq!(names, expected);
        assert_eq!(look.items[0].recorder, Some(("b-20261121T000000Z".to_owned(), 1_000_000)));
    }

    #[test]
    fn what_cannot_be_read_is_set_aside_and_counted() {
        let dir = tempfile::tempdir().unwrap();
        let state = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("broken.tach"), "no profile").unwrap();
        fs::write(path("broken.json"), "{}").unwrap();
        nix::unistd::mkfifo(&path("fifo.tach"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        symlink("/etc/passwd", path("link.tach")).unwrap();
        fs::create_dir(path("directory.tach")).unwrap();
        File::create(path("sparse.tach")).unwrap().set_len(10 << 30).unwrap();
        fs::write(path("a\u{1b}[2J.tach"), "x").unwrap();
        fs::write(dir.path().join(std::ffi::OsString::from_vec(b"\xff.tach".to_vec())), "x").unwrap();
        let mut spool = spool(dir.path(), state.path());
        let look = spool.look().unwrap();
        assert_eq!((look.items.len(), look.bad), (5, 0), "those with such names are moved at once");
        for item in &look.items {
            // For one backend, and for the next one.
            assert!(matches!(spool.read(item), Opened::Bad), "{item:?}");
            assert!(matches!(spool.read(item), Opened::Bad) && spool.is_bad(&item.key), "{item:?}");
        }
        let mut news = spool.news();
        news.sort();
        let told: Vec<(&str, &str)> = news.iter().map(|(name, why)| (name.as_str(), why.as_str())).collect();
        assert_eq!(told[0], ("a\\x1b[2J.tach", "its name has control characters, or is no UTF-8"));
        let names: Vec<&str> = told.iter().map(|(name, _)| *name).collect();
        assert_eq!(names[1..6], ["broken.tach", "directory.tach", "fifo.tach", "link.tach", "sparse.tach"]);
        assert!(
            told[2].1 == "it is a directory" && told[3].1 == "it is a FIFO" && told[4].1 == "it is a symbolic link"
        );
        assert!(told[5].1.starts_with("it has 10737418240 bytes, and a segment at most "));
        assert!(spool.look().unwrap().items.is_empty());
        assert_eq!(fs::read_dir(path(BAD)).unwrap().count(), 8, "an account went with its file");
        assert!(!state.path().join(READING).exists());
    }

    #[test]
    fn a_file_that_kills_its_readers_is_set_aside_and_one_that_was_read_by_chance_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let state = tempfile::tempdir().unwrap();
        let name = "h-20261122T190113Z-000000.tach";
        fs::write(dir.path().join(name), "x").unwrap();
        for death in 0..3 {
            let mut spool = spool(dir.path(), state.path());
            assert_eq!((spool.news().len(), spool.look().unwrap().items.len()), (0, 1), "{death}");
            // Killed while it reads.
            spool.begin_reading(name);
        }
        let mut spool = spool(dir.path(), state.path());
        assert_eq!(spool.news().len(), 1);
        assert!(spool.look().unwrap().items.is_empty() && dir.path().join(BAD).join(name).exists());
    }

    #[test]
    fn where_nothing_can_be_moved_it_is_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let state = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("broken.tach"), "x").unwrap();
        // A file where the directory should be: root may do everything else.
        fs::write(dir.path().join(BAD), "").unwrap();
        for _ in 0..2 {
            let mut spool = spool(dir.path(), state.path());
            let look = spool.look().unwrap();
            look.items.iter().for_each(|item| drop(spool.read(item)));
            assert_eq!(spool.look().unwrap().bad, 1);
        }
        fs::remove_file(dir.path().join("broken.tach")).unwrap();
        assert_eq!(spool(dir.path(), state.path()).look().unwrap().bad, 0, "what is gone is forgotten");
    }
}
