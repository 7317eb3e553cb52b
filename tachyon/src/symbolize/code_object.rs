//! What is known about one code object: names and line table, as they arrive in parts.
//!
//! In: code records of the kernel side, or a live process's memory. Out: frames, once the parts suffice. Sizes that a
//! target claims are limits, never allocations.

use super::linetable::{Format, LineTable, Position};
use super::text::{self, BadText};
use crate::profile::{Frame, FrameId, StrId, StringTable};
use std::collections::BTreeMap;
use std::sync::Arc;
use tachyon_common::event::frame::UNKNOWN_LASTI;
use tachyon_common::event::{CodeRecord, code as code_flags};
use tachyon_common::layout::Layout;
use tachyon_common::limits;
use tachyon_common::stop::StopReason;
use tachyon_common::walk::{self, CodeBuffer, CodeIdentity, TextHash, Unreadable, UserMemory, code_identity};

/// Most bytes kept of one line table: those that are part of its code object's identity. What a longer one says about
/// later instructions stays unknown.
pub const MAX_LINETABLE_BYTES: usize = limits::MAX_LINETABLE_BYTES as usize;

/// CPython 3.15.1's words for names that could not be read.
pub(super) const UNKNOWN_FUNCTION: &str = "<unknown function>";
pub(super) const UNKNOWN_FILE: &str = "<unknown file>";

/// Identity of a code object (DESIGN.md 7): its address alone is not enough, since it is reused once the object is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CodeKey {
    /// Memory image it lives in: new at `exec`, inherited by `fork`.
    pub image: u64,
    /// Address of the `PyCodeObject`.
    pub code: u64,
    /// Hash of what distinguishes it from others that are ever at that address.
    pub fingerprint: u64,
}

impl From<&CodeRecord> for CodeKey {
    fn from(record: &CodeRecord) -> Self {
        Self { image: record.image, code: record.code, fingerprint: record.fingerprint }
    }
}

/// Why a code record was not accepted, or not wholly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadCodeRecord {
    /// The payload is shorter than the record says.
    #[error("code record announces {needed} bytes and brings {found}")]
    Short {
        /// Bytes announced.
        needed: u64,
        /// Bytes there.
        found: usize,
    },
    /// A part of the line table is outside it.
    #[error("code record brings bytes {start} to {end} of a line table of {total}")]
    OutOfTable {
        /// Where the part starts.
        start: u32,
        /// Where it ends.
        end: u64,
        /// Length of the table.
        total: u32,
    },
    /// The qualified name is not a valid string.
    #[error("cannot decode a qualified name: {0}")]
    Qualname(#[source] BadText),
    /// The file name is not a valid string.
    #[error("cannot decode a file name: {0}")]
    Filename(#[source] BadText),
    /// The process, or its user, has so many code objects that no more are remembered.
    #[error("the process of image {0} has used its bytes for names and line tables")]
    Budget(u64),
    /// Nothing more is to be remembered about any process.
    #[error("no memory is left for further code objects")]
    Full,
}

/// Why a code object could not be read from a live process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadCodeError {
    /// Memory could not be read; the process may be gone.
    #[error("cannot read code object at {0:#x}")]
    Unreadable(u64),
    /// Another object is there by now.
    #[error("code object at {0:#x} is another one by now")]
    Changed(u64),
    /// The process has so many code objects that no more are remembered.
    #[error("image {0} has used its bytes for names and line tables")]
    Budget(u64),
    /// One of its names is not a valid string.
    #[error("cannot read a name of the code object at {code:#x}: {source}")]
    Text {
        /// Address of the code object.
        code: u64,
        /// What is wrong.
        source: BadText,
    },
}

/// A line table as far as it is known.
#[derive(Debug)]
pub(super) enum Table {
    /// Parts by where they start.
    Parts(BTreeMap<u32, Box<[u8]>>),
    /// All there is to know.
    Ready(Arc<LineTable>),
}

/// A frame that was made from this code object.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub(super) lasti: i32,
    pub(super) opcode: u8,
    /// The frame does not have its final value yet.
    pub(super) pending: bool,
    pub(super) frame: FrameId,
}

/// Facts that every record of a code object carries.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) tgid: u32,
    pub(super) layout: u32,
    pub(super) format: Format,
    pub(super) firstlineno: i32,
}

/// One code object.
#[derive(Debug)]
pub(super) struct Code {
    pub(super) qualname: Option<StrId>,
    pub(super) filename: Option<StrId>,
    pub(super) table: Table,
    pub(super) uses: Vec<Use>,
    /// What its first record says about it.
    pub(super) seen: Option<Seen>,
    /// Times that the live process could not be read.
    pub(super) failed_reads: u8,
}

