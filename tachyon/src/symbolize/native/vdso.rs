//! The kernel's own functions in every process. All 64-bit processes have the same ones, so this process's are read.

use std::process;

use super::NativeFile;
use super::kept::Kept;
use super::table::{DYNAMIC, SymbolTable};
use crate::remote::elf::Elf;
use crate::remote::{MappedPath, RemoteProcess};
use crate::types::{Pid, RemoteAddr};

/// Most bytes that it may have: two to four pages in all kernels so far.
const MAX_BYTES: u64 = 1 << 16;

/// The vdso with its symbols.
pub(super) fn file() -> Option<NativeFile> {
    let own = RemoteProcess::at(Pid(process::id()));
    let maps = own.maps().ok()?;
    let mapping = maps.iter().find(|mapping| mapping.path == MappedPath::Special(b"[vdso]".to_vec()))?;
    let len = usize::try_from((mapping.end - mapping.start).min(MAX_BYTES)).ok()?;
    let mut bytes = vec![0; len];
    own.read_memory(RemoteAddr(mapping.start), &mut bytes).ok()?;
    let loads = Elf::parse(&bytes[..]).ok()?.loads().to_vec();
    let table = SymbolTable::of_bytes(&bytes, DYNAMIC, &loads).ok()??;
    Some(NativeFile {
        build_id: String::new(),
        object: "[vdso]".to_owned(),
        file: None,
        debug: None,
        loads,
        tables: Some(vec![table]),
        lines: None,
        kept: Kept::default(),
        used: 0,
        payer: None,
    })
}
