//! Reading an ELF file's bytes: completely or not at all, and never more than asked for.

use std::fs::File;
use std::io;
use std::sync::Arc;

use object::pod::{Pod, from_bytes};

use super::{ElfError, MAX_SYMTAB};

/// Where an ELF file's bytes come from.
pub trait ReadAt {
    /// Fills `into` with the bytes at `offset`, completely or not at all.
    ///
    /// # Errors
    /// When they cannot be read.
    fn read_exact_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Length in bytes.
    ///
    /// # Errors
    /// When it cannot be found out.
    fn len_bytes(&self) -> io::Result<u64>;
}

impl ReadAt for File {
    fn read_exact_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        // Names the trait: `FileExt` has the same method with its arguments the other way round.
        std::os::unix::fs::FileExt::read_exact_at(self, into, offset)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.metadata().map(|metadata| metadata.len())
    }
}

impl<R: ReadAt> ReadAt for &R {
    fn read_exact_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        (*self).read_exact_at(offset, into)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        (*self).len_bytes()
    }
}

impl<R: ReadAt> ReadAt for Arc<R> {
    fn read_exact_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        (**self).read_exact_at(offset, into)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        (**self).len_bytes()
    }
}

impl ReadAt for &[u8] {
    fn read_exact_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let start = usize::try_from(offset).ok();
        let bytes = start.and_then(|start| self.get(start..start.checked_add(into.len())?));
        into.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }
}

/// Reads one structure.
pub(super) fn read_pod<T: Pod + Copy>(source: &impl ReadAt, offset: u64) -> Result<T, ElfError> {
    read_table(source, offset, 1)?.pop().ok_or(ElfError::Malformed("header"))
}

/// Reads `count` structures that lie one after the other.
pub(super) fn read_table<T: Pod + Copy>(source: &impl ReadAt, offset: u64, count: u64) -> Result<Vec<T>, ElfError> {
    read_table_bounded(source, offset, count, MAX_SYMTAB)
}

/// Reads `count` structures, at most `most` bytes in total.
pub(super) fn read_table_bounded<T: Pod + Copy>(
    source: &impl ReadAt,
    offset: u64,
    count: u64,
    most: u64,
) -> Result<Vec<T>, ElfError> {
    let size = size_of::<T>() as u64;
    let bytes = read_bounded(source, offset, count.checked_mul(size).ok_or(ElfError::Malformed("table"))?, most)?;
    let structures = bytes.chunks_exact(size_of::<T>()).map(|chunk| from_bytes::<T>(chunk).map(|(value, _)| *value));
    structures.collect::<Result<_, ()>>().map_err(|()| ElfError::Malformed("table"))
}

/// Reads a small part of the file. Allocates only what the file really has.
pub(super) fn read_bytes(source: &impl ReadAt, offset: u64, len: u64) -> Result<Vec<u8>, ElfError> {
    read_bounded(source, offset, len, MAX_SYMTAB)
}

/// Reads a part of the file of at most `most` bytes. Allocates only what the file really has.
pub(super) fn read_bounded(source: &impl ReadAt, offset: u64, len: u64, most: u64) -> Result<Vec<u8>, ElfError> {
    let mut bytes = vec![0; bounded(source, offset, len, most)?];
    source.read_exact_at(offset, &mut bytes).map_err(|source| ElfError::Read { offset, len, source })?;
    Ok(bytes)
}

/// The same into shared bytes, without a copy: for ten megabytes that would take another ten.
pub(super) fn read_shared(source: &impl ReadAt, offset: u64, len: u64, most: u64) -> Result<Arc<[u8]>, ElfError> {
    let mut bytes: Arc<[u8]> = std::iter::repeat_n(0, bounded(source, offset, len, most)?).collect();
    if let Some(bytes) = Arc::get_mut(&mut bytes) {
        source.read_exact_at(offset, bytes).map_err(|source| ElfError::Read { offset, len, source })?;
    }
    Ok(bytes)
}

/// The length of a part, checked to be in the file and no longer than `most` bytes.
fn bounded(source: &impl ReadAt, offset: u64, len: u64, most: u64) -> Result<usize, ElfError> {
    let error = |source: io::Error| ElfError::Read { offset, len, source };
    let end = offset.checked_add(len);
    let size = usize::try_from(len).ok().filter(|_| len <= most);
    match (end, size) {
        (Some(end), Some(size)) if end <= source.len_bytes().map_err(error)? => Ok(size),
        _ => Err(error(io::ErrorKind::UnexpectedEof.into())),
    }
}
