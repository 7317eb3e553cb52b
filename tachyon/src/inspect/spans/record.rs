//! The span that a thread is in, read from outside: as the kernel side reads it, and for threads that no sample interrupts.
//!
//! A record belongs to its thread, which changes it as it likes: one that is read while the thread runs may be half of one span and
//! half of another. Read it of a thread that is known to sleep.

use tachyon_common::walk::{Unreadable, UserMemory};
use tachyon_common::whose::ThreadLocal;

/// A word of another process.
pub(super) fn word(memory: &impl UserMemory, at: u64) -> Result<u64, Unreadable> {
    let mut bytes = [0; 8];
    memory.read(at, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// The ids of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Trace id as OpenTelemetry writes it.
    pub trace_id: [u8; 16],
    /// Span id, likewise.
    pub span_id: [u8; 8],
}

/// Where a thread with this thread pointer has the variable; `None`: it has none yet, because it has never used it.
///
/// # Errors
/// When what leads there cannot be read.
pub fn variable(memory: &impl UserMemory, tp: u64, place: &ThreadLocal) -> Result<Option<u64>, Unreadable> {
    if place.module == 0 {
        return Ok(Some(tp.wrapping_add_signed(place.offset)));
    }
    let entry_size = u64::from(place.entry_size);
    let vector = word(memory, tp.wrapping_add_signed(place.vector_at))?;
    // A vector is as long as the process had modules when the thread last needed one; what lies behind it is anything. glibc has
    // its length in the entry before the first, whose own word is a generation; musl has it in the first.
    let length = word(memory, if entry_size == 16 { vector.wrapping_sub(16) } else { vector })?;
    if u64::from(place.module) > length {
        return Ok(None);
    }
    let block = word(memory, vector.wrapping_add(u64::from(place.module) * entry_size))?;
    // glibc makes a block at its first use: until then its entry is -1.
    Ok((block != 0 && block != u64::MAX).then(|| block.wrapping_add_signed(place.offset)))
}

/// The span that a thread is in; `None`: in none, or between two.
///
/// # Errors
/// When what leads to the record cannot be read.
pub fn span(memory: &impl UserMemory, tp: u64, place: &ThreadLocal) -> Result<Option<Span>, Unreadable> {
    let Some(variable) = variable(memory, tp, place)? else { return Ok(None) };
    let record = word(memory, variable)?;
    if record == 0 {
        return Ok(None);
    }
    let mut bytes = [0; 28];
    memory.read(record, &mut bytes)?;
    let (trace_id, span_id) = (bytes[..16].try_into(), bytes[16..24].try_into());
    let (Ok(trace_id), Ok(span_id)) = (trace_id, span_id) else { return Ok(None) };
    let span = Span { trace_id, span_id };
    Ok((bytes[24] == 1 && span.trace_id != [0; 16]).then_some(span))
}
