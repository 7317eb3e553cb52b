//! Waits that are still going on: which threads have been waiting since when, and the parts that user space reports itself.

use super::super::error::KernelError;
use super::super::native::shared;
use super::super::object::Kernel;
use super::super::pod::Pod;
use super::super::shared::SharedArray;
use super::WaitMaps;
use crate::types::KtimeNs;
use aya::Ebpf;
use aya_obj::generated::{bpf_attr, bpf_cmd};
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsRawFd as _, RawFd};
use std::time::Duration;
use tachyon_common::limits::TOLD_WAITS;
use tachyon_common::wait::{SeenThread, TOLD_AT, told, told_slot};

/// Longest time between a returning thread's reading about its wait and its writing: some instructions.
const WRITTEN: Duration = Duration::from_millis(1);

/// What user space has reported about waits that are still going on.
pub(super) struct Told {
    words: SharedArray<u64>,
    /// Slot -> thread that it is used for.
    used: HashMap<u32, u32>,
}

impl Told {
    pub(super) fn of(ebpf: &mut Ebpf) -> Result<Self, KernelError> {
        Ok(Self { words: shared(ebpf, "WAITS_TOLD", TOLD_WAITS)?, used: HashMap::new() })
    }

    /// False if the slot belongs to another thread whose wait is still going on, too.
    fn write(&mut self, seed: u64, tid: u32, until: KtimeNs) -> bool {
        let slot = told_slot(tid);
        let is_ours = *self.used.entry(slot).or_insert(tid) == tid;
        is_ours && self.words.write(slot, &[told(seed, tid, until.0)])
    }
}

impl Kernel {
    /// Live threads that have been switched since the start, by their ids.
    #[must_use]
    pub fn seen_threads(&self) -> BTreeMap<u32, SeenThread> {
        self.waits.as_ref().map_or_else(BTreeMap::new, all)
    }

    /// Leaves the parts of waits up to a moment to the caller, if the threads still wait: the kernel side counts those waits only
    /// from that moment on. Returns the threads for which it does.
    pub fn leave_waits(
        &mut self,
        tids: impl Iterator<Item = u32>,
        before: &BTreeMap<u32, SeenThread>,
        until: KtimeNs,
    ) -> Vec<u32> {
        let seed = self.seed();
        let Some(waits) = &mut self.waits else { return Vec::new() };
        // This comes first: from then on, returning threads look for what has been reported.
        if self.verdicts.set(TOLD_AT, until.0, 0).is_err() {
            return Vec::new();
        }
        // If there is no room for a thread, its whole wait is counted when it ends.
        let tids: Vec<u32> = tids.filter(|&tid| waits.told.write(seed, tid, until)).collect();
        // A thread that comes back just now may not have written down yet what it found.
        std::thread::sleep(WRITTEN);
        let now = self.seen_threads();
        let of = |threads: &BTreeMap<u32, SeenThread>, tid| threads.get(&tid).copied();
        let is_left = |tid: &u32| SeenThread::is_left_to_user_space(of(before, *tid), of(&now, *tid), until.0);
        tids.into_iter().filter(is_left).collect()
    }

    /// A thread's wait that was left to user space is over, or was not left to it.
    pub fn forget_wait(&mut self, tid: u32) {
        let Some(WaitMaps { told, .. }) = &mut self.waits else { return };
        if told.used.get(&told_slot(tid)) == Some(&tid) {
            told.used.remove(&told_slot(tid));
        }
    }
}

/// All threads: those with a slot, and those in the map, of which one system call returns some hundreds if the kernel supports it
/// (5.6).
fn all(waits: &WaitMaps) -> BTreeMap<u32, SeenThread> {
    let one_by_one = || waits.threads.iter().filter_map(Result::ok).map(|(_, Pod(seen))| seen).collect();
    let seen: Vec<SeenThread> = in_batches(waits.threads_fd.as_raw_fd()).unwrap_or_else(one_by_one);
    let slots = waits.slots.read_all().filter(|slot| slot.task != 0).map(|slot| slot.thread);
    slots.chain(seen).map(|seen| (seen.tid, seen)).collect()
}

/// `BPF_MAP_LOOKUP_BATCH`, which the library does not support; `None` if the kernel refuses.
fn in_batches(map: RawFd) -> Option<Vec<SeenThread>> {
    const BATCH: usize = 512;
    let (mut keys, mut values) = (vec![0_u64; BATCH], vec![SeenThread::default(); BATCH]);
    let mut found = Vec::new();
    // Where the next batch begins: a bucket's number.
    let (mut begin, mut first) = (0_u32, true);
    loop {
        // SAFETY: all zeros are a valid `bpf_attr`.
        let mut attr: bpf_attr = unsafe { std::mem::zeroed() };
        let mut next = 0_u32;
        // SAFETY: the member of the union that the command reads and writes; its fields are plain numbers.
        let batch = unsafe { &mut attr.batch };
        batch.map_fd = map.cast_unsigned();
        batch.in_batch = if first { 0 } else { (&raw const begin) as u64 };
        batch.out_batch = (&raw mut next) as u64;
        batch.keys = keys.as_mut_ptr() as u64;
        batch.values = values.as_mut_ptr() as u64;
        batch.count = BATCH as u32;
        // SAFETY: the arrays have room for as many keys and values as `count` says, and `next` for a bucket's number.
        let result = unsafe {
            let command = bpf_cmd::BPF_MAP_LOOKUP_BATCH as libc::c_long;
            libc::syscall(libc::SYS_bpf, command, &raw mut attr, size_of::<bpf_attr>())
        };
        let error = std::io::Error::last_os_error().raw_os_error();
        // SAFETY: as above.
        let count = unsafe { attr.batch.count } as usize;
        match (result, error) {
            (0, _) => found.extend_from_slice(values.get(..count)?),
            // The last ones.
            (_, Some(libc::ENOENT)) => {
                found.extend_from_slice(values.get(..count)?);
                return Some(found);
            }
            // A bucket with more threads than a batch, or a kernel that has no such command.
            _ => return None,
        }
        (begin, first) = (next, false);
    }
}
