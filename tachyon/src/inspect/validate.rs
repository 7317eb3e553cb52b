//! Numbers read from a target are untrusted: all of them are checked here, once, so that the walk can stay simple.
//!
//! Both kinds of layout, published and built-in, pass through [`validate`].

use tachyon_common::layout::{Layout, flags};
use tachyon_common::limits::{CODE_READ, FRAME_READ, INTERP_READ, THREAD_READ};

use super::layout::{LayoutError, Sizes};

/// Largest size of a runtime or interpreter state that is believed (3.12's runtime has 460 kB).
const MAX_STATE: u64 = 16 << 20;

/// Largest size of a thread state that is believed (3.15's has 888 bytes, free-threaded more).
pub(super) const MAX_TSTATE: u64 = 64 << 10;

/// Largest size of an object or string header that is believed.
const MAX_HEADER: u64 = 128;

/// Largest size of `struct _gil_runtime_state` that is believed (two condition variables and two mutexes).
const MAX_GIL: u64 = 512;

/// One field: its name, offset and width, and whether the walk needs it.
pub(super) type Field = (&'static str, u32, u64, bool);

/// Checks a layout: every field that its version has is there, aligned, inside its structure and inside what is read
/// of that structure in one go, and does not overlap its neighbours.
///
/// # Errors
/// Names the first field that does not fit.
pub(super) fn validate(layout: &Layout, sizes: &Sizes) -> Result<(), LayoutError> {
    let [_, minor, ..] = layout.version_hex.to_be_bytes();
    let l = layout;
    for (field, size, limit) in [
        ("_PyRuntimeState size", sizes.runtime, MAX_STATE),
        ("PyInterpreterState size", sizes.interp, MAX_STATE),
        ("PyThreadState size", sizes.tstate, MAX_TSTATE),
    ] {
        if size == 0 || size > limit {
            return Err(LayoutError::Range { field, value: size });
        }
    }
    let runtime = [
        ("_PyRuntime.interpreters.head", l.runtime_interpreters_head, 8, true),
        ("_PyRuntime.interpreters.next_id", l.runtime_next_interp_id, 8, true),
        ("_PyRuntime.main_thread", l.runtime_main_thread, 8, minor < 15),
        ("_PyRuntime.gilstate.tstate_current", l.runtime_tstate_current, 8, minor <= 11),
    ];
    group(&runtime, sizes.runtime)?;
    group(&[("_PyRuntime.ceval.gil", l.runtime_gil, 8, minor <= 11)], sizes.runtime)?;
    group(&[("_PyRuntime.gc.collecting", l.runtime_gc_collecting, 4, minor == 8)], sizes.runtime)?;
    let interp = [
        ("interp.next", l.interp_next, 8, true),
        ("interp.threads.head", l.interp_threads_head, 8, true),
        ("interp.threads.main", l.interp_threads_main, 8, minor >= 13),
        ("interp.id", l.interp_id, 8, true),
        ("interp.ceval.gil", l.interp_ceval_gil, 8, minor >= 12),
        ("interp.gc.collecting", l.interp_gc_collecting, 4, minor >= 9),
        ("interp.gc.frame", l.interp_gc_frame, 8, minor >= 15),
        ("interp._code_object_generation", l.interp_code_generation, 8, minor >= 14),
    ];
    group(&interp, sizes.interp)?;
    let together = l.complete().interp_read;
    if usize::from(together) > INTERP_READ {
        return Err(LayoutError::Range { field: "distance of interp's fields", value: together.into() });
    }
    group(&[("gil.locked", l.gil_locked, 4, true), ("gil.last_holder", l.gil_last_holder, 8, true)], MAX_GIL)?;
    let tstate = [
        ("tstate.interp", l.tstate_interp, 8, true),
        ("tstate.thread_id", l.tstate_thread_id, 8, true),
        ("tstate's frame", l.tstate_frame, 8, true),
        ("tstate._status", l.tstate_status, 4, minor >= 12),
        ("tstate.holds_gil", l.tstate_holds_gil, 4, minor >= 14),
        ("tstate.gil_requested", l.tstate_gil_requested, 4, minor >= 15),
        ("tstate's current exception", l.tstate_current_exception, 8, true),
        ("tstate.exc_state", l.tstate_exc_state, 8, true),
        ("tstate.base_frame", l.tstate_base_frame, 8, minor >= 15),
        ("tstate.current_executor", l.tstate_current_executor, 8, minor >= 14),
    ];
    group(&[("tstate.cframe", l.tstate_cframe, 8, matches!(minor, 10..=12))], sizes.tstate.min(THREAD_READ as u64))?;
    // These are read in one go; the walk of the list reads the others one by one.
    group(&tstate, sizes.tstate.min(THREAD_READ as u64))?;
    let list = [
        ("tstate.next", l.tstate_next, 8, true),
        ("tstate.native_thread_id", l.tstate_native_thread_id, 8, minor >= 11),
    ];
    group(&list, sizes.tstate)?;
    group(&[("exc_state.exc_value", l.exc_value, 8, true)], MAX_HEADER)?;
    let handled = l.tstate_exc_state.saturating_add(l.exc_value);
    group(&[("tstate.exc_state.exc_value", handled, 8, true)], sizes.tstate.min(THREAD_READ as u64))?;
    group(&[("cframe.current_frame", l.cframe_current_frame, 8, l.has(flags::CFRAME))], MAX_HEADER)?;
    let lasti = if l.has(flags::LASTI_IS_OFFSET) { 4 } else { 8 };
    let frame = [
        ("frame.previous", l.frame_previous, 8, true),
        ("frame's code", l.frame_code, 8, true),
        ("frame's instruction", l.frame_instr, lasti, true),
        ("frame.owner", l.frame_owner, 1, minor >= 11),
        ("frame.is_entry", l.frame_is_entry, 1, minor == 11),
        ("frame.tlbc_index", l.frame_tlbc_index, 4, false),
        ("frame.stacktop", l.frame_stacktop, 4, matches!(minor, 11 | 12)),
        ("frame.return_offset", l.frame_return_offset, 2, minor == 12),
        ("frame.localsplus", l.frame_localsplus, 8, matches!(minor, 11 | 12)),
    ];
    group(&frame, sizes.frame.min(FRAME_READ as u64))?;
    let code = [
        ("ob_type", l.ob_type, 8, true),
        ("ob_size", l.ob_size, 8, true),
        ("co_filename", l.code_filename, 8, true),
        ("co_qualname", l.code_qualname, 8, true),
        ("co_linetable", l.code_linetable, 8, true),
        ("co_firstlineno", l.code_firstlineno, 4, true),
        ("co_version", l.code_version, 4, minor >= 12),
        ("co_code_adaptive", l.code_code_adaptive, 2, minor >= 11),
        ("co_tlbc", l.code_tlbc, 8, false),
        ("co_nlocalsplus", l.code_nlocalsplus, 4, matches!(minor, 11 | 12)),
        ("co_stacksize", l.code_stacksize, 4, matches!(minor, 11 | 12)),
    ];
    // In a code object up to 3.10 `ob_size` is another field: only bytes objects have it there.
    let code = if minor >= 11 { &code[..] } else { &code[2..] };
    group(code, sizes.code.min(CODE_READ as u64))?;
    let bytes =
        [("ob_type", l.ob_type, 8, true), ("ob_size", l.ob_size, 8, true), ("bytes.ob_sval", l.bytes_sval, 1, true)];
    group(&bytes, MAX_HEADER)?;
    let unicode = [
        ("ob_type", l.ob_type, 8, true),
        ("unicode.length", l.unicode_length, 8, true),
        ("unicode.state", l.unicode_state, 4, true),
    ];
    group(&unicode, u64::from(l.unicode_ascii_size).min(MAX_HEADER))?;
    numbers(layout, minor)
}

/// Checks the numbers that are not offsets.
fn numbers(l: &Layout, minor: u8) -> Result<(), LayoutError> {
    let within = |field, value: u32, good: bool| {
        if good { Ok(()) } else { Err(LayoutError::Range { field, value: u64::from(value) }) }
    };
    let bit = |field, value: u32, wanted: bool| within(field, value, value.count_ones() == u32::from(wanted));
    bit("bound_gilstate bit", l.status_bound_gilstate, minor >= 12)?;
    bit("active bit", l.status_active, minor >= 12)?;
    bit("holds_gil bit", l.status_holds_gil, minor == 13)?;
    bit("compact bit", l.unicode_compact_bit, true)?;
    bit("ascii bit", l.unicode_ascii_bit, true)?;
    within("kind shift", l.unicode_kind_shift, l.unicode_kind_shift <= 29)?;
    let compact = u64::from(l.unicode_compact_size);
    let good = l.unicode_compact_size > l.unicode_ascii_size && compact <= MAX_HEADER;
    within("size of PyCompactUnicodeObject", l.unicode_compact_size, good)?;
    within("owner of shim frames", l.owner_shim_min, l.owner_shim_min <= 255)?;
    within("owner of generator frames", l.owner_generator, l.owner_generator <= 255)?;
    within("tag mask", l.stackref_tag_mask, l.stackref_tag_mask < 8)?;
    let before = l.generator_state_before;
    let good = if matches!(minor, 11 | 12) { u64::from(before) <= MAX_HEADER } else { !Layout::present(before) };
    within("place of a generator's state", before, good)?;
    within("unit of lasti", l.instr_unit, matches!(l.instr_unit, 1 | 2))
}

/// Checks fields that are in one structure.
pub(super) fn group(fields: &[Field], limit: u64) -> Result<(), LayoutError> {
    for (index, &(field, offset, width, needed)) in fields.iter().enumerate() {
        if !Layout::present(offset) {
            if needed {
                return Err(LayoutError::Missing(field));
            }
            continue;
        }
        let offset = u64::from(offset);
        if offset % width != 0 {
            return Err(LayoutError::Unaligned { field, offset, width });
        }
        if offset + width > limit {
            return Err(LayoutError::Outside { field, offset, limit });
        }
        let others = fields.iter().take(index).filter(|(_, other, ..)| Layout::present(*other));
        for &(other, at, size, _) in others {
            let at = u64::from(at);
            if offset < at + size && at < offset + width {
                return Err(LayoutError::Overlap(other, field));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::builtin::BUILTIN;
    use crate::inspect::debug_offsets::DebugOffsets;
    use crate::inspect::layout::{ObjectSizes, build};

    fn good() -> (Layout, Sizes) {
        let built = build(0x030c_01f0, None, ObjectSizes::default()).expect("3.12 is in the table");
        let row = BUILTIN.iter().find(|row| row.minor_version == (3, 12)).expect("there");
        let headers = &row.headers[0];
        let sizes = Sizes {
            runtime: headers.runtime_size.into(),
            interp: headers.interp_size.into(),
            tstate: headers.tstate_size.into(),
            frame: row.frame_size.into(),
            code: row.code_size.into(),
        };
        (built.layout, sizes)
    }

    #[test]
    fn every_row_of_the_table_is_good() {
        for row in BUILTIN.iter().filter(|row| row.minor_version < (3, 13)) {
            for headers in row.headers {
                let objects = ObjectSizes { runtime: headers.runtime_size.into(), code_type: row.type_size.into() };
                let built = build(headers.version_hex, None, objects);
                assert!(built.as_ref().is_ok_and(|built| built.known_build), "{:?}: {built:?}", row.minor_version);
            }
        }
    }

    #[test]
    fn a_version_that_must_publish_and_does_not_is_refused() {
        assert_eq!(build(0x030d_00f0, None, ObjectSizes::default()), Err(LayoutError::NoDebugOffsets));
        assert_eq!(build(0x0310_00f0, None, ObjectSizes::default()), Err(LayoutError::NoTable));
        let other = ObjectSizes { runtime: 0, code_type: 432 };
        assert!(matches!(build(0x030c_01f0, None, other), Err(LayoutError::OtherSize { .. })));
        let head: Vec<u8> =
            [u64::from_le_bytes(*b"xdebugpy"), 0x030d_00f0, 0].into_iter().flat_map(u64::to_le_bytes).collect();
        let bytes: Vec<u8> = head.iter().copied().chain(std::iter::repeat_n(0xff, 1000)).collect();
        let published = DebugOffsets::decode(&bytes).expect("the head is good");
        let refused = build(0x030d_00f0, published.as_ref(), ObjectSizes::default()).expect_err("all ones");
        assert!(matches!(refused, LayoutError::TableDiffers { .. }), "{refused}");
    }

    #[test]
    fn each_kind_of_fault_is_named() {
        let (layout, sizes) = good();
        assert_eq!(validate(&layout, &sizes), Ok(()));
        let refused = |change: fn(&mut Layout)| {
            let mut layout = layout;
            change(&mut layout);
            validate(&layout, &sizes).expect_err("does not fit").to_string()
        };
        for (change, wanted) in [
            ((|l| l.tstate_next = Layout::ABSENT) as fn(&mut Layout), "its layout lacks tstate.next"),
            (|l| l.frame_previous = 9, "its frame.previous at 9 is not aligned to 8"),
            (|l| l.frame_instr = 4096, "its frame's instruction at 4096 ends past 80"),
            (|l| l.interp_id = u32::MAX - 7, "its interp.id at 4294967288 ends past"),
            (|l| l.interp_id = 16 << 10, "its distance of interp's fields is 0x3ed0"),
            (|l| l.frame_code = l.frame_previous, "its frame.previous and frame's code lie over each other"),
            (|l| l.unicode_kind_shift = 64, "its kind shift is 0x40"),
            (|l| l.status_bound_gilstate = 0, "its bound_gilstate bit is 0x0"),
            (|l| l.instr_unit = 0, "its unit of lasti is 0x0"),
        ] {
            let message = refused(change);
            assert!(message.starts_with(wanted), "{message}");
        }
        for runtime in [0, MAX_STATE + 1, u64::MAX] {
            assert!(validate(&layout, &Sizes { runtime, ..sizes }).is_err());
        }
    }
}
