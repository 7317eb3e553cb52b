//! Rules at single addresses of files, made when they are asked for, of a few functions at a time: for stacks that user space walks
//! itself, before the kernel side has tables.

use super::compile::{Refusal, Table, Windows, compile, compile_vdso, rules_len};
use super::store::{MACHINE, Source, assembly, code_of, own_vdso};
use crate::remote::elf::{Elf, Load};
use crate::remote::{FileIdentity, TargetFile};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use tachyon_common::unwind::Rule;

/// Bytes of code whose rules are made at a time.
const BLOCK: u64 = 16 << 10;

/// Most rows that are kept: 8 MiB. Beyond that, all are made anew.
const MAX_ROWS: usize = 1 << 20;

/// Most files whose headers are kept.
const MAX_FILES: usize = 1 << 10;

/// Largest `.eh_frame` without a search table that is read: all of its rules have to be made at once.
const MOST_WHOLE: u64 = 2 << 20;

/// What is known of an address in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleAt {
    /// This rule.
    Rule(Rule),
    /// The file has no rules at all: its code is taken to keep frame pointers.
    Bare,
    /// Its rules cannot be used.
    Refused,
}

/// Such rules, by file.
#[derive(Debug, Default)]
pub struct SparseRules {
    files: HashMap<u64, File>,
    rows: usize,
    assembly: Vec<(FileIdentity, Range<u64>)>,
}

#[derive(Debug)]
enum File {
    Blocks(Box<Blocks>),
    /// The table of all of it.
    Whole(Vec<Load>, Table),
    Bare,
    Refused,
}

/// A file whose rules can be found by address.
#[derive(Debug)]
struct Blocks {
    elf: Elf<Arc<TargetFile>>,
    identity: FileIdentity,
    windows: Windows,
    /// Those that have been made, by where they begin, before relocation. `None`: their rules make no sense.
    made: HashMap<u64, Option<Table>>,
}

impl SparseRules {
    /// What is known at an offset of a file with a number that no other file has. `file` opens it; `None`: it is the vdso.
    pub fn at(
        &mut self,
        number: u64,
        offset: u64,
        file: impl FnOnce() -> Option<(Arc<TargetFile>, FileIdentity)>,
    ) -> RuleAt {
        if self.rows > MAX_ROWS || self.files.len() > MAX_FILES {
            (self.files, self.rows) = (HashMap::new(), 0);
        }
        let Self { files, rows, assembly: assembled } = self;
        let known = files.entry(number).or_insert_with(|| {
            let made = File::of(file(), assembled).unwrap_or_else(|refusal| match refusal {
                Refusal::NoTable => File::Bare,
                _ => File::Refused,
            });
            if let File::Whole(_, table) = &made {
                *rows += table.rows.len();
            }
            made
        });
        match known {
            File::Bare => RuleAt::Bare,
            File::Refused => RuleAt::Refused,
            File::Whole(loads, table) => {
                RuleAt::Rule(Load::code_vaddr(loads, offset).map_or(Rule::GAP, |vaddr| table.rule(vaddr)))
            }
            File::Blocks(blocks) => {
                let Blocks { elf, identity, windows, made } = &mut **blocks;
                let place = Load::code_vaddr(elf.loads(), offset).and_then(|vaddr| Some((vaddr, windows.at(vaddr)?)));
                let Some((vaddr, window)) = place else { return RuleAt::Rule(Rule::GAP) };
                let start = (vaddr & !(BLOCK - 1)).max(window.start);
                let table = made.entry(start).or_insert_with(|| {
                    let end = (start & !(BLOCK - 1)).saturating_add(BLOCK).min(window.end);
                    let table = windows.compile(elf, &(start..end)).ok()?;
                    *rows += table.rows.len() + 1;
                    assembled.extend(assembly(Source::File(*identity), &table, &code_of(elf)));
                    Some(table)
                });
                table.as_ref().map_or(RuleAt::Refused, |table| RuleAt::Rule(table.rule(vaddr)))
            }
        }
    }

    /// Parts of files, by offset, without rules in `.eh_frame`, whose rules were derived from the instructions: for rules made since
    /// the last call.
    pub fn take_assembly(&mut self) -> Vec<(FileIdentity, Range<u64>)> {
        std::mem::take(&mut self.assembly)
    }
}

