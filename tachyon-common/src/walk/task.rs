//! The asyncio task that a thread runs, and what is read of any task.

use super::buffer::Buffer;
use super::memory::{Unreadable, UserMemory, read_u64};
use super::text::text_of;
use crate::layout::Layout;
use crate::whose::{Asyncio, NAME_BYTES, Task, Whose, flags};

/// `Py_TPFLAGS_LONG_SUBCLASS`.
const IS_LONG: u64 = 1 << 24;
/// `Py_TPFLAGS_UNICODE_SUBCLASS`.
const IS_UNICODE: u64 = 1 << 28;

/// Room for a task, a future, a string's head, a coroutine's.
pub(super) type ObjectBuffer = Buffer<256, 32>;

/// Reads tasks: each object in one read, and each type once.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct TaskReader {
    /// The task or future that was read last; 0: none.
    address: u64,
    /// 1: all of it that a task has.
    whole: u64,
    object: ObjectBuffer,
    /// The head of another object, for the moment.
    pub(super) head: ObjectBuffer,
    /// Types that were looked at: of tasks, of strings, of integers; 0: none so far.
    task_type: u64,
    text_type: u64,
    number_type: u64,
}

impl TaskReader {
    /// Begins with another process, or with another moment of the same.
    #[inline(always)]
    pub fn begin(&mut self) {
        (self.address, self.task_type, self.text_type, self.number_type) = (0, 0, 0, 0);
    }

