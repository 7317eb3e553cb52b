//! Where CPython keeps what leads to a thread's name: modules, dictionaries, integers and instances' attributes.
//!
//! Only user space reads these, and only for names, so they are not part of the walk's `Layout`. From 3.14 on the
//! kernel knows the names of Python's threads, and only dictionaries are read. A test compares the rows with the headers at hand.

use tachyon_common::layout::{Layout, flags};

/// Where fields are, in bytes from the start of the structure named; names are CPython's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectLayout {
    /// `PyInterpreterState.modules` (`.imports.modules` from 3.12 on): the dictionary `sys.modules`.
    pub interp_modules: u64,
    /// `PyThreadState.dict`: what C modules keep for a thread.
    pub tstate_dict: u64,
    /// `_PyThreadStateImpl.asyncio_running_loop` (3.13): the loop that the thread runs.
    pub tstate_running_loop: Option<u64>,
    /// `PyModuleObject.md_dict`.
    pub module_dict: u64,
    /// `PyDictObject.ma_used`: how many items there are. The kernel side reads from it to the keys: the version tag is between them.
    pub dict_used: u64,
    /// `PyDictObject.ma_keys`.
    pub dict_keys: u64,
    /// `PyDictObject.ma_values`; not NULL if the keys are shared and the values are here.
    pub dict_values: u64,
    /// `PyDictKeysObject.dk_log2_size`, which `dk_log2_index_bytes` follows (3.11+), or `.dk_size` (before).
    pub keys_size: u64,
    /// `PyDictKeysObject.dk_kind` (3.11+).
    pub keys_kind: Option<u64>,
    /// `PyDictKeysObject.dk_nentries`.
    pub keys_nentries: u64,
    /// `PyDictKeysObject.dk_indices`, which the entries follow.
    pub keys_indices: u64,
    /// `PyDictValues.values`.
    pub values_start: u64,
    /// `PyLongObject.long_value.lv_tag` (3.12+) or `.ob_size` (before).
    pub long_tag: u64,
    /// `PyLongObject.ob_digit`.
    pub long_digit: u64,
    /// `PyTypeObject.tp_basicsize`.
    pub type_basicsize: u64,
    /// `PyTypeObject.tp_dictoffset`.
    pub type_dictoffset: u64,
    /// `PyTypeObject.tp_flags`.
    pub type_flags: u64,
    /// `PyHeapTypeObject.ht_cached_keys` (used from 3.11 on): the keys of instances' values.
    pub heap_type_cached_keys: Option<u64>,
    /// What to add to an instance's address to get the address of the pointer to its dictionary (3.11+).
    pub managed_dict: Option<i64>,
    /// Where an instance keeps its attributes.
    pub attributes: Attributes,
}

/// Where an instance keeps its attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attributes {
    /// In the dictionary at `tp_dictoffset` (up to 3.10).
    Dict,
    /// 3.11: values, if the pointer before [`ObjectLayout::managed_dict`] is not NULL, else the dictionary.
    ValuesPointer,
    /// 3.12: one pointer; if its lowest bit is set, it is to the byte before the values.
    TaggedPointer,
    /// 3.13: the dictionary if there is one, else values that follow the instance.
    Inline,
}

const V3_8: ObjectLayout = ObjectLayout {
    interp_modules: 56,
    tstate_dict: 152,
    tstate_running_loop: None,
    module_dict: 16,
    dict_used: 16,
    dict_keys: 32,
    dict_values: 40,
    keys_size: 8,
    keys_kind: None,
    keys_nentries: 32,
    keys_indices: 40,
    values_start: 0,
    long_tag: 16,
    long_digit: 24,
    type_basicsize: 32,
    type_dictoffset: 288,
    type_flags: 168,
    heap_type_cached_keys: None,
    managed_dict: None,
    attributes: Attributes::Dict,
};

const V3_9: ObjectLayout = ObjectLayout { interp_modules: 856, ..V3_8 };