impl File {
    fn of(
        file: Option<(Arc<TargetFile>, FileIdentity)>,
        assembled: &mut Vec<(FileIdentity, Range<u64>)>,
    ) -> Result<Self, Refusal> {
        let Some((file, identity)) = file else {
            // What cannot be read of this process's own vdso can be read of none.
            let Ok(bytes) = own_vdso() else { return Ok(Self::Refused) };
            let elf = Elf::parse(&bytes[..])?;
            return Ok(Self::Whole(elf.loads().to_vec(), compile_vdso(&elf)?));
        };
        let elf = Elf::parse(file)?;
        if elf.machine() != MACHINE {
            return Err(Refusal::Machine(elf.machine()));
        }
        if let Some(windows) = Windows::of(&elf) {
            return Ok(Self::Blocks(Box::new(Blocks { elf, identity, windows, made: HashMap::new() })));
        }
        let size = rules_len(&elf)?;
        if size > MOST_WHOLE {
            return Err(Refusal::TooLarge(size));
        }
        let table = compile(&elf)?;
        assembled.extend(assembly(Source::File(identity), &table, &code_of(&elf)));
        Ok(Self::Whole(elf.loads().to_vec(), table))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::{MappedPath, RemoteProcess};
    use crate::types::Pid;

    /// Fewer bytes between two functions are worth no row.
    const HOLE: u64 = 16;

    /// Address by address, in any order, the rules are those of each file's whole table.
    #[test]
    #[cfg_attr(miri, ignore = "reads the machine's own files")]
    fn rules_of_single_addresses_are_those_of_the_whole() {
        let own = RemoteProcess::at(Pid(std::process::id()));
        let (mut sparse, mut compared, mut kinds) = (SparseRules::default(), 0, [0; 2]);
        for (number, mapping) in (0..).zip(own.maps().expect("own mappings")) {
            let is_vdso = mapping.path == MappedPath::Special(b"[vdso]".to_vec());
            if !mapping.executable || (!is_vdso && mapping.file_path().is_none()) {
                continue;
            }
            let file = || {
                let mapped = own.mapped_file(&mapping).expect("it is mapped");
                (Arc::new(mapped.open().expect("it can be read")), mapped.identity())
            };
            let (loads, whole) = if is_vdso {
                let bytes = own_vdso().expect("this process has one");
                let elf = Elf::parse(&bytes[..]).expect("it is an ELF file");
                (elf.loads().to_vec(), compile_vdso(&elf).expect("it has rules"))
            } else {
                let elf = Elf::parse(file().0).expect("code lies in ELF files");
                (elf.loads().to_vec(), compile(&elf).expect("it has rules"))
            };
            kinds[usize::from(is_vdso)] += 1;
            let size = mapping.end - mapping.start;
            // Where a block ends, and so a window, and the vdso's table has neither.
            let windows =
                (!is_vdso).then(|| Windows::of(&Elf::parse(file().0).expect("code lies in ELF files"))).flatten();
            let block_end = |vaddr: u64| Some(windows?.at(vaddr)?.end.min((vaddr & !(BLOCK - 1)) + BLOCK));
            // In strides that jump to and fro between blocks, and at the end of each.
            let strides = (0..20_000).map(|turn| mapping.offset + turn * 7_919 % size);
            let first = (mapping.offset..).find(|&offset| Load::code_vaddr(&loads, offset).is_some());
            let next = |offset| Load::code_vaddr(&loads, offset).and_then(|at| Some(offset + (block_end(at)? - at)));
            let ends = std::iter::successors(first.and_then(next), |&end| next(end)).flat_map(|end| end - HOLE..end);
            for offset in strides.chain(ends) {
                let Some(vaddr) = Load::code_vaddr(&loads, offset) else { continue };
                let (known, wanted) = (sparse.at(number, offset, || (!is_vdso).then(file)), whole.rule(vaddr));
                // There a block has no rule for the few bytes between its last function and the next.
                let between =
                    known == RuleAt::Rule(Rule::GAP) && block_end(vaddr).is_some_and(|end| end - vaddr < HOLE);
                assert!(known == RuleAt::Rule(wanted) || between, "{known:?}, not {wanted:?}: {mapping:?} {vaddr:#x}");
                compared += 1;
            }
        }
        assert!(compared > 50_000 && kinds[0] > 1 && kinds[1] == 1, "{compared} addresses, {kinds:?}");
    }

    /// What has no rules is asked for once.
    #[test]
    fn a_file_that_is_no_program_is_refused() {
        let mut sparse = SparseRules::default();
        let file = tempfile::NamedTempFile::new().expect("a file can be made");
        let own = RemoteProcess::at(Pid(std::process::id()));
        let found = own.file_at(file.path()).expect("it is there");
        let mut asked = 0;
        for _ in 0..2 {
            let known = sparse.at(1, 0, || {
                asked += 1;
                Some((Arc::new(found.open().expect("it can be read")), found.identity()))
            });
            assert_eq!(known, RuleAt::Refused);
        }
        assert_eq!(asked, 1);
    }
}
