//! Functions that no symbol table names: identified by their start, which the search table of `.eh_frame` gives even for
//! files that were stripped of everything else. Such a name is the same in each run of one build, and can be looked up later.

use super::demangle;
use super::table::{ALL, DYNAMIC, SymbolTable};
use crate::remote::TargetFile;
use crate::remote::elf::Elf;
use crate::unwind::Windows;
use std::sync::Arc;

/// The entry of the procedure linkage table at an address, named as in other tools, and its first address.
pub(super) fn plt_entry(file: &TargetFile, vaddr: u64) -> Option<(String, u64)> {
    let (called, start) = Elf::parse(file).ok()?.plt_entry(vaddr)?;
    Some((demangle(&called) + "@plt", start))
}

/// The first address of the function at an address.
pub(super) fn start(file: &TargetFile, vaddr: u64) -> Option<u64> {
    let elf = Elf::parse(file).ok()?;
    Windows::of(&elf)?.function(&elf, vaddr)
}

/// The functions of a debug file.
#[derive(Debug)]
pub struct FunctionNames(SymbolTable);

impl FunctionNames {
    /// The functions of a file; `None`: it has none.
    #[must_use]
    pub fn of(file: TargetFile) -> Option<Self> {
        let loads = Elf::parse(&file).ok()?.loads().to_vec();
        let file = Arc::new(file);
        let of = |kind| SymbolTable::of_file(&file, kind, &loads).ok().flatten();
        of(ALL).or_else(|| of(DYNAMIC)).map(Self)
    }

    /// The name of the function that holds an address of the file, before relocation.
    #[must_use]
    pub fn at(&self, vaddr: u64) -> Option<String> {
        Some(demangle(&self.0.find(vaddr)?.name))
    }
}
