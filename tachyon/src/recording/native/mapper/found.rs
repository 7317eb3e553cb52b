//! What was found behind the mappings of a process.

use super::super::spaces::{Code, InterpreterCode};
use crate::inspect::Evaluator;
use crate::remote::elf::Elf;
use crate::remote::{FileIdentity, Mapping, TargetFile};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

/// An interpreter's code.
pub(super) enum Evaluated {
    /// Nobody has looked for it yet.
    Wanted,
    Found(Arc<InterpreterCode>),
    /// Its file does not tell.
    Missing,
}

/// A mapping of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub start: u64,
    pub end: u64,
    pub offset: u64,
    pub dev: (u32, u32),
    pub inode: u64,
}

impl Place {
    pub fn of(mapping: &Mapping) -> Option<Self> {
        let Mapping { start, end, offset, dev, inode, .. } = *mapping;
        mapping.file_path().map(|_| Self { start, end, offset, dev, inode })
    }
}

/// What was found behind a mapping.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub code: Code,
    pub file: Option<FileIdentity>,
}

/// Finds the evaluator in an interpreter's file.
pub(super) fn interpreter(file: &TargetFile) -> Result<InterpreterCode, String> {
    let evaluator = Evaluator::of_file(file).map_err(|error| error.to_string())?;
    let loads = Elf::parse(file).map_err(|error| error.to_string())?.loads().to_vec();
    Ok(InterpreterCode { evaluator, loads })
}

/// Tells one set of mappings from others.
pub(super) fn digest(maps: &[Mapping]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for mapping in maps {
        (mapping.start, mapping.end, mapping.offset, mapping.dev, mapping.inode).hash(&mut hasher);
    }
    // 0 stands for "never looked at".
    hasher.finish() | 1
}
