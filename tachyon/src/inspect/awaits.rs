//! Where an interpreter that publishes asyncio's tasks keeps what leads from one to the next: lists, sets, coroutines.
//!
//! All of it is published from 3.14 on, in the same table as the walk's layout; only user space reads it, so it is no part of
//! that. The numbers of a coroutine's states and the place of what it awaits are not published: they are the version's.

use super::debug_offsets::DebugOffsets;
use super::layout::LayoutError;
use super::validate::group;

/// Where fields are, in bytes from the start of the structure named; names are CPython's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AwaitLayout {
    /// `PyGenObject.gi_iframe`: the frame itself, embedded; the same in coroutines and asynchronous generators.
    pub gen_iframe: u64,
    /// `PyGenObject.gi_frame_state`, a signed byte.
    pub gen_frame_state: u64,
    /// Values of it.
    pub states: FrameStates,
    /// `_PyInterpreterFrame.stackpointer`, where the frame is not running.
    pub frame_stackpointer: u64,
    /// How many words below the stack pointer what a suspended frame awaits lies: 1, in 3.15 2 (`_PyGen_yf`).
    pub awaited_below: u64,
    /// `PySetObject.mask`: one less than the entries of the table.
    pub set_mask: u64,
    /// `PySetObject.table`: pairs of key and hash.
    pub set_table: u64,
    /// `struct llist_node.next`.
    pub node_next: u64,
    /// `struct llist_node.prev`.
    pub node_prev: u64,
    /// `PyTypeObject.tp_name`: a C string.
    pub type_name: u64,
    /// `PyTypeObject.tp_flags`.
    pub type_flags: u64,
    /// `PyLongObject.long_value.lv_tag`.
    pub long_tag: u64,
    /// `PyLongObject.long_value.ob_digit`.
    pub long_digit: u64,
}

/// Values of `gi_frame_state` (`enum _framestate` of `pycore_frame.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameStates {
    /// `FRAME_SUSPENDED_YIELD_FROM`: it awaits another object.
    pub awaits: i8,
    /// `FRAME_SUSPENDED_YIELD_FROM_LOCKED` (3.15): the same, while a thread looks at what.
    pub awaits_locked: Option<i8>,
    /// `FRAME_EXECUTING`.
    pub executing: i8,
    /// From here on the frame is no frame any more: `FRAME_COMPLETED`, or `FRAME_CLEARED` where there is no such state.
    pub ended: i8,
}

/// v3.14.0.
const STATES_3_14: FrameStates = FrameStates { awaits: -1, awaits_locked: None, executing: 0, ended: 1 };
/// v3.15.0 numbers them anew.
const STATES_3_15: FrameStates = FrameStates { awaits: 2, awaits_locked: Some(3), executing: 4, ended: 5 };

/// Most bytes of an object that are believed to come before one of these fields.
const MAX_OBJECT: u64 = 4096;

impl AwaitLayout {
    /// What an interpreter publishes; `None` before 3.14.
    ///
    /// # Errors
    /// When its numbers make no sense.
    pub(super) fn published(published: &DebugOffsets) -> Result<Option<Self>, LayoutError> {
        let (states, awaited_below) = match published.version_hex >> 16 & 0xff {
            14 => (STATES_3_14, 1),
            15 => (STATES_3_15, 2),
            _ => return Ok(None),
        };
        // A generator's frame is the last thing in it, and is as large as its function wants.
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
        Ok(Some(Self {
            gen_iframe,
            gen_frame_state,
            states,
            frame_stackpointer,
            awaited_below,
            set_mask,
            set_table,
            node_next,
            node_prev,
            type_name,
            type_flags,
            long_tag,
            long_digit,
        }))
    }
}

/// A published word.
fn word(published: &DebugOffsets, name: &'static str) -> Result<u64, LayoutError> {
    published.get(name).ok_or(LayoutError::Missing(name))
}

/// Offsets of fields (name and width) that lie in one structure, checked.
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
