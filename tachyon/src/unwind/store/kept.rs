//! Rules of whole files that are kept between recordings ([`crate::kept`]).
//!
//! Making the rules of an interpreter costs a start more than anything else in user space. So at the end of a recording the rows that it
//! made are read back from where the kernel side has them, and written down; the next recording of a file in the same state takes them
//! from there. What is read is checked as far as a search needs it (rows are in order); that they are the file's own is what the
//! folder and the file's state stand for.

use super::super::compile::{MAX_ROWS, Refusal, Table};
use super::file::compile_own;
use super::placed::{Part, Placed};
use super::wanted::TableMemory;
use super::{Known, UnwindTables};
use crate::kept::sealed::{self, MAX_UNPACKED, column, numbers};
use crate::kept::{Folder, Key, Kind, sum};
use crate::remote::TargetFile;
use crate::remote::elf::Elf;
use crate::remote::ledger;
use prost::Message as _;
use prost::bytes::Bytes;
use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tachyon_common::unwind::{Row, Rule};

/// Fewest bytes of `.eh_frame` of a file whose rules are kept: those of smaller files are made as fast as they are read.
const LEAST: u64 = 32 << 10;

/// Longest CPU time for writing rules down at one time; the rest follows at the next, or in another recording.
const MOST_TIME: Duration = Duration::from_millis(if cfg!(debug_assertions) { 100 } else { 10 });

/// The last number is the version of the format.
const MAGIC: [u8; 8] = *b"tachunw\x01";

/// A sum of all code that turns a file's rules into rows: what another one has made is not used.
const COMPILER: u64 = sum(&[
    include_bytes!("../compile.rs").as_slice(),
    include_bytes!("../compile/arm64.rs").as_slice(),
    include_bytes!("../compile/assembly.rs").as_slice(),
    include_bytes!("../compile/eh_return.rs").as_slice(),
    include_bytes!("../compile/pieces.rs").as_slice(),
    include_bytes!("../compile/window.rs").as_slice(),
    include_bytes!("../compile/x86_64.rs").as_slice(),
    include_bytes!("../../../../tachyon-common/src/unwind/arm64.rs").as_slice(),
    include_bytes!("../../../../tachyon-common/src/unwind/rows.rs").as_slice(),
    include_bytes!("../../../../tachyon-common/src/unwind/x86_64.rs").as_slice(),
]);

/// How many files' rules this process has made because none were kept.
static TABLES_MADE: AtomicU64 = AtomicU64::new(0);

/// How often this process has made the rules of a file so far that is large enough for them to be kept.
#[must_use]
pub fn tables_made() -> u64 {
    TABLES_MADE.load(Ordering::Relaxed)
}

#[derive(Clone, PartialEq, prost::Message)]
struct Stored {
    #[prost(message, optional, tag = "1")]
    key: Option<Key>,
    #[prost(fixed64, tag = "2")]
    compiler: u64,
    #[prost(uint64, tag = "3")]
    base: u64,
    #[prost(uint64, tag = "4")]
    unsupported: u64,
    /// Of each row, how far it is from the one before.
    #[prost(bytes = "bytes", tag = "5")]
    steps: Bytes,
    #[prost(bytes = "bytes", tag = "6")]
    rules: Bytes,
    /// [`Table::assembly`]: beginnings and ends by turns.
    #[prost(uint64, repeated, tag = "7")]
    assembly: Vec<u64>,
}

/// What is to be written down of a table that was made in this recording, beside its rows.
#[derive(Debug)]
pub(super) struct Unkept {
    key: Key,
    unsupported: usize,
    assembly: Vec<std::ops::Range<u64>>,
}

/// The table of a file with so many bytes of rules: what is kept of it, or what is made now, which then is to be written down.
pub(super) fn table(
    folder: Option<&Arc<Folder>>,
    (file, elf): (&TargetFile, &Elf<&TargetFile>),
    rules: u64,
) -> (Result<Table, Refusal>, Option<Box<Unkept>>) {
    if rules < LEAST {
        return (compile_own(elf), None);
    }
    let key = || Key::of(&elf.build_id()?, file, None);
    let kept = folder.and_then(|folder| Some((folder, key()?)));
    if let Some((folder, key)) = &kept {
        let content = key.file_name(Kind::Rules).and_then(|name| folder.read(&name));
        if let Some(table) = content.and_then(|content| decode(&content, key)) {
            return (Ok(table), None);
        }
    }
    TABLES_MADE.fetch_add(1, Ordering::Relaxed);
    let made = compile_own(elf);
    let unkept = match (&made, kept) {
        // One that changes while it is read has another state afterwards.
        (Ok(table), Some((_, before))) if key().as_ref() == Some(&before) => {
            let (unsupported, assembly) = (table.unsupported, table.assembly.clone());
            Some(Box::new(Unkept { key: before, unsupported, assembly }))
        }
        _ => None,
    };
    (made, unkept)
}

