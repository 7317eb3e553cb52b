//! Files that are being written, for code that ends this process early.

use super::place::Place;
use nix::unistd::{UnlinkatFlags, unlinkat};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A file that does not have its final name yet, until this is dropped.
#[derive(Debug)]
pub(super) struct Unfinished(u64);

struct Entry {
    number: u64,
    directory: OwnedFd,
    part_name: OsString,
}

static ALL: Mutex<(u64, Vec<Entry>)> = Mutex::new((0, Vec::new()));

fn all() -> MutexGuard<'static, (u64, Vec<Entry>)> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Unfinished {
    /// `None` if there is no descriptor left: then it will not be removed.
    pub(super) fn of(place: &Place) -> Option<Self> {
        let directory = place.directory.try_clone().ok()?;
        let mut all = all();
        all.0 += 1;
        let number = all.0;
        all.1.push(Entry { number, directory, part_name: place.part_name.clone() });
        Some(Self(number))
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        all().1.retain(|entry| entry.number != self.0);
    }
}

/// Removes them all. Not for recordings, which can be recovered.
pub fn remove_unfinished() {
    for entry in all().1.drain(..) {
        // A file that is already gone is fine.
        let _ = unlinkat(&entry.directory, entry.part_name.as_os_str(), UnlinkatFlags::NoRemoveDir);
    }
}
