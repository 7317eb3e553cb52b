//! Which version of CPython a file holds: from the offsets it publishes, from `Py_Version`, from the version string
//! in its constants, or, last, from its soname.

use crate::remote::elf::{Elf, ReadAt, Symbol};

/// Most bytes of constants that are searched (CPython's `.rodata` has 2 to 4 MB).
const MAX_CONSTANTS: u64 = 16 << 20;

/// Bytes of constants read at once.
const CHUNK: u64 = 64 << 10;

/// Longest version string, e.g. `3.10.13rc12+` with its two zero bytes.
const MAX_TEXT: usize = 16;

/// `Py_Version`, an `unsigned long` (3.11 and newer).
pub(super) fn exported<R: ReadAt>(elf: &Elf<R>, symbol: Symbol) -> Option<u32> {
    let mut bytes = [0; 8];
    elf.read_vaddr(symbol.vaddr, &mut bytes).ok()?;
    u32::try_from(u64::from_le_bytes(bytes)).ok().filter(|hex| (2..=3).contains(&(hex >> 24)))
}

/// The version string among the file's constants: the only one, or the only one of the soname's minor version.
///
/// It may be the end of a longer string, with which linkers merge it: pyenv's prefix is `…/versions/3.8.18`.
pub(super) fn in_constants<R: ReadAt>(elf: &Elf<R>) -> Option<u32> {
    let section = elf.section(".rodata")?;
    let end = section.vaddr.checked_add(section.size.min(MAX_CONSTANTS))?;
    let mut found = Vec::new();
    let mut at = section.vaddr;
    let mut bytes = vec![0; usize::try_from(CHUNK).ok()?];
    while at < end {
        let len = usize::try_from((end - at).min(CHUNK)).ok()?;
        let chunk = bytes.get_mut(..len)?;
        elf.read_vaddr(at, chunk).ok()?;
        search(chunk, &mut found);
        // Chunks overlap, so that a string at the edge is seen whole.
        at = if len < MAX_TEXT * 2 { end } else { at + (len - MAX_TEXT) as u64 };
        if len < usize::try_from(CHUNK).ok()? {
            break;
        }
    }
    found.sort_unstable();
    found.dedup();
    if let Some(minor) = elf.soname().and_then(|name| minor_of_soname(&name)) {
        found.retain(|hex| hex >> 16 == minor >> 16);
    }
    match found[..] {
        [hex] => Some(hex),
        _ => None,
    }
}

/// The minor version in a soname such as `libpython3.8.so.1.0`; micro version and level are 0.
pub(super) fn minor_of_soname(name: &str) -> Option<u32> {
    let (major, rest) = name.strip_prefix("libpython")?.split_once('.')?;
    let minor = rest.split(|of: char| !of.is_ascii_digit()).next()?;
    let (major, minor) = (major.parse::<u8>().ok()?, minor.parse::<u8>().ok()?);
    Some(u32::from_be_bytes([major, minor, 0, 0]))
}

/// Looks for version strings that end a string and start it or follow a `/` or `-`.
fn search(bytes: &[u8], found: &mut Vec<u32>) {
    let starts =
        bytes.windows(3).enumerate().filter(|(_, window)| matches!(window, [0 | b'/' | b'-', b'2' | b'3', b'.']));
    for (before, _) in starts {
        let text = bytes.get(before + 1..).unwrap_or_default();
        let text = text.get(..text.len().min(MAX_TEXT)).unwrap_or_default();
        let text = text.iter().position(|&byte| byte == 0).and_then(|len| text.get(..len));
        if let Some(hex) = text.and_then(|text| parse(std::str::from_utf8(text).ok()?)) {
            found.push(hex);
        }
    }
}

/// Parses `3.8.18`, `3.11.0rc1` or `3.10.0a2+` into a `PY_VERSION_HEX`.
fn parse(text: &str) -> Option<u32> {
    let mut parts = text.trim_end_matches('+').splitn(3, '.');
    let major: u8 = parts.next()?.parse().ok()?;
    let minor: u8 = parts.next()?.parse().ok()?;
    let rest = parts.next()?;
    let digits = rest.find(|of: char| !of.is_ascii_digit()).unwrap_or(rest.len());
    let (micro, level) = rest.split_at(digits);
    let (level, serial) = match level {
        "" => (0xf, "0"),
        _ => [("a", 0xa), ("b", 0xb), ("rc", 0xc)]
            .into_iter()
            .find_map(|(name, number)| Some((number, level.strip_prefix(name)?)))?,
    };
    let serial: u8 = serial.parse().ok().filter(|&serial| serial < 16)?;
    Some(u32::from_be_bytes([major, minor, micro.parse().ok()?, level << 4 | serial]))
}

/// A version in the usual form: `3.12.1`, `3.14.0rc2`.
pub(super) fn display(hex: u32) -> String {
    let [major, minor, micro, rest] = hex.to_be_bytes();
    let level = match rest >> 4 {
        0xa => format!("a{}", rest & 15),
        0xb => format!("b{}", rest & 15),
        0xc => format!("rc{}", rest & 15),
        _ => String::new(),
    };
    format!("{major}.{minor}.{micro}{level}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_strings() {
        for (text, hex) in [
            ("3.8.18", Some(0x0308_12f0)),
            ("3.11.0rc1", Some(0x030b_00c1)),
            ("3.10.0a2+", Some(0x030a_00a2)),
            ("2.7.18", Some(0x0207_12f0)),
            ("3.8", None),
            ("3.8.1x1", None),
            ("3.8.999", None),
            ("3.8.1rc16", None),
            ("", None),
        ] {
            assert_eq!(parse(text), hex, "{text}");
            if let Some(hex) = hex {
                assert_eq!(display(hex), text.trim_end_matches('+'));
            }
        }
        let mut found = Vec::new();
        search(b"/versions/3.9.1\x003.8.18\x00y\x003.8.18 (default)\x0013.8.17\x003.9\x003.", &mut found);
        assert_eq!(found, [0x0309_01f0, 0x0308_12f0]);
    }

    #[test]
    fn sonames() {
        assert_eq!(minor_of_soname("libpython3.8.so.1.0"), Some(0x0308_0000));
        assert_eq!(minor_of_soname("libpython3.13t.so.1.0"), Some(0x030d_0000));
        assert_eq!(minor_of_soname("libpython3.so"), None);
        assert_eq!(minor_of_soname("libc.so.6"), None);
    }
}
