//! The span that a thread is in.

use super::memory::{UserMemory, read_u64};
use super::thread::ThreadPointer;
use crate::whose::{ThreadLocal, Whose, flags};

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
    if at.entry_size != 0 {
        span_at(memory, thread_variable(memory, at, pointer), whose);
    }
}

/// The same by the address of the thread's variable; 0: it has none.
#[inline(always)]
pub fn span_at<M: UserMemory + ?Sized>(memory: &M, variable: u64, whose: &mut Whose) {
    if variable == 0 {
        return;
    }
    let record = read_u64(memory, variable, 0).unwrap_or(0);
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
