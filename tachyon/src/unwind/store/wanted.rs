//! What is requested of tables, and where they are kept.

use super::super::Generated;
use crate::remote::FileIdentity;
use std::collections::{HashMap, HashSet};
use tachyon_common::unwind::{Range, Row, Space};

/// Where tables are kept for the kernel side.
pub trait TableMemory {
    /// Writes rows and their index from index `first` on, all of them in one chunk of
    /// [`ROWS_PER_CHUNK`](tachyon_common::limits::ROWS_PER_CHUNK); false when there is no memory for them.
    fn write_rows(&mut self, first: u32, rows: &[Row]) -> bool;
    /// Reads so many of them back; `None`: they are not there.
    fn read_rows(&self, first: u32, count: u32) -> Option<Vec<Row>>;
    /// Writes ranges from index `first` on.
    fn write_ranges(&mut self, first: u32, ranges: &[Range]);
    /// The spaces of all processes.
    fn spaces(&self) -> Vec<Space>;
}

/// Files behind a process's mappings, by the mappings' start: each that is missing here costs a lookup.
pub type Identities = HashMap<u64, FileIdentity>;

/// What is requested for a process.
#[derive(Debug, Default)]
pub struct Wanted<'a> {
    /// What is known about its mappings.
    pub identities: Option<&'a Identities>,
    /// Its image.
    pub image: u64,
    /// Files whose tables are made at any cost: those of interpreters.
    pub first: Option<&'a HashSet<FileIdentity>>,
    /// Tables of generated code, by where its mapping starts.
    pub generated: Option<&'a HashMap<u64, Generated>>,
    /// Most bytes of `.eh_frame` that are turned into rows; `None`: all of them.
    pub allowance: Option<u64>,
}

/// Why a process has no ranges: all processes together have more than there is room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no room for the {0} ranges of its address space")]
pub struct NoRoom(pub usize);
