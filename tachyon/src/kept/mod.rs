//! What is kept between recordings, most of it of files, and what it depends on.
//!
//! In: what [`symbolize`](crate::symbolize) has found out about names, [`unwind`](crate::unwind) about rules and
//! [`kernel`](crate::kernel) about the running kernel. Out: the same for the next recording, from the user's own folder ([`Folder`]) in
//! a checked container ([`sealed`]). What each of them keeps, and how, is its own affair.
//!
//! Build ids are whatever a file claims. So what is kept is kept for one state of one file, and of its debug file: device, inode, size
//! and both times of change ([`Key`]). A program may make files with any build id, content, size and time of modification, but the time
//! of the last change is set by the kernel alone, on file systems of this machine; and as long as the victim's file exists, no other
//! has its inode number. Of files elsewhere (FUSE, network) nothing is kept: their servers say what they like.

mod folder;
pub mod sealed;

pub use folder::{Folder, SymbolCache};

use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::remote::{FileState, TargetFile};

/// A file that has changed this recently may change again without a new time: clocks of file systems tick up to 10 ms apart, and
/// those that count in seconds, once a second.
pub const TICK: Duration = Duration::from_millis(20);
const LONG_TICK: Duration = Duration::from_millis(2_100);

/// What is kept in a file of the folder, by what its name ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Names of functions.
    Names,
    /// Unwind rules.
    Rules,
    /// Offsets in the kernel's structures.
    Kernel,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Names, Self::Rules, Self::Kernel];

    const fn extension(self) -> &'static str {
        match self {
            Self::Names => ".names",
            Self::Rules => ".rules",
            Self::Kernel => ".kernel",
        }
    }

    /// The name of a file in the folder.
    #[must_use]
    pub fn file_name(self, name: &str) -> String {
        format!("{name}{}", self.extension())
    }
}

/// What something was made from. What was made from anything else is not used.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Key {
    /// The program's own version: another one may find out something else.
    #[prost(string, tag = "1")]
    pub version: String,
    /// The file's build id.
    #[prost(bytes = "vec", tag = "2")]
    pub build_id: Vec<u8>,
    /// The file's state.
    #[prost(message, optional, tag = "3")]
    pub file: Option<State>,
    /// Of the debug file, if one was used.
    #[prost(message, optional, tag = "4")]
    pub debug: Option<State>,
}

/// [`FileState`].
#[derive(Clone, PartialEq, prost::Message)]
pub struct State {
    /// Device.
    #[prost(uint64, tag = "1")]
    pub dev: u64,
    /// Inode number.
    #[prost(uint64, tag = "2")]
    pub inode: u64,
    /// Bytes.
    #[prost(uint64, tag = "3")]
    pub size: u64,
    /// Seconds and nanoseconds of the last change of the content, then of the last change at all.
    #[prost(sint64, repeated, tag = "4")]
    pub times: Vec<i64>,
}

impl From<FileState> for State {
    fn from(state: FileState) -> Self {
        let times = vec![state.modified.0, state.modified.1, state.changed.0, state.changed.1];
        Self { dev: state.dev, inode: state.inode, size: state.size, times }
    }
}

impl Key {
    /// Of a file with a build id and its debug file, as they are now; `None`: the file system may say anything of one of them, or has
    /// only just seen it change.
    #[must_use]
    pub fn of(build_id: &[u8], file: &TargetFile, debug: Option<&TargetFile>) -> Option<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
        let state = |file: &TargetFile| {
            let state = file.state().filter(|state| is_settled(state, now))?;
            Some(state.into())
        };
        let debug = match debug {
            Some(debug) => Some(state(debug)?),
            None => None,
        };
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Some(Self { version, build_id: build_id.to_owned(), file: Some(state(file)?), debug })
    }

    /// The name under which something is kept: one for each file, so that what is kept of an earlier state of it is replaced.
    #[must_use]
    pub fn file_name(&self, kind: Kind) -> Option<String> {
        let file = self.file.as_ref()?;
        let mut name = format!("{:x}-{:x}", file.dev, file.inode);
        if let Some(debug) = &self.debug {
            write!(name, "-{:x}-{:x}", debug.dev, debug.inode).expect("a string takes all text");
        }
        Some(kind.file_name(&name))
    }
}

/// A sum of some texts (FNV-1a), by which what one version of them has made is told from what another has.
#[must_use]
pub const fn sum(texts: &[&[u8]]) -> u64 {
    let (mut sum, mut text) = (0xcbf2_9ce4_8422_2325_u64, 0);
    while text < texts.len() {
        let mut at = 0;
        while at < texts[text].len() {
            sum = (sum ^ texts[text][at] as u64).wrapping_mul(0x0000_0100_0000_01b3);
            at += 1;
        }
        text += 1;
    }
    sum
}

/// Whether any change from now on would give the file another time.
fn is_settled(state: &FileState, now: Duration) -> bool {
    let (seconds, nanoseconds) = state.changed;
    let Some(changed) = u64::try_from(seconds).ok().zip(u32::try_from(nanoseconds).ok()) else { return false };
    let tick = if changed.1 == 0 { LONG_TICK } else { TICK };
    now.checked_sub(Duration::new(changed.0, changed.1)).is_some_and(|age| age > tick)
}