const V3_11: ObjectLayout = ObjectLayout {
    interp_modules: 888,
    tstate_dict: 128,
    keys_kind: Some(10),
    keys_nentries: 24,
    keys_indices: 32,
    heap_type_cached_keys: Some(872),
    managed_dict: Some(-24),
    attributes: Attributes::ValuesPointer,
    ..V3_9
};

const V3_12: ObjectLayout = ObjectLayout {
    interp_modules: 944,
    tstate_dict: 112,
    heap_type_cached_keys: Some(880),
    attributes: Attributes::TaggedPointer,
    ..V3_11
};

const V3_13: ObjectLayout = ObjectLayout {
    interp_modules: 7656,
    tstate_dict: 128,
    tstate_running_loop: Some(304),
    values_start: 8,
    attributes: Attributes::Inline,
    ..V3_12
};

/// The object header has 32 bytes instead of 16, and there is no collector head before an instance.
const V3_13T: ObjectLayout = ObjectLayout {
    interp_modules: 7664,
    module_dict: 32,
    dict_used: 32,
    dict_keys: 48,
    dict_values: 56,
    long_tag: 32,
    long_digit: 40,
    type_basicsize: 48,
    type_dictoffset: 304,
    type_flags: 184,
    heap_type_cached_keys: Some(896),
    managed_dict: Some(-8),
    ..V3_13
};

