//! The tasks that the event loops of a process run, before 3.14: whichever thread's they are.
//!
//! A thread does not say there which task it runs. `_asyncio` has a dictionary of the running tasks by their loops
//! (`_current_tasks`, `Modules/_asynciomodule.c`); of those, this thread runs the one whose coroutine's frame is among its own.
//! In steps, as [`super::Awaiting`] is.

use super::memory::{UserMemory, read_u64, read_words};
use super::task::TaskReader;
use crate::layout::Layout;
use crate::opaque;
use crate::whose::{Asyncio, MAX_LOOPS, Whose, flags};

/// Most entries of the dictionary that are looked at, newest first: a table that holds four has room for ten.
pub const MAX_CURRENT_LOOKS: u64 = 16;

/// Bytes of an entry: hash, key, value.
const ENTRY: u64 = 24;

/// Largest table that is looked at: one byte an index.
const MAX_INDEX_BYTES: u64 = 0xff;

/// Where the search stands.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CurrentTasks {
    /// Those that were found.
    tasks: [u64; MAX_LOOPS],
    /// How many there are.
    found: u32,
    /// How many the dictionary says that it holds and that were not met yet.
    unmet: u32,
    /// The entry to look at next, and how many are left.
    entry: u64,
    left: u64,
}

impl CurrentTasks {
    /// Nothing yet.
    pub const NONE: Self = Self { tasks: [0; MAX_LOOPS], found: 0, unmet: 0, entry: 0, left: 0 };

    /// Begins with the dictionary of a process.
    #[inline(always)]
    pub fn begin<M: UserMemory + ?Sized>(&mut self, memory: &M, asyncio: &Asyncio, dict: u64) {
        (self.found, self.left) = (0, 0);
        // `ma_used`, `ma_version_tag` and `ma_keys` follow the object's header.
        let mut words = [0_u64; 3];
        if !read_words(memory, dict.wrapping_add(u64::from(asyncio.dict_used)), &mut words) || words[0] == 0 {
            return;
        }
        self.unmet = words[0].min(MAX_LOOPS as u64) as u32;
        let keys = words[2];
        // From `dk_refcnt` to `dk_nentries`.
        let mut words = [0_u64; 5];
        if !read_words(memory, keys, &mut words) {
            return;
        }
        // `dk_size`, a word (up to 3.10; each index has a byte), or `dk_log2_index_bytes`, the second byte of it.
        let (index_bytes, entries) =
            if asyncio.keys_nentries == 32 { (words[1], words[4]) } else { (1 << ((words[1] >> 8) & 63), words[3]) };
        if index_bytes > MAX_INDEX_BYTES || entries == 0 || entries > MAX_INDEX_BYTES {
            return;
        }
        let start = keys.wrapping_add(u64::from(asyncio.keys_indices)).wrapping_add(index_bytes);
        self.entry = start.wrapping_add((entries - 1) * ENTRY);
        self.left = entries.min(MAX_CURRENT_LOOKS);
    }

    /// Looks at one entry; the frame of its task's coroutine goes into `frames`. False: there are no more.
    #[inline(always)]
    pub fn look<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        asyncio: &Asyncio,
        reader: &mut TaskReader,
        frames: &mut [u64; MAX_LOOPS],
    ) -> bool {
        if self.left == 0 || self.unmet == 0 || self.found as usize >= MAX_LOOPS {
            return false;
        }
        self.left -= 1;
        let entry = self.entry;
        self.entry = entry.wrapping_sub(ENTRY);
        // One that was taken out has no value.
        let task = read_u64(memory, entry, 16).unwrap_or(0);
        if task == 0 {
            return true;
        }
        self.unmet -= 1;
        // asyncio's Python version has its tasks in it, too.
        if reader.read(memory, asyncio, task).is_err() || reader.is_task(memory, layout, asyncio, false).is_err() {
            return true;
        }
        let coro = reader.word(asyncio.task_coro);
        if coro == 0 {
            return true;
        }
        // The frame lies in the coroutine (3.11+), or it points to it.
        let frame = coro.wrapping_add(u64::from(asyncio.coro_frame));
        let frame = if asyncio.coro_points == 0 { frame } else { read_u64(memory, frame, 0).unwrap_or(0) };
        // Read again: the verifier of 5.10 forgets what it knew of a number that was put aside.
        let at = opaque::word(u64::from(self.found)) as usize & (MAX_LOOPS - 1);
        self.tasks[at] = task;
        frames[at] = frame;
        self.found += 1;
        true
    }

    /// Takes down the one that the walk has met ([`super::FrameWalk::task_met`]); none where it has met none.
    #[inline(always)]
    pub fn take<M: UserMemory + ?Sized>(
        &self,
        memory: &M,
        layout: &Layout,
        asyncio: &Asyncio,
        met: u32,
        reader: &mut TaskReader,
        whose: &mut Whose,
    ) {
        let at = (met as usize).wrapping_sub(1);
        if at >= MAX_LOOPS || reader.read(memory, asyncio, self.tasks[at & (MAX_LOOPS - 1)]).is_err() {
            return;
        }
        whose.flags |= flags::TASK;
        reader.take_down(memory, layout, asyncio, &mut whose.task);
    }
}

const _: () = assert!(MAX_LOOPS.is_power_of_two());
const _: () = assert!(core::mem::size_of::<CurrentTasks>() == 8 * MAX_LOOPS + 24);