impl Code {
    /// A code object about which nothing is known yet.
    pub(super) const fn unseen() -> Self {
        Self {
            qualname: None,
            filename: None,
            table: Table::Parts(BTreeMap::new()),
            uses: Vec::new(),
            seen: None,
            failed_reads: 0,
        }
    }

    pub(super) const fn is_named(&self) -> bool {
        self.qualname.is_some() && self.filename.is_some()
    }

    pub(super) const fn has_table(&self) -> bool {
        matches!(self.table, Table::Ready(_))
    }

    /// Nothing more can be learnt.
    pub(super) fn is_complete(&self) -> bool {
        self.has_table() && self.is_named()
    }

    /// Whether `lasti` may be an offset into this code, as far as is known.
    pub(super) fn covers(&self, lasti: i32) -> bool {
        match &self.table {
            Table::Ready(table) => table.covers(lasti),
            Table::Parts(_) => true,
        }
    }

    /// Takes a part of the line table; `Some` when that was the last one missing.
    pub(super) fn add_part(&mut self, start: u32, part: &[u8], total: u32, cut: bool) -> Option<(Box<[u8]>, bool)> {
        let Table::Parts(parts) = &mut self.table else { return None };
        if parts.get(&start).is_none_or(|known| known.len() < part.len()) {
            parts.insert(start, part.into());
        }
        let total = total as usize;
        let wanted = total.min(MAX_LINETABLE_BYTES);
        // Cheap while parts are missing: most tables come in one part.
        if parts.values().map(|part| part.len()).sum::<usize>() < wanted {
            return None;
        }
        let mut bytes = prefix(parts);
        bytes.truncate(wanted);
        (bytes.len() == wanted).then(|| (bytes.into_boxed_slice(), wanted == total && !cut))
    }

    /// What is known about a table with missing parts, once no more will come.
    pub(super) fn cut_table(&self) -> Option<LineTable> {
        let (Table::Parts(parts), Some(seen)) = (&self.table, self.seen) else { return None };
        Some(LineTable::new(seen.format, seen.firstlineno, prefix(parts).into(), false))
    }

    /// The frame for an instruction, by what is known now.
    pub(super) fn frame(&self, lasti: i32, opcode: u8, strings: &mut StringTable) -> Frame {
        let position = match &self.table {
            Table::Ready(table) if lasti != UNKNOWN_LASTI => table.locate(lasti),
            Table::Ready(_) | Table::Parts(_) => Position::NONE,
        };
        Frame {
            filename: self.filename.unwrap_or_else(|| strings.intern(UNKNOWN_FILE)),
            function: self.qualname.unwrap_or_else(|| strings.intern(UNKNOWN_FUNCTION)),
            lineno: position.lineno,
            end_lineno: position.end_lineno,
            column: position.column,
            end_column: position.end_column,
            opcode,
        }
    }
}

/// The contiguous bytes from the table's start that the parts give.
fn prefix(parts: &BTreeMap<u32, Box<[u8]>>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (&start, part) in parts {
        let Some(new) = bytes.len().checked_sub(start as usize).map(|known| part.get(known..).unwrap_or_default())
        else {
            break;
        };
        bytes.extend_from_slice(new);
    }
    bytes
}

/// A code record's payload, decoded.
#[derive(Debug)]
pub(super) struct Part<'a> {
    qualname: &'a [u8],
    filename: &'a [u8],
    /// `None` when it could not be read.
    pub(super) linetable: Option<&'a [u8]>,
}

impl<'a> Part<'a> {
    pub(super) fn split(record: &CodeRecord, payload: &'a [u8]) -> Result<Self, BadCodeRecord> {
        let lengths = [record.qualname_bytes, record.filename_bytes, record.linetable_bytes];
        let short =
            || BadCodeRecord::Short { needed: lengths.iter().copied().map(u64::from).sum(), found: payload.len() };
        let (qualname, rest) = payload.split_at_checked(record.qualname_bytes as usize).ok_or_else(short)?;
        let (filename, rest) = rest.split_at_checked(record.filename_bytes as usize).ok_or_else(short)?;
        let linetable = rest.get(..record.linetable_bytes as usize).ok_or_else(short)?;
        let end = u64::from(record.linetable_start) + u64::from(record.linetable_bytes);
        if end > u64::from(record.linetable_len) {
            let (start, total) = (record.linetable_start, record.linetable_len);
            return Err(BadCodeRecord::OutOfTable { start, end, total });
        }
        let readable = record.flags & code_flags::LINETABLE_UNREADABLE == 0;
        Ok(Self { qualname, filename, linetable: readable.then_some(linetable) })
    }

