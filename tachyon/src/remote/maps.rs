//! `/proc/PID/maps`, parsed as bytes: the target can give paths any content.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// One mapping of a process's address space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// First address past it.
    pub end: u64,
    /// May be read.
    pub readable: bool,
    /// May be written.
    pub writable: bool,
    /// May be executed.
    pub executable: bool,
    /// Changes are kept private.
    pub private: bool,
    /// Where in the file it starts, in bytes.
    pub offset: u64,
    /// Device of the file: major and minor number, as `maps` shows them.
    pub dev: (u32, u32),
    /// Inode of the file; 0 when there is none.
    pub inode: u64,
    /// What is mapped.
    pub path: MappedPath,
}

/// What is mapped.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum MappedPath {
    /// No name: anonymous memory.
    Anonymous,
    /// A name in brackets, e.g. `[stack]`, or any other that is not an absolute path.
    Special(Vec<u8>),
    /// A file, by its path in the target's mount namespace. Newlines are escaped as `\012`, as the kernel does.
    File {
        /// The path, without the mark ` (deleted)`.
        path: Vec<u8>,
        /// The kernel marked it ` (deleted)` (or the file's name ends so).
        deleted: bool,
    },
}

impl MappedPath {
    /// A file's path as reported by the kernel.
    fn of_file(told: &[u8]) -> Self {
        let (path, deleted) = undeleted(told);
        Self::File { path: path.to_vec(), deleted }
    }

    /// Whether it is the file for which the kernel reports this path.
    #[must_use]
    pub fn is_file(&self, told: &[u8]) -> bool {
        matches!(self, Self::File { path, deleted } if (path.as_slice(), *deleted) == undeleted(told))
    }
}

/// A path without the kernel's mark of a deleted file, and whether it had one.
fn undeleted(told: &[u8]) -> (&[u8], bool) {
    let live = told.strip_suffix(b" (deleted)");
    (live.unwrap_or(told), live.is_some())
}

impl Mapping {
    /// The file's path in the target's mount namespace, when a file is mapped.
    #[must_use]
    pub fn file_path(&self) -> Option<&Path> {
        match &self.path {
            MappedPath::File { path, .. } if self.inode != 0 => Some(Path::new(OsStr::from_bytes(path))),
            _ => None,
        }
    }

    /// A short name of what is mapped: the file's without its folders, `[heap]`, …; empty when it has none.
    #[must_use]
    pub fn name(&self) -> String {
        let name = match &self.path {
            MappedPath::Anonymous => &[][..],
            MappedPath::Special(name) => name,
            MappedPath::File { path, .. } => path.rsplit(|&byte| byte == b'/').next().unwrap_or_default(),
        };
        String::from_utf8_lossy(name).into_owned()
    }

    /// Whether the address lies in it.
    #[must_use]
    pub fn contains(&self, addr: u64) -> bool {
        (self.start..self.end).contains(&addr)
    }
}

/// Parses the text of a `/proc/PID/maps`.
///
/// # Errors
/// Gives back the first line that is not as the kernel writes them (`fs/proc/task_mmu.c`, `show_map_vma`).
pub fn parse_maps(text: &[u8]) -> Result<Vec<Mapping>, String> {
    let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    lines.map(|line| parse_line(line).ok_or_else(|| String::from_utf8_lossy(line).into_owned())).collect()
}

/// Parses one line: `start-end perms offset major:minor inode      path`.
fn parse_line(line: &[u8]) -> Option<Mapping> {
    let mut fields = line.splitn(6, |&byte| byte == b' ');
    let mut text = || std::str::from_utf8(fields.next()?).ok();
    let (start, end) = text()?.split_once('-')?;
    let perms = text()?.as_bytes();
    let offset = text()?;
    let (major, minor) = text()?.split_once(':')?;
    let inode = text()?;
    let path = fields.next().unwrap_or_default().trim_ascii_start();
    let &[read, write, execute, shared] = perms else { return None };
    let start = u64::from_str_radix(start, 16).ok()?;
    let end = u64::from_str_radix(end, 16).ok()?;
    if end <= start {
        return None;
    }
    Some(Mapping {
        start,
        end,
        readable: read == b'r',
        writable: write == b'w',
        executable: execute == b'x',
        private: shared == b'p',
        offset: u64::from_str_radix(offset, 16).ok()?,
        dev: (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?),
        inode: inode.parse().ok()?,
        path: match path {
            b"" => MappedPath::Anonymous,
            [b'/', ..] => MappedPath::of_file(path),
            _ => MappedPath::Special(path.to_vec()),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_as_the_kernel_writes_them() {
        let text = b"00400000-0041f000 r--p 00000000 fe:01 4242                             /usr/bin/python3.11\n\
            7ffd10000000-7ffd10021000 rw-p 00000000 00:00 0                          [stack]\n\
            7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \n\
            7f0000002000-7f0000003000 r-xs 00001000 08:02 7 /tmp/with blank \xff (deleted)\n";
        let maps = parse_maps(text).expect("all lines are good");
        assert_eq!(maps.len(), 4);
        assert_eq!(maps[0].file_path(), Some(Path::new("/usr/bin/python3.11")));
        assert_eq!((maps[0].dev, maps[0].inode, maps[0].private), ((0xfe, 1), 4242, true));
        assert_eq!(maps[1].path, MappedPath::Special(b"[stack]".to_vec()));
        assert_eq!(maps[2].path, MappedPath::Anonymous);
        assert!(maps[3].executable && !maps[3].private && maps[3].contains(0x7f00_0000_2fff));
        assert_eq!(maps[3].path, MappedPath::File { path: b"/tmp/with blank \xff".to_vec(), deleted: true });
    }

    #[test]
    fn odd_lines_are_refused() {
        for line in [
            &b"x"[..],
            b"00400000-0041f000",
            b"0041f000-00400000 r--p 0 fe:01 1 /a",
            b"1ffffffffffffffff-2ffffffffffffffff r--p 0 fe:01 1 /a",
            b"00400000-0041f000 r- 00000000 fe:01 1 /a",
            b"00400000-0041f000 r--p 00000000 fe01 1 /a",
            b"00400000-0041f000 r--p 00000000 fe:01 z /a",
            b"\xff-\xff r--p 00000000 fe:01 1 /a",
        ] {
            assert!(parse_maps(line).is_err(), "{}", String::from_utf8_lossy(line));
        }
    }
}
