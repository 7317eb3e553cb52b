//! The file behind a mapping, and its table.

use super::super::compile::{Refusal, Table, compile};
use super::super::part::parts;
use super::wanted::Identities;
use crate::remote::elf::{Elf, ReadAt};
use crate::remote::{FileIdentity, MappedPath, Mapping, RemoteProcess};
use crate::types::{Pid, RemoteAddr};
use tachyon_common::unwind::Range;

/// This machine's processor.
pub(in crate::unwind) const MACHINE: u16 =
    if cfg!(target_arch = "aarch64") { object::elf::EM_AARCH64 } else { object::elf::EM_X86_64 };

/// Largest vdso; real ones have 8 KiB.
const MAX_VDSO: u64 = 64 << 10;

/// What distinguishes the file behind a mapping from all others.
pub(super) fn identity(process: &RemoteProcess, mapping: &Mapping, known: Option<&Identities>) -> Option<FileIdentity> {
    let known = known.and_then(|known| known.get(&mapping.start)).copied();
    known.or_else(|| Some(process.mapped_file(mapping).ok()?.identity()))
}

pub(super) fn path_of(mapping: &Mapping) -> String {
    mapping.file_path().map_or_else(|| "[vdso]".to_owned(), |path| path.display().to_string())
}

/// Room that a table needs.
pub(super) fn words(table: &Table) -> u32 {
    parts(&table.rows).map(|part| part.words.len() as u32).sum()
}

pub(super) fn without_table(mapping: &Mapping, what: u32) -> Range {
    Range { start: mapping.start, end: mapping.end, bias: 0, first_row: what, rows: 0, pages: 0 }
}

/// The table of a file for this machine's own processor: rules for another would be followed as if they were for this one.
pub(super) fn compile_own<R: ReadAt>(elf: &Elf<R>) -> Result<Table, Refusal> {
    if elf.machine() == MACHINE { compile(elf) } else { Err(Refusal::Machine(elf.machine())) }
}

/// The vdso, which is the kernel's and the same in every process: this process's own cannot have been tampered with.
pub(in crate::unwind) fn own_vdso() -> Result<Vec<u8>, String> {
    let own = RemoteProcess::at(Pid(std::process::id()));
    let maps = own.maps().map_err(|error| error.to_string())?;
    let vdso = maps.iter().find(|mapping| mapping.path == MappedPath::Special(b"[vdso]".to_vec()));
    let vdso = vdso.filter(|vdso| vdso.end - vdso.start <= MAX_VDSO).ok_or("this process has no vdso")?;
    let mut bytes = vec![0; (vdso.end - vdso.start) as usize];
    own.read_memory(RemoteAddr(vdso.start), &mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}
