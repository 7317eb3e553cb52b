//! Names of threads.
//!
//! From 3.14 on CPython tells the kernel the names of its threads (`_thread.set_name`); up to 3.13 only its module
//! `threading` knows them: `sys.modules['threading']._active` maps idents to `Thread` objects. If a program never
//! imported it, or did not start a thread with it, there is no name; nothing but the name is lost then.

use super::memory::Pages;
use super::objects::Objects;
use crate::inspect::ObjectLayout;
use crate::remote::{PAGE, RemoteProcess};
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tachyon_common::layout::Layout;
use tachyon_common::walk::{UserMemory, read_u64};

/// Bytes of all names of one process that are kept; beyond that, further threads keep the kernel's names.
const MAX_BYTES: usize = 1 << 20;

/// Most pages with names of modules that are read at once: 2 MiB.
const MAX_KEY_PAGES: usize = 512;

/// Longest name, in characters; a longer one is cut.
const MAX_CHARS: usize = 256;

/// Names by ident (`PyThreadState.thread_id`) of the threads that Python's `threading` knows in one interpreter.
/// `None` when they could not be read, or need not be (3.14+, where the kernel knows them). What is not read within
/// `limit` is left out.
#[must_use]
pub fn thread_names<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    interp: u64,
    limit: Duration,
) -> Option<HashMap<u64, String>> {
    names_in(&Pages::new(memory), layout, interp, limit)
}

/// The same for a process, from which all that a search needs is read at once.
#[must_use]
pub fn thread_names_of(
    process: &RemoteProcess,
    layout: &Layout,
    interp: u64,
    limit: Duration,
) -> Option<HashMap<u64, String>> {
    let objects = ObjectLayout::of(layout)?;
    let mut pages = Pages::new(process);
    let target = Objects { memory: &pages, layout, objects };
    let modules = target.entries(target.pointer(interp, objects.interp_modules)?)?;
    // Each key of `sys.modules` is a string of its own; together they are on some thirty pages.
    let mut keys: Vec<u64> = modules.iter().map(|(key, _)| key / PAGE as u64).filter(|&page| page != 0).collect();
    keys.sort_unstable();
    keys.dedup();
    keys.truncate(MAX_KEY_PAGES);
    pages.fill(keys.iter().copied().zip(process.read_pages(&keys)));
    names_in(&pages, layout, interp, limit)
}

fn names_in<M: UserMemory + ?Sized>(
    pages: &Pages<'_, M>,
    layout: &Layout,
    interp: u64,
    limit: Duration,
) -> Option<HashMap<u64, String>> {
    let start = Instant::now();
    let objects = ObjectLayout::of(layout)?;
    let target = Objects { memory: pages, layout, objects };
    let modules = target.pointer(interp, objects.interp_modules)?;
    let threading = target.find(modules, "threading")?;
    let active = target.find(target.pointer(threading, objects.module_dict)?, "_active")?;
    let mut names = HashMap::new();
    let mut bytes = 0;
    for (key, thread) in target.entries(active)? {
        if bytes > MAX_BYTES || start.elapsed() > limit {
            break;
        }
        // A deleted entry, or one that is not complete yet.
        if key == 0 || thread == 0 {
            continue;
        }
        let Some(ident) = target.integer(key) else { continue };
        let Some(name) = target.attribute(thread, "_name").and_then(|name| target.text(name)) else { continue };
        let name: String = name.chars().take(MAX_CHARS).collect();
        bytes += name.len();
        names.insert(ident, name);
    }
    Some(names)
}

/// What a sample knows of its thread, for [`identify`].
#[derive(Clone, Copy, Debug)]
pub struct SampledThread {
    /// Its `PyThreadState`.
    pub tstate: u64,
    /// Its tid in its own pid namespace.
    pub ns_tid: u32,
}

/// Interpreter and ident of a sampled thread, if its state still exists.
#[must_use]
pub fn identify<M: UserMemory + ?Sized>(memory: &M, layout: &Layout, thread: SampledThread) -> Option<(u64, u64)> {
    if Layout::present(layout.tstate_native_thread_id) {
        let tid = read_u64(memory, thread.tstate, layout.tstate_native_thread_id).ok()?;
        if tid != u64::from(thread.ns_tid) {
            return None;
        }
    }
    let interp = read_u64(memory, thread.tstate, layout.tstate_interp).ok().filter(|&interp| interp != 0)?;
    let ident = read_u64(memory, thread.tstate, layout.tstate_thread_id).ok().filter(|&ident| ident != 0)?;
    Some((interp, ident))
}
