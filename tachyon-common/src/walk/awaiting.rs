//! Who awaits the running task, and where: task by task, coroutine by coroutine.
//!
//! In steps, each of which reads a little and leaves what it has found in [`Awaiting`]: a BPF program verifies each of them once.

use super::memory::{Unreadable, UserMemory, read_u64, read_words};
use super::task::TaskReader;
use crate::layout::Layout;
use crate::whose::{Asyncio, MAX_AWAITING, MAX_AWAITING_SET, MAX_COROUTINES, Task, flags};

/// Where the search stands.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Awaiting {
    /// Those that have been found, each of which awaits the one before.
    pub tasks: [Task; MAX_AWAITING],
    /// How many there are.
    pub found: u32,
    /// 1: there may be more.
    pub more: u32,
    /// The task or future whose waiters are looked for next; 0: none.
    next: u64,
    /// The set of those: the pair to look at next, and how many are left.
    entry: u64,
    left: u32,
    /// How many were found, and the first of them by address.
    waiters: u32,
    least: u64,
    /// Frames of the coroutines of the task that was found last, outermost first, and how many.
    coroutines: [u64; MAX_COROUTINES],
    coroutines_found: u32,
    /// Frames stored before the present task's.
    before: u32,
    /// The coroutine to look at next; 0: none.
    coroutine: u64,
}

impl Awaiting {
    /// Nothing yet.
    pub const NONE: Self = Self {
        tasks: [Task::NONE; MAX_AWAITING],
        found: 0,
        more: 0,
        next: 0,
        entry: 0,
        left: 0,
        waiters: 0,
        least: 0,
        coroutines: [0; MAX_COROUTINES],
        coroutines_found: 0,
        before: 0,
        coroutine: 0,
    };

    /// Begins with the running task.
    #[inline(always)]
    pub fn begin(&mut self, task: u64) {
        (self.found, self.more, self.next) = (0, 0, task);
    }