    /// Reads a task or a future, unless it was read last.
    #[inline(always)]
    pub(super) fn read<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        asyncio: &Asyncio,
        address: u64,
    ) -> Result<(), Unreadable> {
        if self.address == address {
            return Ok(());
        }
        self.address = 0;
        self.whole = 1;
        if self.object.fill(memory, address, asyncio.task_size).is_err() {
            // A future is smaller, and nothing need lie behind it.
            self.whole = 0;
            self.object.fill(memory, address, asyncio.future_size)?;
        }
        self.address = address;
        Ok(())
    }

    /// Whether the object that was read last is a task of C's asyncio, or (`Ok(false)`) another future of it. Python's own are smaller.
    #[inline(always)]
    pub(super) fn is_task<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        asyncio: &Asyncio,
        may_be_a_future: bool,
    ) -> Result<bool, Unreadable> {
        let is_task = !may_be_a_future || self.object.u8(asyncio.task_is_task) != 0;
        let type_ = self.object.u64(layout.ob_type);
        if type_ != self.task_type || type_ == 0 {
            let size = if is_task { asyncio.task_size } else { asyncio.future_size };
            if read_u64(memory, type_, asyncio.type_basicsize)? < u64::from(size) {
                return Err(Unreadable);
            }
            if is_task {
                self.task_type = type_;
            }
        }
        if is_task && self.whole == 0 { Err(Unreadable) } else { Ok(is_task) }
    }

    /// A word of the object that was read last.
    #[inline(always)]
    pub(super) fn word(&self, offset: u32) -> u64 {
        self.object.u64(offset)
    }

    /// A byte of it.
    #[inline(always)]
    pub(super) fn byte(&self, offset: u32) -> u8 {
        self.object.u8(offset)
    }

    /// Takes down the task that was read last, and gives the address of its coroutine; 0: it has none.
    #[inline(always)]
    pub(super) fn take_down<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        asyncio: &Asyncio,
        task: &mut Task,
    ) -> u64 {
        task.address = self.address;
        if self.take_name(memory, layout, asyncio, task).is_err() {
            task.flags |= flags::NAME_UNREADABLE;
        }
        self.object.u64(asyncio.task_coro)
    }

    /// A task's name is a string, or the number in `Task-N` until somebody asks for it (`_asyncio_Task_get_name_impl`).
    #[inline(always)]
    fn take_name<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        asyncio: &Asyncio,
        task: &mut Task,
    ) -> Result<(), Unreadable> {
        let name = self.object.u64(asyncio.task_name);
        // An integer of two digits is smaller than a string's head, and nothing need lie behind it.
        let number_end = asyncio.long_digits.wrapping_add(8);
        let text_end = layout.unicode_state.wrapping_add(4).max(layout.unicode_length.wrapping_add(8)).max(number_end);
        let has_text = self.head.fill(memory, name, text_end).is_ok();
        if !has_text {
            self.head.fill(memory, name, number_end)?;
        }
        let type_ = self.head.u64(layout.ob_type);
        if type_ == 0 || type_ != self.text_type && type_ != self.number_type {
            let type_flags = read_u64(memory, type_, asyncio.type_flags)?;
            if type_flags & IS_LONG != 0 && asyncio.long_tag != 0 {
                self.number_type = type_;
            } else if type_flags & IS_UNICODE != 0 {
                self.text_type = type_;
            } else {
                return Err(Unreadable);
            }
        }
        if type_ == self.number_type {
            task.number = self.number(asyncio)?;
            task.flags |= flags::NUMBERED;
            return Ok(());
        }
        if has_text { self.take_head(memory, layout, name, task) } else { Err(Unreadable) }
    }

    /// Takes down a name that is a string: an object of this type.
    #[inline(always)]
    pub(super) fn take_text<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        text_type: u64,
        name: u64,
        task: &mut Task,
    ) -> Result<(), Unreadable> {
        self.head.fill(
            memory,
            name,
            layout.unicode_state.wrapping_add(4).max(layout.unicode_length.wrapping_add(8)),
        )?;
        if self.head.u64(layout.ob_type) != text_type {
            return Err(Unreadable);
        }
        self.take_head(memory, layout, name, task)
    }

    /// The text of a string whose head was read last.
    #[inline(always)]
    fn take_head<M: UserMemory + ?Sized>(
        &self,
        memory: &M,
        layout: &Layout,
        name: u64,
        task: &mut Task,
    ) -> Result<(), Unreadable> {
        let (state, length) = (self.head.u32(layout.unicode_state), self.head.u64(layout.unicode_length));
        let found = text_of(layout, name, state, length, NAME_BYTES as u32).ok_or(Unreadable)?;
        // At most `NAME_BYTES`; the mask is for the verifier.
        let bytes = found.bytes as usize & (2 * NAME_BYTES - 1);
        if bytes > NAME_BYTES {
            return Err(Unreadable);
        }
        let Some(into) = task.name.get_mut(..bytes) else { return Err(Unreadable) };
        memory.read(found.addr, into)?;
        task.name_bytes = bytes as u8;
        task.name_kind = found.kind;
        if found.cut {
            task.flags |= flags::NAME_CUT;
        }
        Ok(())
    }

    /// The value of an `int` of one or two digits, which have 30 bits each; none is negative.
    #[inline(always)]
    fn number(&self, asyncio: &Asyncio) -> Result<u64, Unreadable> {
        // `_PyLong_NON_SIZE_BITS` (`Include/internal/pycore_long.h`).
        let digits = self.head.u64(asyncio.long_tag) >> 3;
        let low = u64::from(self.head.u32(asyncio.long_digits));
        match digits {
            0 | 1 => Ok(low),
            2 => Ok(low | u64::from(self.head.u32(asyncio.long_digits.wrapping_add(4))) << 30),
            _ => Err(Unreadable),
        }
    }
}

/// Takes down the task that a thread state runs (3.14+), and gives the address of its coroutine's frame; 0: it runs none, or one of
/// which nothing is known.
///
/// asyncio's Python version (`asyncio.tasks._PyTask`) notes its tasks in the thread state as well, and they have none of these
/// fields: their type is smaller than C's.
#[inline(always)]
pub fn running_task<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    asyncio: &Asyncio,
    tstate: u64,
    reader: &mut TaskReader,
    whose: &mut Whose,
) -> u64 {
    reader.begin();
    if asyncio.thread_running_task == 0 {
        return 0;
    }
    let task = read_u64(memory, tstate, asyncio.thread_running_task).unwrap_or(0);
    if task == 0 || reader.read(memory, asyncio, task).is_err() {
        return 0;
    }
    if reader.is_task(memory, layout, asyncio, false).is_err() {
        return 0;
    }
    whose.flags |= flags::TASK;
    match reader.take_down(memory, layout, asyncio, &mut whose.task) {
        0 => 0,
        coro => coro.wrapping_add(u64::from(asyncio.coro_frame)),
    }
}

const _: () = assert!(core::mem::size_of::<TaskReader>() == 2 * 256 + 5 * 8);
