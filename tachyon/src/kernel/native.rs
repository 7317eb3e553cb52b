//! The maps of native stacks: unwind rows, ranges of address spaces, and the processes they belong to.

use super::error::KernelError;
use super::object::take;
use super::pod::Pod;
use super::rows::RowChunks;
use super::shared::SharedArray;
use crate::unwind::{TableMemory, UnwindTables};
use aya::Ebpf;
use aya::maps::{HashMap, Map, MapData};
use tachyon_common::unwind::{Range, Row, Space};

/// Maps for native stacks.
pub struct NativeMaps {
    rows: RowChunks,
    ranges: SharedArray<Range>,
    spaces: HashMap<MapData, u32, Pod<Space>>,
}

impl NativeMaps {
    pub(super) fn of(ebpf: &mut Ebpf, rows: RowChunks, ranges: u32) -> Result<Self, KernelError> {
        Ok(Self { rows, ranges: shared(ebpf, "RANGES", ranges)?, spaces: take(ebpf, "SPACES")? })
    }

    /// Tables that fill the available room.
    #[must_use]
    pub fn tables(&self) -> UnwindTables {
        UnwindTables::new(self.rows.entries(), self.ranges.entries())
    }

    /// Says where a process's ranges are. `tgid` is of the profiler's namespace.
    ///
    /// # Errors
    /// When the table is full.
    pub fn set_space(&mut self, tgid: u32, space: &Space) -> Result<(), KernelError> {
        self.spaces.insert(tgid, Pod(*space), 0).map_err(KernelError::map("SPACES"))
    }

    /// Forgets a process's ranges. The kernel side does so when a process ends, but may have done so too early.
    pub fn remove_space(&mut self, tgid: u32) {
        // It does not matter if there are none.
        let _none = self.spaces.remove(&tgid);
    }
}

impl TableMemory for NativeMaps {
    fn write_rows(&mut self, first: u32, rows: &[Row]) -> bool {
        self.rows.write(first, rows)
    }

    fn read_rows(&self, first: u32, count: u32) -> Option<Vec<Row>> {
        self.rows.read(first, count)
    }

    fn write_ranges(&mut self, first: u32, ranges: &[Range]) {
        let written = self.ranges.write(first, ranges);
        debug_assert!(written, "the tables know how large the map is");
    }

    fn spaces(&self) -> Vec<Space> {
        self.spaces.iter().filter_map(|entry| entry.ok().map(|(_, space)| space.0)).collect()
    }
}

pub(super) fn shared<T: Copy>(
    ebpf: &mut Ebpf,
    name: &'static str,
    entries: u32,
) -> Result<SharedArray<T>, KernelError> {
    let map = ebpf.take_map(name).ok_or(KernelError::Missing(name))?;
    let Map::Array(data) = map else { return Err(KernelError::Missing(name)) };
    SharedArray::of(data, entries).map_err(|source| KernelError::Share(name, source))
}
