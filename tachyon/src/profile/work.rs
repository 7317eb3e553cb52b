//! Whose work a sample was: that of an asyncio task or a span.

use super::StrId;
use foldhash::fast::RandomState;
use indexmap::IndexSet;

/// Index of a piece of work in [`WorkTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkId(u32);

/// An asyncio task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Task {
    /// Its name.
    pub name: StrId,
    /// The value of `id(task)` in its process: an address, which another task may have later.
    pub id: u64,
}

/// Whose work it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Work {
    /// The asyncio task that ran.
    pub task: Option<Task>,
    /// Trace id and span id of the span of OpenTelemetry that the thread was in.
    pub span: Option<([u8; 16], [u8; 8])>,
}

impl Work {
    /// Trace id and span id, as OpenTelemetry writes them: hexadecimal digits.
    #[must_use]
    pub fn span_ids(&self) -> Option<(String, String)> {
        let digits = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        self.span.map(|(trace, span)| (digits(&trace), digits(&span)))
    }
}

/// Most pieces of work that are kept: each request of a server may be one.
pub const MOST_WORKS: usize = 1 << 20;

/// Distinct pieces of work, in order of first use.
#[derive(Clone, Debug, Default)]
pub struct WorkTable(IndexSet<Work, RandomState>);

impl WorkTable {
    /// The handle of a piece of work; `None`: there are too many.
    pub fn intern(&mut self, work: Work) -> Option<WorkId> {
        let known = self.0.get_index_of(&work);
        let at = known.or_else(|| (self.0.len() < MOST_WORKS).then(|| self.0.insert_full(work).0))?;
        u32::try_from(at).ok().map(WorkId)
    }

    /// The piece of work behind a handle.
    ///
    /// # Panics
    /// When the handle is of another profile.
    #[must_use]
    pub fn get(&self, id: WorkId) -> &Work {
        &self.0[id.0 as usize]
    }
}

impl WorkId {
    /// Its number, from 1 on: 0 is left for samples without any.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0 as u64 + 1
    }

    /// The one with that number.
    #[must_use]
    pub fn from_number(number: u64) -> Option<Self> {
        u32::try_from(number.checked_sub(1)?).ok().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_work_is_kept_once() {
        let mut works = WorkTable::default();
        let span = Some(([0xab; 16], [1; 8]));
        let first = works.intern(Work { task: None, span }).expect("there is room");
        assert_eq!(works.intern(Work { task: None, span }), Some(first));
        let other = works.intern(Work::default()).expect("there is room");
        assert_ne!(first, other);
        assert_eq!(works.get(first).span_ids(), Some(("ab".repeat(16), "01".repeat(8))));
        assert_eq!(WorkId::from_number(other.number()), Some(other));
        assert_eq!(WorkId::from_number(0), None);
    }
}
