//! What the kernel's types have told is kept for as long as the machine is up.
//!
//! Looking through all of the types takes several milliseconds, and the kernel does not change before it is started anew, which gives it
//! another, random id (`/proc/sys/kernel/random/boot_id`).

use super::pod::Pod;
use crate::kept::{Folder, Kind, sealed, sum};
use prost::Message as _;
use tachyon_common::config::Config;

/// The last number is the version of the format.
const MAGIC: [u8; 8] = *b"tachker\x01";

/// The name of the file in the folder, before what says what is kept in it.
const NAME: &str = "running";

/// A sum of the code that looks for them: what another one has found is not used.
const FINDER: u64 =
    sum(&[include_bytes!("btf.rs").as_slice(), include_bytes!("../../../tachyon-common/src/config.rs").as_slice()]);

#[derive(Clone, PartialEq, prost::Message)]
struct Stored {
    #[prost(string, tag = "1")]
    boot: String,
    #[prost(fixed64, tag = "2")]
    finder: u64,
    /// A [`Config`] as it is in memory.
    #[prost(bytes = "vec", tag = "3")]
    config: Vec<u8>,
}

/// What is kept of the running kernel.
pub(super) fn read(folder: &Folder) -> Option<Config> {
    read_of(folder, &boot()?)
}

/// Keeps it. A folder that cannot be written is one that keeps nothing.
pub(super) fn write(folder: &Folder, config: &Config) {
    if let Some(boot) = boot() {
        write_of(folder, boot, config);
    }
}

fn read_of(folder: &Folder, boot: &str) -> Option<Config> {
    let content = folder.read(&name())?;
    let stored = Stored::decode(sealed::open(MAGIC, &content)?).ok()?;
    let config = Pod::<Config>::of_bytes(&stored.config)?.0;
    (stored.boot == boot && stored.finder == FINDER).then_some(config)
}

fn write_of(folder: &Folder, boot: String, config: &Config) {
    let stored = Stored { boot, finder: FINDER, config: Pod(*config).bytes().to_vec() };
    if let Some(content) = sealed::seal(MAGIC, &stored.encode_to_vec()) {
        let _read_only = folder.write(&name(), &content);
    }
}

fn name() -> String {
    Kind::Kernel.file_name(NAME)
}

/// The id of the running kernel; `None`: it cannot be read.
fn boot() -> Option<String> {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().filter(|id| !id.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kept::SymbolCache;

    #[test]
    fn another_kernel_s_offsets_are_not_used() {
        let above = tempfile::tempdir().expect("a folder");
        let folder = SymbolCache::at(above.path().join("kept")).open().expect("it is ours");
        assert_eq!(read(&folder), None);
        let config = Config { task_tgid: 7, preempt_count: u32::MAX, ..Config::default() };
        write(&folder, &config);
        assert_eq!(read(&folder), Some(config));
        write_of(&folder, "another".to_owned(), &config);
        assert_eq!(read(&folder), None);
        assert_eq!(read_of(&folder, "another"), Some(config));
    }
}
