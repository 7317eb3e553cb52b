//! Gives back to the system what only the start needed.
//!
//! Loading the kernel side touches most of the program, sampling a twentieth of it. Pages of its files that are used again come
//! from the page cache, where the kernel may now drop the others first. Breakpoints that a debugger has set there go, too.

use super::memory::{page_size, return_freed};
use super::request::Request;
use nix::sys::mman::{MmapAdvise, madvise};
use std::ffi::{CStr, c_int, c_void};
use std::ptr::NonNull;

impl Request {
    /// A part of the work is done: gives back what only that needed, if [`Request::give_back`] asks for it.
    pub(super) fn release(&self) {
        if self.give_back {
            give_back();
        }
    }
}

/// Gives back freed memory, and the pages of this program's files.
pub(super) fn give_back() {
    return_freed();
    for segment in constant_segments() {
        let Some(start) = NonNull::new(std::ptr::with_exposed_provenance_mut::<c_void>(segment.start)) else {
            continue;
        };
        // SAFETY: nobody writes to this memory, so what is read there afterwards, from the file, is what was read before. Where the
        // kernel refuses, it stays.
        let _refused = unsafe { madvise(start, segment.len, MmapAdvise::MADV_DONTNEED) };
    }
}

/// Whole pages of a loaded file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    start: usize,
    len: usize,
}

/// The code and constants of this program and its libraries: never written to, not even for relocations.
fn constant_segments() -> Vec<Segment> {
    let mut found = Vec::new();
    let told: *mut Vec<Segment> = &raw mut found;
    // SAFETY: it calls `of_object` with what it documents, and with the pointer, which is valid until it returns.
    unsafe { libc::dl_iterate_phdr(Some(of_object), told.cast()) };
    found
}

/// Called for each loaded object; zero: the next one, please.
///
/// # Safety
/// As `dl_iterate_phdr` calls it: with the object's description, and with a pointer to a vector that nobody else uses meanwhile.
// SAFETY: every pointer is used as the caller has promised.
unsafe extern "C" fn of_object(info: *mut libc::dl_phdr_info, _size: usize, found: *mut c_void) -> c_int {
    // SAFETY: the caller passes a description that is valid during the call.
    let info = unsafe { &*info };
    // SAFETY: this is the pointer that was given along, to a vector that nobody else uses meanwhile.
    let found = unsafe { &mut *found.cast::<Vec<Segment>>() };
    // SAFETY: the name is a string, and empty for the program itself.
    let name = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
    if !name.is_empty() && !name.contains(&b'/') {
        // The vdso, which is no file.
        return 0;
    }
    // SAFETY: the description says where the headers are and how many.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let page = usize::try_from(page_size()).unwrap_or(4096);
    let constant = headers.iter().filter(|header| header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0);
    let address = |header: &libc::Elf64_Phdr| usize::try_from(info.dlpi_addr.wrapping_add(header.p_vaddr)).ok();
    found.extend(constant.filter_map(|header| {
        let (start, len) = (address(header)?, usize::try_from(header.p_memsz).ok()?);
        // The pages at its edges may hold other segments too.
        let (first, end) = (start.next_multiple_of(page), (start + len) / page * page);
        (first < end).then_some(Segment { start: first, len: end - first })
    }));
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::RemoteProcess;
    use crate::types::Pid;

    #[test]
    fn only_what_nobody_writes_to_is_given_back() {
        let own = RemoteProcess::open(Pid(std::process::id())).unwrap().maps().unwrap();
        let segments = constant_segments();
        assert!(segments.len() > 2, "the C library's, too: {segments:?}");
        for Segment { start, len } in &segments {
            let (start, end) = (*start as u64, (start + len) as u64);
            let mapping = own.iter().find(|mapping| mapping.contains(start)).expect("it is mapped");
            assert!(mapping.end >= end && mapping.private && !mapping.writable, "{mapping:?}");
            assert!(mapping.file_path().is_some(), "{mapping:?}");
        }
        let code = give_back as *const () as usize;
        assert!(segments.iter().any(|Segment { start, len }| (*start..start + len).contains(&code)), "{code:#x}");
        let text = std::hint::black_box("constant text");
        give_back();
        assert_eq!(text, "constant text");
        assert_eq!(constant_segments(), segments);
    }
}