impl UnwindTables {
    /// Writes down rules that were made since the last time, for other recordings.
    pub fn keep(&mut self, memory: &impl TableMemory) {
        let Some(folder) = &self.folder else { return };
        let until = ledger::thread_time() + MOST_TIME;
        let mut written = false;
        let placed = self.known.values_mut().filter_map(|known| match known {
            Known::Placed(placed) if placed.unkept.is_some() => Some(placed),
            _ => None,
        });
        let mut placed: Vec<_> = placed.collect();
        // What costs most to make comes first.
        placed.sort_by_key(|placed| Reverse(placed.rules));
        for placed in placed {
            if ledger::thread_time() >= until {
                break;
            }
            let Some((key, table)) = placed.take_unkept(memory) else { continue };
            if let Some((name, content)) = key.file_name(Kind::Rules).zip(encode(&key, &table)) {
                // A folder that cannot be written is one that keeps nothing.
                let _read_only = folder.write(&name, &content);
                written = true;
            }
        }
        if written {
            folder.tidy();
        }
    }
}

impl Placed {
    /// Its table, if that is to be written down, and what it was made from: once.
    fn take_unkept(&mut self, memory: &impl TableMemory) -> Option<(Key, Table)> {
        let Unkept { key, unsupported, assembly } = *self.unkept.take()?;
        let placed = self.tables.values().next()?;
        let mut rows = Vec::new();
        for &Part { pc, first, rows: count, .. } in &placed.parts {
            let part = memory.read_rows(first, u32::from(count))?;
            rows.extend(part.into_iter().map(|row| Row::new(row.pc().wrapping_add(pc), row.rule())));
        }
        Some((key, Table { base: placed.base, rows, unsupported, assembly }))
    }
}

/// A table as a file's content; `None`: it is too large for one.
fn encode(key: &Key, table: &Table) -> Option<Vec<u8>> {
    if table.rows.len() > MAX_UNPACKED / size_of::<Row>() {
        return None;
    }
    let before = std::iter::once(0).chain(table.rows.iter().map(|row| row.pc()));
    let stored = Stored {
        key: Some(key.clone()),
        compiler: COMPILER,
        base: table.base,
        unsupported: table.unsupported as u64,
        steps: column(table.rows.iter().zip(before).map(|(row, before)| row.pc().wrapping_sub(before))),
        rules: column(table.rows.iter().map(|row| row.rule().0)),
        assembly: table.assembly.iter().flat_map(|part| [part.start, part.end]).collect(),
    };
    sealed::seal(MAGIC, &stored.encode_to_vec())
}

/// The table in a file's content; `None`: it is of something else, or damaged.
fn decode(content: &[u8], key: &Key) -> Option<Table> {
    let stored = Stored::decode(sealed::open(MAGIC, content)?).ok()?;
    if stored.key.as_ref() != Some(key) || stored.compiler != COMPILER {
        return None;
    }
    let (steps, rules) = (numbers(&stored.steps)?, numbers(&stored.rules)?);
    if steps.len() != rules.len() || steps.len() > MAX_ROWS {
        return None;
    }
    let (mut rows, mut pc) = (Vec::with_capacity(steps.len()), 0_u32);
    for (step, rule) in steps.zip(rules) {
        pc = pc.checked_add(step).filter(|_| step > 0 || rows.is_empty())?;
        rows.push(Row::new(pc, Rule(rule)));
    }
    let (parts, rest) = stored.assembly.as_chunks::<2>();
    let assembly: Vec<_> = parts.iter().map(|&[start, end]| start..end).collect();
    if !rest.is_empty() || !assembly.is_sorted_by_key(|part| part.start) {
        return None;
    }
    Some(Table { base: stored.base, rows, unsupported: usize::try_from(stored.unsupported).ok()?, assembly })
}
