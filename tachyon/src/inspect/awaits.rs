//! Where an interpreter keeps what leads from one task to the next: sets, coroutines, and lists.
//!
//! From 3.14 on all of it is published, in the same table as the walk's layout; before that it is in headers. Only user space reads
//! it, so it is not part of the walk's layout. The numbers of a coroutine's states and the place of what it awaits are not published:
//! they depend on the version. A test compares the rows with the headers at hand.

use super::debug_offsets::DebugOffsets;
use super::layout::LayoutError;
use super::objects::ObjectLayout;
use super::validate::group;
use tachyon_common::layout::{Layout, flags};

/// Where fields are, in bytes from the start of the structure named; names are CPython's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AwaitLayout {
    /// How a coroutine leads to its frame, and the frame to what it awaits.
    pub coroutine: CoroutineLayout,
    /// `PySetObject.mask`: one less than the entries of the table.
    pub set_mask: u64,
    /// `PySetObject.table`: pairs of key and hash.
    pub set_table: u64,
    /// `PyTypeObject.tp_name`: a C string.
    pub type_name: u64,
    /// `PyTypeObject.tp_flags`.
    pub type_flags: u64,
    /// `PyLongObject.long_value.lv_tag` (3.12+).
    pub long_tag: u64,
    /// `PyLongObject.ob_digit`.
    pub long_digit: u64,
    /// `struct llist_node.next` (3.14+).
    pub node_next: u64,
    /// `struct llist_node.prev` (3.14+).
    pub node_prev: u64,
}

/// How a coroutine leads to its frame; generators and asynchronous generators share its fields (`_PyGenObject_HEAD`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CoroutineLayout {
    /// The frame is in it (3.11+).
    Embedded {
        /// `PyGenObject.gi_iframe`.
        frame: u64,
        /// `PyGenObject.gi_frame_state`, a signed byte.
        state: u64,
        /// Its values.
        states: FrameStates,
        /// Where in the frame the awaited object is.
        top: StackTop,
    },
    /// It points to a frame object, or to none when it has ended (3.8 to 3.10). The next instruction shows whether it awaits.
    Object {
        /// `PyGenObject.gi_frame`.
        frame: u64,
        /// `PyFrameObject.f_executing`, a byte that is not 0 (3.8, 3.9), or `.f_state`, a byte that is `FRAME_EXECUTING`.
        executing: u64,
        /// The value of that byte while the frame runs.
        runs: u8,
        /// `PyCodeObject.co_code`: the instructions, a bytes object.
        code: u64,
        /// Where in the frame the awaited object is.
        top: StackTop,
    },
}

/// Where in a frame that does not run the most recently pushed value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StackTop {
    /// A number of words below where a pointer in the frame leads (3.8, 3.9, 3.14+).
    Pointer {
        /// `f_stacktop` or `stackpointer`.
        at: u64,
        /// 1; in 3.15 2, where an index is above what is awaited (`_PyGen_yf`).
        below: u64,
    },
    /// The last of a number of values that a pointer in the frame leads to (3.10).
    Depth {
        /// `f_stackdepth`, a signed 32-bit word.
        depth: u64,
        /// `f_valuestack`.
        values: u64,
    },
    /// The last of a number of values in the frame (3.11 to 3.13).
    Count {
        /// `stacktop`, a signed 32-bit word.
        count: u64,
        /// `localsplus`.
        values: u64,
    },
}

/// Values of `gi_frame_state` (`enum _framestate` of `pycore_frame.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameStates {
    /// `FRAME_SUSPENDED_YIELD_FROM`: it awaits another object; `FRAME_SUSPENDED` where the two are one state.
    pub awaits: i8,
    /// Whether it awaits shows in the `RESUME` that comes next (3.11, 3.12).
    pub by_resume: bool,
    /// `FRAME_SUSPENDED_YIELD_FROM_LOCKED` (3.15): it awaits, and a thread is looking at what it awaits.
    pub awaits_locked: Option<i8>,
    /// `FRAME_EXECUTING`.
    pub executing: i8,
    /// From here on the frame is no longer a frame: `FRAME_COMPLETED`, or `FRAME_CLEARED` where there is no such state.
    pub ended: i8,
}

/// v3.11.0, v3.12.0.
const STATES_3_11: FrameStates =
    FrameStates { awaits: -1, by_resume: true, awaits_locked: None, executing: 0, ended: 1 };
/// v3.13.0, v3.14.0.
const STATES_3_13: FrameStates = FrameStates { by_resume: false, ..STATES_3_11 };
/// v3.15.0 renumbers them.
const STATES_3_15: FrameStates =
    FrameStates { awaits: 2, by_resume: false, awaits_locked: Some(3), executing: 4, ended: 5 };

/// Most bytes of an object that are believed to come before one of these fields.
const MAX_OBJECT: u64 = 4096;

