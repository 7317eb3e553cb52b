//! Where else a file's symbols are: in a debug file of its distribution, or packed inside of it.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::remote::elf::{Elf, ReadAt as _};
use crate::remote::ledger::{self, Work};
use crate::remote::{RemoteProcess, TargetFile};
use crate::types::Pid;

/// Where distributions put debug files (GDB manual, "Separate Debug Files").
const DEBUG_ROOT: &str = "/usr/lib/debug";

/// Largest debug file whose checksum is computed when it has no build id: all of it must be read.
const MAX_SUMMED: u64 = 256 << 20;

/// How long that may take: about a nanosecond per byte is normal.
const MOST_TIME: Duration = Duration::from_secs(1);

/// Most bytes that `.gnu_debugdata` may have, packed and unpacked. Fedora's largest unpack to some megabytes.
const MAX_MINI: u64 = 32 << 20;

/// Most memory that unpacking may take, in KiB: `xz` packs with dictionaries of up to 64 MiB, and 8 MiB by default.
const MAX_UNPACKING_KIB: u32 = 70 << 10;

/// The debug file of a file that the process has mapped from `path`, searched in the process's own mount namespace.
/// Found by its build id, otherwise by the name and the checksum in the file.
pub(super) fn debug_file(process: &RemoteProcess, path: &Path, elf: &Elf<&TargetFile>) -> Option<TargetFile> {
    let build_id = elf.build_id();
    let own =
        |file: &TargetFile| build_id.is_some() && Elf::parse(file).ok().and_then(|elf| elf.build_id()) == build_id;
    if let Some(id) = &build_id
        && let Some(found) = open(process, &build_id_path(id), own)
    {
        return Some(found);
    }
    let (name, sum) = elf.debuglink()?;
    let name = OsStr::from_bytes(&name);
    let folder = path.parent()?;
    let below = Path::new(DEBUG_ROOT).join(folder.strip_prefix("/").ok()?);
    // A build id says more than a checksum, and reading a whole file is expensive.
    let fits = |file: &TargetFile| match &build_id {
        Some(_) => own(file),
        None => checksum(process.pid(), file).is_ok_and(|found| found == sum),
    };
    [folder.join(name), folder.join(".debug").join(name), below.join(name)]
        .iter()
        .filter(|candidate| *candidate != path)
        .find_map(|candidate| open(process, candidate, fits))
}

/// `/usr/lib/debug/.build-id/ab/cdef….debug`.
fn build_id_path(id: &[u8]) -> PathBuf {
    let mut hex = hex(id);
    hex.insert(2, '/');
    PathBuf::from(format!("{DEBUG_ROOT}/.build-id/{hex}.debug"))
}

/// Bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").expect("a string takes all text");
        hex
    })
}

fn open(process: &RemoteProcess, path: &Path, fits: impl Fn(&TargetFile) -> bool) -> Option<TargetFile> {
    let file = process.file_at(path).ok()?.open().ok()?;
    fits(&file).then_some(file)
}

/// CRC-32 of a whole file, computed on behalf of a process, if the process may still cost that much.
fn checksum(pid: Pid, file: &TargetFile) -> io::Result<u32> {
    let len = file.len_bytes()?;
    if len > MAX_SUMMED {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    if !ledger::may(Work::Checksums, pid, Duration::from_nanos(len)) {
        return Err(io::ErrorKind::QuotaExceeded.into());
    }
    let charged = ledger::charge(Work::Checksums, pid);
    let mut sum = flate2::Crc::new();
    let mut buffer = vec![0; 1 << 16];
    let mut at = 0;
    while at < MAX_SUMMED {
        let len = file.read_at(&mut buffer, at)?;
        if len == 0 {
            break;
        }
        if charged.so_far() > MOST_TIME {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        sum.update(&buffer[..len]);
        at += len as u64;
    }
    Ok(sum.sum())
}

/// The small ELF file with a symbol table that a stripped file may hold (`.gnu_debugdata`, packed with xz; GDB manual,
/// "Debugging information in a special section").
pub(super) fn mini_debug_info(elf: &Elf<&TargetFile>) -> Option<Vec<u8>> {
    let packed = elf.section_bytes(elf.section(".gnu_debugdata")?, MAX_MINI).ok()?;
    unpack(&packed)
}

fn unpack(packed: &[u8]) -> Option<Vec<u8>> {
    let mut unpacked = Vec::new();
    let reader = lzma_rust2::XzReader::new_mem_limit(packed, false, MAX_UNPACKING_KIB);
    reader.take(MAX_MINI).read_to_end(&mut unpacked).ok()?;
    Some(unpacked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_a_build_id() {
        let path = build_id_path(&[0xab, 0x01, 0xff]);
        assert_eq!(path, Path::new("/usr/lib/debug/.build-id/ab/01ff.debug"));
    }

    #[test]
    fn what_is_not_xz_is_refused() {
        for bytes in [&b""[..], b"\xfd7zXZ\0", &[0; 100]] {
            assert_eq!(unpack(bytes), None);
        }
    }

    #[test]
    fn the_checksum_is_that_of_the_debuglink() {
        let mut file = tempfile::tempfile().expect("a file");
        io::Write::write_all(&mut file, b"123456789").expect("written");
        assert_eq!(
            checksum(Pid(std::process::id()), &file.into()).expect("read"),
            0xcbf4_3926,
            "the check value of CRC-32/ISO-HDLC"
        );
    }
}
