//! Whose work a thread does at the moment: its asyncio task, its span.

use super::memory::{Unreadable, UserMemory, read_u32, read_u64};
use super::text::text;
use super::thread::ThreadPointer;
use crate::layout::Layout;
use crate::whose::{Asyncio, NAME_BYTES, Task, ThreadLocal, Whose, flags};

/// `Py_TPFLAGS_LONG_SUBCLASS`.
const IS_LONG: u64 = 1 << 24;
/// `Py_TPFLAGS_UNICODE_SUBCLASS`.
const IS_UNICODE: u64 = 1 << 28;

/// Takes down the task that a thread state runs, and gives the address of its coroutine's frame; 0: it runs none, or one of
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
    whose: &mut Whose,
) -> u64 {
    if asyncio.thread_running_task == 0 {
        return 0;
    }
    let task = read_u64(memory, tstate, asyncio.thread_running_task).unwrap_or(0);
    if task == 0 {
        return 0;
    }
    if !is_as_large(memory, layout, asyncio, task, asyncio.task_size) {
        return 0;
    }
    whose.flags |= flags::TASK;
    take_down(memory, layout, asyncio, task, &mut whose.task)
}

/// Whether an object has so many bytes at least, by its type: C's tasks and futures have, Python's own have not.
#[inline(always)]
pub(super) fn is_as_large<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    asyncio: &Asyncio,
    object: u64,
    size: u32,
) -> bool {
    let type_ = read_u64(memory, object, layout.ob_type).unwrap_or(0);
    read_u64(memory, type_, asyncio.type_basicsize).unwrap_or(0) >= u64::from(size)
}

/// Takes down a task, and gives the address of its coroutine's frame; 0: it has none.
#[inline(always)]
pub(super) fn take_down<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    asyncio: &Asyncio,
    address: u64,
    task: &mut Task,
) -> u64 {
    task.address = address;
    if take_name(memory, layout, asyncio, address, task).is_err() {
        task.flags |= flags::NAME_UNREADABLE;
    }
    match read_u64(memory, address, asyncio.task_coro) {
        Ok(coro) if coro != 0 => coro.wrapping_add(u64::from(asyncio.coro_frame)),
        _ => 0,
    }
}

/// A task's name is a string, or the number in `Task-N` until somebody asks for it (`_asyncio_Task_get_name_impl`).
#[inline(always)]
fn take_name<M: UserMemory + ?Sized>(
    memory: &M,
    layout: &Layout,
    asyncio: &Asyncio,
    address: u64,
    task: &mut Task,
) -> Result<(), Unreadable> {
    let name = read_u64(memory, address, asyncio.task_name)?;
    let type_ = read_u64(memory, name, layout.ob_type)?;
    let type_flags = read_u64(memory, type_, asyncio.type_flags)?;
    if type_flags & IS_LONG != 0 && asyncio.long_tag != 0 {
        task.number = number(memory, asyncio, name)?;
        task.flags |= flags::NUMBERED;
        return Ok(());
    }
    if type_flags & IS_UNICODE == 0 {
        return Err(Unreadable);
    }
    let found = text(memory, layout, name, NAME_BYTES as u32).ok_or(Unreadable)?;
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
fn number<M: UserMemory + ?Sized>(memory: &M, asyncio: &Asyncio, int: u64) -> Result<u64, Unreadable> {
    let tag = read_u64(memory, int, asyncio.long_tag)?;
    // `_PyLong_NON_SIZE_BITS` (`Include/internal/pycore_long.h`).
    let digits = tag >> 3;
    let low = u64::from(read_u32(memory, int, asyncio.long_digits)?);
    match digits {
        0 | 1 => Ok(low),
        2 => Ok(low | u64::from(read_u32(memory, int, asyncio.long_digits.wrapping_add(4))?) << 30),
        _ => Err(Unreadable),
    }
}

/// Address of a thread's own variable; 0: it has none yet, for it has never used it, or what leads there cannot be read.
#[inline(always)]
pub fn thread_variable<M: UserMemory + ?Sized>(memory: &M, at: &ThreadLocal, pointer: ThreadPointer) -> u64 {
    let mut base = pointer.address;
    if at.module != 0 {
        let vector = read_u64(memory, base.wrapping_add(at.vector_at.cast_unsigned()), 0).unwrap_or(0);
        // A vector is as long as the process had modules when the thread last needed one; what lies behind it is anything. glibc has
        // its length in the entry before the first, whose own word is a generation; musl has it in the first.
        let count = if at.entry_size == 16 { vector.wrapping_sub(16) } else { vector };
        if read_u64(memory, count, 0).unwrap_or(0) < u64::from(at.module) {
            return 0;
        }
        base = read_u64(memory, vector, at.module.wrapping_mul(at.entry_size)).unwrap_or(0);
        // What the thread has not touched yet is not there: all bits set (glibc), or nothing (musl).
        if base == 0 || base == u64::MAX {
            return 0;
        }
    }
    base.wrapping_add(at.offset.cast_unsigned())
}

/// Takes down the span that a thread is in, by its record in OpenTelemetry's thread context (OTEP 4947): trace id, span id, and
/// a byte that is 1 while both are valid.
#[inline(always)]
pub fn running_span<M: UserMemory + ?Sized>(memory: &M, at: &ThreadLocal, pointer: ThreadPointer, whose: &mut Whose) {
    if at.entry_size == 0 {
        return;
    }
    let record = read_u64(memory, thread_variable(memory, at, pointer), 0).unwrap_or(0);
    if record == 0 {
        return;
    }
    // A record's header: both ids, the byte, and what user space alone reads.
    let mut bytes = [0; 28];
    if memory.read(record, &mut bytes).is_err() || bytes[24] != 1 {
        return;
    }
    whose.trace_id.copy_from_slice(&bytes[..16]);
    whose.span_id.copy_from_slice(&bytes[16..24]);
    if whose.trace_id != [0; 16] {
        whose.flags |= flags::SPAN;
    }
}