impl ObjectLayout {
    /// The row for an interpreter; `None` for 3.14 and newer.
    #[must_use]
    pub fn of(layout: &Layout) -> Option<&'static Self> {
        Self::row(layout.minor_version(), layout.has(flags::FREE_THREADED))
    }

    /// The row that dictionaries are read by: those of 3.14 and 3.15 are as in 3.13.
    #[must_use]
    pub fn of_dictionaries(layout: &Layout) -> Option<&'static Self> {
        match (layout.minor_version(), layout.has(flags::FREE_THREADED)) {
            ((3, 14 | 15), false) => Some(&V3_13),
            ((3, 14 | 15), true) => Some(&V3_13T),
            _ => Self::of(layout),
        }
    }

    pub(super) fn row(version: (u8, u8), free_threaded: bool) -> Option<&'static Self> {
        match (version, free_threaded) {
            ((3, 8), false) => Some(&V3_8),
            ((3, 9 | 10), false) => Some(&V3_9),
            ((3, 11), false) => Some(&V3_11),
            ((3, 12), false) => Some(&V3_12),
            ((3, 13), false) => Some(&V3_13),
            ((3, 13), true) => Some(&V3_13T),
            _ => None,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    /// Header folders of pyenv, of the system, and of the builds that `cargo xtask zoo` made: each with its version and the kind of
    /// build for which it can be asked.
    fn headers() -> Vec<((u8, u8), bool, PathBuf)> {
        let kinds = |dir: PathBuf| {
            let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let version = name.trim_start_matches("python3.");
            let minor: u8 = version.trim_end_matches('t').parse().unwrap_or(0);
            // The headers of a build without a GIL say that it has none.
            let with_gil = !version.ends_with('t');
            let kinds = if with_gil { vec![false, true] } else { vec![true] };
            kinds.into_iter().map(move |free| ((3, minor), free, dir.clone())).collect::<Vec<_>>()
        };
        folders_of_headers().into_iter().flat_map(kinds).collect()
    }

    fn folders_of_headers() -> Vec<PathBuf> {
        let folders = |dir: &Path| {
            std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect::<Vec<_>>()
        };
        let home = std::env::home_dir().unwrap_or_default();
        let pyenv = std::env::var_os("PYENV_ROOT").map_or_else(|| home.join(".pyenv"), PathBuf::from).join("versions");
        let cache = std::env::var_os("TACHYON_CACHE").map_or_else(|| home.join(".cache/tachyon-bpf"), PathBuf::from);
        let prefixes = folders(&pyenv).into_iter().chain(folders(&cache.join("zoo"))).chain([PathBuf::from("/usr")]);
        let mut found: Vec<PathBuf> = prefixes.flat_map(|prefix| folders(&prefix.join("include"))).collect();
        found.retain(|dir| dir.join("internal/pycore_pystate.h").exists());
        found
    }

    /// What the headers in `dir` say.
    fn ask(dir: &Path, free_threaded: bool, work: &Path) -> BTreeMap<String, String> {
        let (source, binary) = (work.join("headers.c"), work.join("headers"));
        std::fs::write(&source, include_str!("objects/headers.c")).expect("a folder of our own");
        let mut compile = Command::new("cc");
        // Debian's `pyconfig.h` includes the architecture's own, which is beside the `python3.x` folder.
        let beside = dir.parent().expect("it lies in a folder");
        compile.arg("-w").arg("-I").arg(dir).arg("-I").arg(dir.join("internal")).arg("-I").arg(beside);
        if free_threaded {
            compile.arg("-UPy_GIL_DISABLED").arg("-DPy_GIL_DISABLED=1");
        }
        let compiled = compile.arg(&source).arg("-o").arg(&binary).output();
        let compiled = compiled.expect("there is a C compiler, without which this project cannot be built");
        assert!(compiled.status.success(), "{}: {}", dir.display(), String::from_utf8_lossy(&compiled.stderr));
        let said = Command::new(&binary).output().expect("it runs").stdout;
        let said = String::from_utf8(said).expect("ASCII");
        said.lines().filter_map(|line| line.split_once(' ')).map(|(a, b)| (a.to_owned(), b.to_owned())).collect()
    }

    /// Compares rows with the headers of all versions found here: `values` are those of a row, by the headers' names.
    pub(in crate::inspect) fn compare<R>(
        row: impl Fn((u8, u8), bool) -> Option<R>,
        values: impl Fn(R) -> Vec<(&'static str, String)>,
    ) {
        let work = tempfile::tempdir().expect("a folder");
        let mut compared = Vec::new();
        for (version, free_threaded, dir) in headers() {
            let Some(row) = row(version, free_threaded) else { continue };
            let said = ask(&dir, free_threaded, work.path());
            for (name, value) in values(row) {
                let place = dir.display();
                assert_eq!(said.get(name), Some(&value), "{name} in {place} (free-threaded: {free_threaded})");
            }
            compared.push((version, free_threaded));
        }
        println!("compared with the headers of {compared:?}");
        if compared.is_empty() {
            crate::not_run::not_run("headers of CPython 3.8 to 3.13, as pyenv has them");
        }
    }

    #[test]
    fn rows_are_what_the_headers_say() {
        let number = |value: Option<i64>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
        let optional = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
        compare(ObjectLayout::row, |row| {
            vec![
                ("interp_modules", row.interp_modules.to_string()),
                ("tstate_dict", row.tstate_dict.to_string()),
                ("tstate_running_loop", optional(row.tstate_running_loop)),
                ("module_dict", row.module_dict.to_string()),
                ("dict_used", row.dict_used.to_string()),
                ("dict_keys", row.dict_keys.to_string()),
                ("dict_values", row.dict_values.to_string()),
                ("keys_size", row.keys_size.to_string()),
                ("keys_kind", optional(row.keys_kind)),
                ("keys_nentries", row.keys_nentries.to_string()),
                ("keys_indices", row.keys_indices.to_string()),
                ("values_start", row.values_start.to_string()),
                ("long_tag", row.long_tag.to_string()),
                ("long_digit", row.long_digit.to_string()),
                ("type_basicsize", row.type_basicsize.to_string()),
                ("type_dictoffset", row.type_dictoffset.to_string()),
                ("type_flags", row.type_flags.to_string()),
                ("heap_type_cached_keys", optional(row.heap_type_cached_keys)),
                ("managed_dict", number(row.managed_dict)),
            ]
        });
    }
}
