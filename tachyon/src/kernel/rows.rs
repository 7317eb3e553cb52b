//! Unwind rows in the kernel: an array of array maps, each made when it is first written, so that a limit of 64 MiB costs
//! only what the tables in it need.
//!
//! The library makes arrays of maps from BTF definitions only, and the object has no BTF. So the object declares `ROWS` as
//! an array that the library can make, and before the programs are loaded the descriptor of that array is made to refer to
//! the real one: programs name maps by descriptor until the kernel has verified them.

use super::error::KernelError;
use super::object::{map_fd, memlock};
use super::shared::SharedArray;
use aya::Ebpf;
use aya::maps::{ArrayOfMaps, Map, MapData, MapError};
use aya_obj::generated::{bpf_attr, bpf_cmd, bpf_map_type};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tachyon_common::limits::ROWS_PER_CHUNK;
use tachyon_common::unwind::Row;

/// The name of the map.
const ROWS: &str = "ROWS";

/// `BPF_F_MMAPABLE` (`include/uapi/linux/bpf.h`, Linux 5.5).
const BPF_F_MMAPABLE: u32 = 1 << 10;

/// All rows that exist so far.
pub(super) struct RowChunks {
    outer: ArrayOfMaps<MapData>,
    chunks: Vec<Option<SharedArray<Row>>>,
    /// Rows of each chunk.
    chunk_rows: u32,
    /// Bytes of all maps.
    map_bytes: Arc<AtomicU64>,
}

impl RowChunks {
    /// Puts the real map, for rows of that many bytes, in the place of the declared one. To be called before programs
    /// are loaded.
    ///
    /// # Errors
    /// When the kernel refuses a map.
    pub fn put_in_place(ebpf: &Ebpf, bytes: u32, map_bytes: &Arc<AtomicU64>) -> Result<Self, KernelError> {
        let share = |source| KernelError::Share(ROWS, source);
        let rows = (bytes / size_of::<Row>() as u32).max(1);
        // Whole chunks, so that together they do not exceed what was asked for.
        let (chunk_rows, count) = (rows.min(ROWS_PER_CHUNK), (rows / ROWS_PER_CHUNK).max(1));
        let chunk = new_chunk(chunk_rows).map_err(KernelError::map(ROWS))?;
        let outer = array_of_maps(&chunk, count).map_err(share)?;
        put_in_place(ebpf.map(ROWS).ok_or(KernelError::Missing(ROWS))?, outer.as_raw_fd())?;
        let outer = typed(outer).map_err(KernelError::map(ROWS))?;
        let chunks = std::iter::repeat_with(|| None).take(count as usize).collect();
        Ok(Self { outer, chunks, chunk_rows, map_bytes: Arc::clone(map_bytes) })
    }

    /// How many rows there is room for.
    pub fn entries(&self) -> u32 {
        self.chunks.len() as u32 * self.chunk_rows
    }

    /// Writes rows from `first` on; false when they do not fit into its chunk, or the kernel has no memory.
    pub fn write(&mut self, first: u32, rows: &[Row]) -> bool {
        self.chunk(first / ROWS_PER_CHUNK).is_some_and(|chunk| chunk.write(first % ROWS_PER_CHUNK, rows))
    }

    /// Reads rows from `first` on; `None`: they are not in one chunk that exists.
    pub fn read(&self, first: u32, count: u32) -> Option<Vec<Row>> {
        self.chunks.get((first / ROWS_PER_CHUNK) as usize)?.as_ref()?.read(first % ROWS_PER_CHUNK, count)
    }

    /// A chunk, made if necessary.
    fn chunk(&mut self, index: u32) -> Option<&mut SharedArray<Row>> {
        let slot = self.chunks.get_mut(index as usize)?;
        if slot.is_none() {
            let map = new_chunk(self.chunk_rows).ok()?;
            let bytes = memlock(map.fd().as_fd().as_raw_fd());
            self.outer.set(index, &map, 0).ok()?;
            *slot = Some(SharedArray::of(map, self.chunk_rows).ok()?);
            self.map_bytes.fetch_add(bytes.unwrap_or(0), Ordering::Relaxed);
        }
        slot.as_mut()
    }
}

/// Puts a map in the place of a declared one. To be called before programs are loaded.
pub(super) fn put_in_place(declared: &Map, map: RawFd) -> Result<(), KernelError> {
    let declared = map_fd(declared).ok_or(KernelError::Missing("map of a known kind"))?;
    // SAFETY: both are open descriptors; the declared map's stays that of its owner, who closes it once.
    let put = unsafe { libc::dup3(map, declared, libc::O_CLOEXEC) };
    if put < 0 { Err(KernelError::PutInPlace(io::Error::last_os_error())) } else { Ok(()) }
}

fn new_chunk(rows: u32) -> Result<MapData, MapError> {
    let row = size_of::<Row>() as u32;
    let array = bpf_map_type::BPF_MAP_TYPE_ARRAY as u32;
    let chunk = aya_obj::Map::new_from_params(array, size_of::<u32>() as u32, row, rows, BPF_F_MMAPABLE);
    MapData::create(chunk, "ROW_CHUNK", None)
}

/// An array of `count` maps like `inner`. (The library's function for this is private.)
pub(super) fn array_of_maps(inner: &MapData, count: u32) -> io::Result<OwnedFd> {
    // SAFETY: all zeros are a valid `bpf_attr`.
    let mut attr: bpf_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the member of the union that `BPF_MAP_CREATE` reads; its fields are plain numbers.
    let create = unsafe { &mut attr.__bindgen_anon_1 };
    create.map_type = bpf_map_type::BPF_MAP_TYPE_ARRAY_OF_MAPS as u32;
    create.key_size = size_of::<u32>() as u32;
    create.value_size = size_of::<u32>() as u32;
    create.max_entries = count;
    create.inner_map_fd = inner.fd().as_fd().as_raw_fd().cast_unsigned();
    // SAFETY: `attr` is valid for reads of its size.
    let fd = unsafe {
        libc::syscall(libc::SYS_bpf, bpf_cmd::BPF_MAP_CREATE as libc::c_long, &raw const attr, size_of::<bpf_attr>())
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor, which nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

pub(super) fn typed(outer: OwnedFd) -> Result<ArrayOfMaps<MapData>, MapError> {
    ArrayOfMaps::try_from(Map::from_map_data(MapData::from_fd(outer)?)?)
}
