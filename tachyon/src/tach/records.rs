//! Records as bytes.

use super::varint::{put_u32, put_u64};
use super::{RecordCounts, Sample, encoding};

fn put_head(out: &mut Vec<u8>, thread_id: u64, interpreter_id: u32, encoding: u8) {
    out.extend(thread_id.to_le_bytes());
    out.extend(interpreter_id.to_le_bytes());
    out.push(encoding);
}

/// Writes the start of a REPEAT record; its samples follow.
pub(super) fn put_repeat_head(out: &mut Vec<u8>, thread_id: u64, interpreter_id: u32, samples: u32) {
    put_head(out, thread_id, interpreter_id, encoding::REPEAT);
    put_u32(out, samples);
}

/// Writes a stack that differs from its thread's last one, `old`. The encoding is chosen as in CPython
/// (`compare_stacks` in `binary_io_writer.c`).
pub(super) fn put_change(out: &mut Vec<u8>, records: &mut RecordCounts, old: &[u32], sample: &Sample<'_>, delta: u64) {
    let new = sample.frames;
    let shared = old.iter().rev().zip(new.iter().rev()).take_while(|(old, new)| old == new).count();
    let small = |count: usize| u32::try_from(count).expect("a stack has at most 256 frames");
    let (encoding, count, first) = if shared == 0 {
        (encoding::FULL, &mut records.full, None)
    } else if shared == old.len() {
        (encoding::SUFFIX, &mut records.suffix, Some(shared))
    } else if shared < new.len() / 2 {
        (encoding::FULL, &mut records.full, None)
    } else {
        (encoding::POP_PUSH, &mut records.pop_push, Some(old.len() - shared))
    };
    *count += 1;
    put_head(out, sample.thread_id, sample.interpreter_id, encoding);
    put_u64(out, delta);
    out.push(sample.status);
    let pushed = match first {
        None => new.len(),
        Some(first) => {
            put_u32(out, small(first));
            new.len() - shared
        }
    };
    put_u32(out, small(pushed));
    for &frame in &new[..pushed] {
        put_u32(out, frame);
    }
}
