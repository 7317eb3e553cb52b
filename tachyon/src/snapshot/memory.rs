//! A target's memory at one moment, as far as possible: each page is read once, when it is first asked for.
//!
//! A thread's frames are next to each other on its data stack, so one page holds many of them, copied within a
//! fraction of a microsecond; read field by field they would be torn more often, and would cost a system call each.

use crate::remote::PAGE;
use std::cell::RefCell;
use std::collections::HashMap;
use tachyon_common::walk::{Unreadable, UserMemory};

/// Most pages kept: 64 MiB. A stack of 1,024 frames touches 4,000 at the very worst.
const MAX_PAGES: usize = 16_384;

/// Reads through to `memory`, and remembers what it read.
pub(super) struct Pages<'a, M: ?Sized> {
    memory: &'a M,
    pages: RefCell<HashMap<u64, Option<Box<[u8; PAGE]>>>>,
}

impl<'a, M: UserMemory + ?Sized> Pages<'a, M> {
    /// A memory of which no page has been read yet.
    pub(super) fn new(memory: &'a M) -> Self {
        Self { memory, pages: RefCell::default() }
    }

    /// Adds pages that have already been read, by their numbers.
    pub(super) fn fill(&mut self, pages: impl Iterator<Item = (u64, Box<[u8; PAGE]>)>) {
        self.pages.get_mut().extend(pages.map(|(number, page)| (number, Some(page))).take(MAX_PAGES));
    }

    /// How many pages have been read or asked for.
    pub(super) fn len(&self) -> usize {
        self.pages.borrow().len()
    }

    /// The numbers of all pages that could be read.
    pub(super) fn numbers(&self) -> Vec<u64> {
        self.pages.borrow().iter().filter(|(_, page)| page.is_some()).map(|(number, _)| *number).collect()
    }

    fn copy(&self, number: u64, from: usize, into: &mut [u8]) -> Result<(), Unreadable> {
        let mut pages = self.pages.borrow_mut();
        if pages.len() >= MAX_PAGES && !pages.contains_key(&number) {
            return Err(Unreadable);
        }
        let page = pages.entry(number).or_insert_with(|| {
            let mut page = Box::new([0; PAGE]);
            self.memory.read(number.wrapping_mul(PAGE as u64), &mut page[..]).ok().map(|()| page)
        });
        let bytes = page.as_ref().and_then(|page| page.get(from..from + into.len())).ok_or(Unreadable)?;
        into.copy_from_slice(bytes);
        Ok(())
    }
}

impl<M: UserMemory + ?Sized> UserMemory for Pages<'_, M> {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let mut addr = addr;
        let mut rest = into;
        while !rest.is_empty() {
            let from = (addr % PAGE as u64) as usize;
            let len = rest.len().min(PAGE - from);
            let (now, later) = std::mem::take(&mut rest).split_at_mut(len);
            self.copy(addr / PAGE as u64, from, now)?;
            addr = addr.checked_add(now.len() as u64).ok_or(Unreadable)?;
            rest = later;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Three pages from 0x1000 on whose bytes count the reads.
    struct Counting(Cell<u8>);

    impl UserMemory for Counting {
        fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
            if !(0x1000..0x4000).contains(&addr) {
                return Err(Unreadable);
            }
            self.0.set(self.0.get() + 1);
            into.fill(self.0.get());
            Ok(())
        }
    }

    #[test]
    fn each_page_is_read_once() {
        let memory = Counting(Cell::new(0));
        let pages = Pages::new(&memory);
        let mut bytes = [0; 8];
        for _ in 0..3 {
            pages.read(0x1ffc, &mut bytes).expect("two pages that are there");
            assert_eq!(bytes, [1, 1, 1, 1, 2, 2, 2, 2]);
        }
        for addr in [0xffc, 0x3ffc, u64::MAX - 3, 0] {
            assert_eq!(pages.read(addr, &mut bytes), Err(Unreadable), "{addr:#x}");
        }
        let mut long = vec![0; 0x3000];
        assert_eq!(pages.read(0x1000, &mut long), Ok(()));
        assert_eq!((long[0], long[0x1000], long[0x2000]), (1, 2, 3));
    }
}
