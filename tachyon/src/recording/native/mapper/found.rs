//! What was found behind the mappings of a process.

use super::super::spaces::{Code, InterpreterCode};
use super::Worker;
use crate::inspect::Evaluator;
use crate::remote::elf::Elf;
use crate::remote::{FileIdentity, MappedFile, Mapping, RemoteProcess, TargetFile};
use crate::types::KtimeNs;
use crate::unwind::Table;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

/// An interpreter's code.
pub(super) enum Evaluated {
    /// Nobody has looked for it yet.
    Wanted,
    Found(Arc<InterpreterCode>),
    /// Its file does not say where it is.
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
    /// When it was found, at the earliest: it was mapped there by then.
    pub at: KtimeNs,
}

/// Finds the evaluator in an interpreter's file.
pub(super) fn interpreter(file: &TargetFile) -> Result<InterpreterCode, String> {
    let evaluator = Evaluator::of_file(file).map_err(|error| error.to_string())?;
    let loads = Elf::parse(file).map_err(|error| error.to_string())?.loads().to_vec();
    Ok(InterpreterCode { evaluator, loads })
}

/// A number that distinguishes one set of mappings from others.
pub(super) fn digest(maps: &[Mapping]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for mapping in maps {
        (mapping.start, mapping.end, mapping.offset, mapping.dev, mapping.inode).hash(&mut hasher);
    }
    // 0 stands for "never looked at".
    hasher.finish() | 1
}

impl Worker {
    /// The interpreter in a file, if it is one of those that hold one.
    pub(super) fn evaluated(&mut self, file: &MappedFile, name: &str) -> Option<Arc<InterpreterCode>> {
        let evaluated = self.interpreters.get_mut(&file.identity())?;
        if matches!(evaluated, Evaluated::Wanted) {
            *evaluated = match file.open().map_err(|error| error.to_string()).and_then(|file| interpreter(&file)) {
                Ok(code) => Evaluated::Found(Arc::new(code)),
                Err(reason) => {
                    let note = "its native and Python frames cannot be put together";
                    self.left.notes.insert(format!("{name}: {reason}: {note}"));
                    Evaluated::Missing
                }
            };
        }
        match evaluated {
            Evaluated::Found(code) => Some(Arc::clone(code)),
            Evaluated::Wanted | Evaluated::Missing => None,
        }
    }

    /// What stands behind an executable mapping.
    pub(super) fn code(
        &mut self,
        (process, at): (&RemoteProcess, KtimeNs),
        mapping: &Mapping,
        trampolines: &HashMap<u64, Arc<Table>>,
    ) -> Seen {
        let found = mapping.file_path().and_then(|_| process.mapped_file(mapping).ok());
        let file = match &found {
            Some(found) => self.symbols.pin_file(process, mapping, found),
            None => self.symbols.pin(process, mapping),
        };
        let identity = found.as_ref().map(MappedFile::identity);
        let interpreter = found.and_then(|found| self.evaluated(&found, &mapping.name()));
        let object: Arc<str> = mapping.name().into();
        let path = mapping.file_path().map_or_else(|| Arc::clone(&object), |path| path.to_string_lossy().into());
        let trampolines = trampolines.contains_key(&mapping.start);
        let (start, end, offset) = (mapping.start, mapping.end, mapping.offset);
        let code = Code { start, end, offset, object, path, file, interpreter, trampolines };
        Seen { code, file: identity, at }
    }
}