    /// Looks for those that await the present task or future: how many there may be to [look at](Self::look), for one is known at once.
    /// `None`: nobody does, or that could not be read.
    #[inline(always)]
    pub fn find<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        asyncio: &Asyncio,
        reader: &mut TaskReader,
    ) -> Option<u32> {
        let of = core::mem::take(&mut self.next);
        (self.entry, self.left, self.waiters, self.least) = (0, 0, 0, 0);
        if of == 0 {
            return None;
        }
        // Until it is known that nobody does.
        self.more = 1;
        reader.read(memory, asyncio, of).ok()?;
        let awaited_by = reader.word(asyncio.task_awaited_by);
        if awaited_by != 0 && reader.byte(asyncio.task_awaited_by_is_set) != 0 {
            let mask = read_u64(memory, awaited_by, asyncio.set_mask).ok()?;
            let table = read_u64(memory, awaited_by, asyncio.set_table).ok()?;
            self.left = mask.min(u64::from(MAX_AWAITING_SET) - 1) as u32 + 1;
            self.entry = table;
        } else if awaited_by != 0 {
            (self.waiters, self.least) = (1, awaited_by);
        }
        self.more = 0;
        if awaited_by == 0 { None } else { Some(self.left) }
    }

    /// Looks at one entry of the set of those. False: there are no more.
    #[inline(always)]
    pub fn look<M: UserMemory + ?Sized>(&mut self, memory: &M) -> bool {
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        let entry = self.entry;
        self.entry = entry.wrapping_add(16);
        let mut words = [0; 2];
        if !read_words(memory, entry, &mut words) {
            self.more = 1;
            return true;
        }
        let [key, hash] = words;
        // A key that was taken out leaves one with the hash -1 (`set_discard_entry`).
        if key != 0 && hash != u64::MAX {
            self.waiters += 1;
            if self.least == 0 || key < self.least {
                self.least = key;
            }
        }
        true
    }

    /// Takes down the one of them that the chain goes on with: that with the least address, so that it is the same one each time.
    /// `stored`: frames that the record has. False: there is none, or no room.
    #[inline(always)]
    pub fn take<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        asyncio: &Asyncio,
        reader: &mut TaskReader,
        running: &mut Task,
        stored: u32,
    ) -> bool {
        (self.coroutine, self.coroutines_found, self.before) = (0, 0, stored);
        let least = self.least;
        if least == 0 {
            return false;
        }
        let count = self.waiters.min(u32::from(u16::MAX)) as u16;
        // The one that is awaited: the last that was found, or the running one. (A future between two tasks has no place of its own.)
        let last = (self.found as usize).wrapping_sub(1);
        if last < MAX_AWAITING {
            self.tasks[last & (MAX_AWAITING - 1)].awaited_by = count;
        } else {
            running.awaited_by = count;
        }
        if self.found as usize >= MAX_AWAITING {
            self.more = 1;
            return false;
        }
        let is_task = match reader.read(memory, asyncio, least) {
            Ok(()) => reader.is_task(memory, layout, asyncio, true),
            Err(Unreadable) => Err(Unreadable),
        };
        let Ok(is_task) = is_task else {
            self.more = 1;
            return false;
        };
        self.next = least;
        if !is_task {
            return true;
        }
        let at = self.found as usize & (MAX_AWAITING - 1);
        self.tasks[at] = Task::NONE;
        self.coroutine = reader.take_down(memory, layout, asyncio, &mut self.tasks[at]);
        self.found += 1;
        if self.coroutine == 0 {
            self.cut(flags::OUTER_CUT);
        }
        true
    }

    /// Looks at one coroutine of the task. False: there is no other that is to be looked at.
    #[inline(always)]
    pub fn coroutine<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        asyncio: &Asyncio,
        reader: &mut TaskReader,
    ) -> bool {
        let coroutine = core::mem::take(&mut self.coroutine);
        let at = self.coroutines_found as usize;
        if coroutine == 0 || at >= MAX_COROUTINES {
            return false;
        }
        // To the stack pointer of its frame, which lies in it.
        let top = asyncio.coro_frame.wrapping_add(asyncio.frame_stackpointer);
        let read = reader.head.fill(memory, coroutine, top.wrapping_add(8));
        let state = reader.head.u8(asyncio.coro_state).cast_signed();
        // One that runs in another thread by now is called by others than those that await it, and one that has ended has no frame.
        if read.is_err() || state >= asyncio.coro_executing {
            self.cut(flags::INNER_CUT);
            return false;
        }
        let frame = coroutine.wrapping_add(u64::from(asyncio.coro_frame));
        self.coroutines[at & (MAX_COROUTINES - 1)] = frame;
        self.coroutines_found += 1;
        if state != asyncio.coro_awaits[0] && state != asyncio.coro_awaits[1] {
            return false;
        }
        let (top, type_) = (reader.head.u64(top), reader.head.u64(layout.ob_type));
        let awaited = awaited(memory, layout, asyncio, top, type_);
        self.coroutine = awaited.unwrap_or(0);
        if awaited.is_err() || self.coroutine != 0 && at + 1 == MAX_COROUTINES {
            self.cut(flags::INNER_CUT);
            return false;
        }
        self.coroutine != 0
    }

    /// The frame of the innermost coroutine that is not walked yet; 0: there are no more.
    #[inline(always)]
    pub fn frame(&mut self) -> u64 {
        if self.coroutines_found == 0 {
            return 0;
        }
        self.coroutines_found -= 1;
        self.coroutines[self.coroutines_found as usize & (MAX_COROUTINES - 1)]
    }

    /// Notes how many frames of it there are, now that the record has so many, and whether the last one is among them. False: there are
    /// no more to be walked.
    #[inline(always)]
    pub fn walked(&mut self, stored: u32, whole: bool) -> bool {
        let last = (self.found as usize).wrapping_sub(1);
        if last < MAX_AWAITING {
            self.tasks[last & (MAX_AWAITING - 1)].frames = stored.wrapping_sub(self.before) as u16;
        }
        if !whole {
            self.coroutines_found = 0;
            self.cut(flags::OUTER_CUT);
        }
        self.coroutines_found > 0
    }

    #[inline(always)]
    fn cut(&mut self, what: u16) {
        let last = (self.found as usize).wrapping_sub(1);
        if last < MAX_AWAITING {
            self.tasks[last & (MAX_AWAITING - 1)].flags |= what;
        }
    }
}

/// The coroutine that a suspended one of a type awaits, whose frame's stack ends at `top`; 0: what it awaits is none of the same type
/// (`_PyGen_yf`).
#[inline(always)]
fn awaited<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    asyncio: &Asyncio,
    top: u64,
    type_: u64,
) -> Result<u64, Unreadable> {
    let awaited = read_u64(memory, top.wrapping_sub(u64::from(asyncio.awaited_below)), 0)?;
    let awaited = awaited & !u64::from(layout.stackref_tag_mask);
    if awaited == 0 || read_u64(memory, awaited, layout.ob_type)? != type_ {
        return Ok(0);
    }
    Ok(awaited)
}

const _: () = assert!(core::mem::size_of::<Awaiting>() == 8 * 88 + 8 + 8 + 8 + 8 + 8 + 16 * 8 + 8 + 8);
