//! An array map that both sides have mapped into memory.
//!
//! Writing it takes no system call: a burst of map updates from user space would delay samples on its CPU.

use aya::maps::MapData;
use std::io;
use std::marker::PhantomData;
use std::os::fd::AsFd as _;
use std::ptr::NonNull;

/// An array map made with `BPF_F_MMAPABLE` (Linux 5.5), mapped for writing.
///
/// The kernel side may read while user space writes: what is written must not be in use yet, and it is published by an update of
/// another map, which orders the two. What the kernel side writes can be read at any time, see [`SharedArray::read_all`].
#[doc(alias = "BPF_F_MMAPABLE")]
#[derive(Debug)]
pub struct SharedArray<T> {
    address: NonNull<T>,
    entries: u32,
    bytes: usize,
    // Tail calls and lookups work without it; it keeps the map's numbers readable in `/proc/self/fdinfo`.
    _map: MapData,
    _entry: PhantomData<T>,
}

// SAFETY: the mapping belongs to this value alone, and only `&mut self` writes it.
unsafe impl<T: Send> Send for SharedArray<T> {}

impl<T: Copy> SharedArray<T> {
    /// Maps a map of `entries` entries, each of the size of `T`.
    pub(super) fn of(map: MapData, entries: u32) -> io::Result<Self> {
        let value_size = map.info().map_err(io::Error::other)?.value_size() as usize;
        if value_size != size_of::<T>() || !size_of::<T>().is_multiple_of(8) {
            return Err(io::Error::other("its entries have another size"));
        }
        let bytes = entries as usize * size_of::<T>();
        let len = bytes.try_into().map_err(io::Error::other)?;
        let prot = nix::sys::mman::ProtFlags::PROT_READ | nix::sys::mman::ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let address = unsafe {
            nix::sys::mman::mmap(None, len, prot, nix::sys::mman::MapFlags::MAP_SHARED, map.fd().as_fd(), 0)
        }?;
        Ok(Self { address: address.cast(), entries, bytes, _map: map, _entry: PhantomData })
    }

    /// How many entries there are.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Reads entries that the other side may be writing: each word of one is old or new.
    pub fn read_all(&self) -> impl Iterator<Item = T> {
        self.read_some(0..self.entries)
    }

    /// Reads entries from `first` on, likewise; `None`: there are not so many.
    pub fn read(&self, first: u32, count: u32) -> Option<Vec<T>> {
        let end = first.checked_add(count).filter(|&end| end <= self.entries)?;
        Some(self.read_some(first..end).collect())
    }

    fn read_some(&self, range: std::ops::Range<u32>) -> impl ExactSizeIterator<Item = T> {
        debug_assert!(range.end <= self.entries, "{range:?} of {}", self.entries);
        (range.start as usize..range.end.min(self.entries) as usize).map(|index| {
            // SAFETY: the mapping holds as many entries, and lives as long as `self` is borrowed.
            let entry = unsafe { self.address.as_ptr().add(index) };
            // SAFETY: as above; plain data, for which any bytes are valid.
            unsafe { entry.read_volatile() }
        })
    }

    /// Writes entries from `first` on; if they do not fit, writes nothing and returns false.
    pub fn write(&mut self, first: u32, entries: &[T]) -> bool {
        let fits = (first as usize).checked_add(entries.len()).is_some_and(|end| end <= self.entries as usize);
        if fits {
            // SAFETY: `first` is within the mapping, which holds `entries` of `T`.
            let place = unsafe { self.address.as_ptr().add(first as usize) };
            // SAFETY: at least as many entries as are written follow `place`; nothing else in this process has the mapping.
            unsafe { place.copy_from_nonoverlapping(entries.as_ptr(), entries.len()) };
        }
        fits
    }
}

impl<T> Drop for SharedArray<T> {
    fn drop(&mut self) {
        // SAFETY: mapped in `of`, with this length; no reference into it is ever given out.
        let _unmapped = unsafe { nix::sys::mman::munmap(self.address.cast(), self.bytes) };
    }
}