impl AwaitLayout {
    /// What an interpreter publishes; `None` before 3.14.
    ///
    /// # Errors
    /// When its numbers make no sense.
    pub(super) fn published(published: &DebugOffsets) -> Result<Option<Self>, LayoutError> {
        let (states, awaited_below) = match published.version_hex >> 16 & 0xff {
            14 => (STATES_3_13, 1),
            15 => (STATES_3_15, 2),
            _ => return Ok(None),
        };
        // A generator's frame is the last thing in it, as large as its function needs.
        let [gen_iframe, gen_frame_state] =
            fields(published, "gen_object.size", [("gen_object.gi_iframe", 8), ("gen_object.gi_frame_state", 1)])?;
        let [frame_stackpointer] =
            fields(published, "interpreter_frame.size", [("interpreter_frame.stackpointer", 8)])?;
        let [set_mask, set_table] =
            fields(published, "set_object.size", [("set_object.mask", 8), ("set_object.table", 8)])?;
        let [type_name, type_flags] =
            fields(published, "type_object.size", [("type_object.tp_name", 8), ("type_object.tp_flags", 8)])?;
        let [long_tag, long_digit] =
            fields(published, "long_object.size", [("long_object.lv_tag", 8), ("long_object.ob_digit", 4)])?;
        let [node_next, node_prev] = [word(published, "llist_node.next")?, word(published, "llist_node.prev")?];
        if !matches!((node_next, node_prev), (0, 8) | (8, 0)) {
            return Err(LayoutError::Range { field: "llist_node.next", value: node_next });
        }
        let top = StackTop::Pointer { at: frame_stackpointer, below: awaited_below };
        Ok(Some(Self {
            coroutine: CoroutineLayout::Embedded { frame: gen_iframe, state: gen_frame_state, states, top },
            set_mask,
            set_table,
            type_name,
            type_flags,
            long_tag,
            long_digit,
            node_next,
            node_prev,
        }))
    }

    /// The row for a version that does not publish it: 3.8 to 3.13.
    pub(super) fn of_headers(layout: &Layout) -> Option<Self> {
        Self::row(layout.minor_version(), layout.has(flags::FREE_THREADED))
    }

    fn row(version: (u8, u8), free_threaded: bool) -> Option<Self> {
        let objects = ObjectLayout::row(version, free_threaded)?;
        // A free-threaded build's objects have a larger header; its frames have none.
        let wider = if free_threaded { 16 } else { 0 };
        let object = |executing, runs, top| CoroutineLayout::Object { frame: 16, executing, runs, code: 48, top };
        let embedded = |frame, states| CoroutineLayout::Embedded {
            frame: frame + wider,
            state: frame - 5 + wider,
            states,
            top: StackTop::Count { count: 64, values: 72 },
        };
        let coroutine = match version {
            (3, 8 | 9) => object(116, 1, StackTop::Pointer { at: 72, below: 1 }),
            (3, 10) => object(108, 0, StackTop::Depth { depth: 80, values: 64 }),
            (3, 11) => embedded(80, STATES_3_11),
            (3, 12) => embedded(72, STATES_3_11),
            (3, 13) => embedded(72, STATES_3_13),
            _ => return None,
        };
        Some(Self {
            coroutine,
            set_mask: 32 + wider,
            set_table: 40 + wider,
            type_name: 24 + wider,
            type_flags: objects.type_flags,
            long_tag: objects.long_tag,
            long_digit: objects.long_digit,
            node_next: 0,
            node_prev: 8,
        })
    }
}

/// A published word.
fn word(published: &DebugOffsets, name: &'static str) -> Result<u64, LayoutError> {
    published.get(name).ok_or(LayoutError::Missing(name))
}

/// Offsets of fields (name and width) that are in one structure, checked.
fn fields<const N: usize>(
    published: &DebugOffsets,
    structure: &'static str,
    names: [(&'static str, u64); N],
) -> Result<[u64; N], LayoutError> {
    let limit = word(published, structure)?.min(MAX_OBJECT);
    let mut fields = Vec::with_capacity(N);
    for (field, width) in names {
        let offset = word(published, field)?;
        let outside = LayoutError::Outside { field, offset, limit };
        fields.push((field, u32::try_from(offset).map_err(|_| outside)?, width, true));
    }
    group(&fields, limit)?;
    let mut offsets = [0; N];
    for (offset, field) in offsets.iter_mut().zip(fields) {
        *offset = u64::from(field.1);
    }
    Ok(offsets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::objects::tests::compare;

    #[test]
    fn rows_are_what_the_headers_say() {
        compare(AwaitLayout::row, |row| {
            let mut offsets =
                vec![("set_mask", row.set_mask), ("set_table", row.set_table), ("type_name", row.type_name)];
            let top = match row.coroutine {
                CoroutineLayout::Embedded { frame, state, top, .. } => {
                    offsets.extend([("gen_iframe", frame), ("gen_frame_state", state)]);
                    top
                }
                CoroutineLayout::Object { frame, executing, runs, code, top } => {
                    let name = if runs == 0 { "frame_state" } else { "frame_executing" };
                    offsets.extend([("gen_frame", frame), (name, executing), ("code_code", code)]);
                    top
                }
            };
            offsets.extend(match top {
                StackTop::Pointer { at, .. } => vec![("frame_stacktop", at)],
                StackTop::Depth { depth, values } => vec![("frame_stackdepth", depth), ("frame_valuestack", values)],
                StackTop::Count { count, values } => vec![("frame_stacktop", count), ("frame_localsplus", values)],
            });
            offsets.into_iter().map(|(name, offset)| (name, offset.to_string())).collect()
        });
    }
}