    /// The qualified name; `None` when this record does not bring it.
    pub(super) fn qualname(&self, record: &CodeRecord) -> Result<Option<String>, BadText> {
        let flags = (code_flags::QUALNAME_UNREADABLE, code_flags::QUALNAME_CUT);
        name(record, self.qualname, record.qualname_kind, flags)
    }

    /// The same for the file name.
    pub(super) fn filename(&self, record: &CodeRecord) -> Result<Option<String>, BadText> {
        let flags = (code_flags::FILENAME_UNREADABLE, code_flags::FILENAME_CUT);
        name(record, self.filename, record.filename_kind, flags)
    }
}

fn name(record: &CodeRecord, bytes: &[u8], kind: u8, (unreadable, cut): (u32, u32)) -> Result<Option<String>, BadText> {
    if record.linetable_start != 0 || record.flags & unreadable != 0 {
        return Ok(None);
    }
    let cut = record.flags & cut != 0;
    text::decode(kind, bytes, cut).map(Some)
}

/// A code object read from a live process.
#[derive(Debug)]
pub(super) struct LiveCode {
    pub(super) qualname: String,
    pub(super) filename: String,
    pub(super) linetable: Box<[u8]>,
    pub(super) whole: bool,
    pub(super) firstlineno: i32,
    /// [`is_shim`].
    pub(super) shim: bool,
}

/// Whether a code object with these names and first line is the interpreter's own: its function's and its file's name are
/// one string object, and it has no first line. It is `_Py_InitCleanup`, which the evaluator runs between a constructor's
/// caller and `__init__` (3.13+, `Python/specialize.c` [v3.13.0]). No frame of it is ever complete, so tracebacks and
/// `inspect` leave it out.
pub(super) const fn is_shim(qualname: u64, filename: u64, firstlineno: i32) -> bool {
    qualname == filename && qualname != 0 && firstlineno <= 0
}

impl LiveCode {
    /// Reads the code object that `key` names, and accepts it only if its identity is the same before and after.
    pub(super) fn read<M: UserMemory + ?Sized>(
        memory: &M,
        layout: &Layout,
        seed: u64,
        key: CodeKey,
    ) -> Result<Self, ReadCodeError> {
        let unreadable = |Unreadable| ReadCodeError::Unreadable(key.code);
        let identity = check(memory, layout, seed, key)?;
        let linetable_len = walk::linetable_len(memory, layout, identity.linetable);
        let mut live = Self {
            qualname: String::new(),
            filename: String::new(),
            linetable: Box::default(),
            whole: linetable_len <= MAX_LINETABLE_BYTES as u64,
            firstlineno: identity.firstlineno,
            shim: is_shim(identity.qualname, identity.filename, identity.firstlineno),
        };
        let read_text = |address| {
            text::read(memory, layout, address).map_err(|source| match source {
                BadText::Unreadable(_) => ReadCodeError::Unreadable(key.code),
                source => ReadCodeError::Text { code: key.code, source },
            })
        };
        live.qualname = read_text(identity.qualname)?;
        live.filename = read_text(identity.filename)?;
        let len = usize::try_from(linetable_len).map_or(MAX_LINETABLE_BYTES, |n| n.min(MAX_LINETABLE_BYTES));
        live.linetable = vec![0; len].into();
        let start = identity.linetable.wrapping_add(u64::from(layout.bytes_sval));
        memory.read(start, &mut live.linetable).map_err(unreadable)?;
        // The object may have been freed, and its parts with it, while they were read.
        if check(memory, layout, seed, key)? == identity { Ok(live) } else { Err(ReadCodeError::Changed(key.code)) }
    }

    pub(super) fn table(self, layout: &Layout) -> LineTable {
        LineTable::new(Format::of(layout), self.firstlineno, self.linetable, self.whole)
    }
}

fn check<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    seed: u64,
    key: CodeKey,
) -> Result<CodeIdentity, ReadCodeError> {
    let identity = code_identity(memory, layout, seed, key.code, &mut CodeBuffer::default(), &mut TextHash::default())
        .map_err(|_: StopReason| ReadCodeError::Unreadable(key.code))?;
    if identity.lacks != 0 {
        // A fingerprint made without names or table proves nothing about them.
        return Err(ReadCodeError::Unreadable(key.code));
    }
    if identity.fingerprint == key.fingerprint { Ok(identity) } else { Err(ReadCodeError::Changed(key.code)) }
}
