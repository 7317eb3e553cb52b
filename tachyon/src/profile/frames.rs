//! Frames stored once.

use super::StrId;
use std::collections::HashMap;
use std::hash::{Hash, Hasher};

/// Index of a frame in a [`FrameTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrameId(pub u32);

impl Hash for FrameId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u32(self.0);
    }

    /// Whole stacks are hashed at every sample: hashing four frames at once takes a third of the time.
    fn hash_slice<H: Hasher>(stack: &[Self], state: &mut H) {
        let (fours, rest) = stack.as_chunks::<4>();
        for [a, b, c, d] in fours.iter().map(|four| four.map(|id| u128::from(id.0))) {
            state.write_u128(a | b << 32 | c << 64 | d << 96);
        }
        rest.iter().for_each(|id| id.hash(state));
    }
}

/// One place in a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// Source file.
    pub filename: StrId,
    /// Qualified name of the function.
    pub function: StrId,
    /// First line of the running instruction; -1: no location at all.
    pub lineno: i32,
    /// Last line; -1 when not known.
    pub end_lineno: i32,
    /// First column, in UTF-8 bytes from 0; -1 when not known.
    pub column: i32,
    /// Column past the end; -1 when not known.
    pub end_column: i32,
    /// CPython opcode; 255 when not recorded.
    pub opcode: u8,
}

impl Frame {
    /// [`Frame::opcode`] of a frame whose opcode was not recorded.
    pub const NO_OPCODE: u8 = 255;

    /// A frame that has names only.
    #[must_use]
    pub const fn without_location(filename: StrId, function: StrId) -> Self {
        Self { filename, function, lineno: -1, end_lineno: -1, column: -1, end_column: -1, opcode: Self::NO_OPCODE }
    }
}

/// Interned frames in order of first use.
#[derive(Clone, Debug, Default)]
pub struct FrameTable {
    frames: Vec<Frame>,
    ids: HashMap<Frame, FrameId>,
}

impl FrameTable {
    /// The handle of `frame`, which is stored if it is new.
    pub fn intern(&mut self, frame: Frame) -> FrameId {
        if let Some(&id) = self.ids.get(&frame) {
            return id;
        }
        let id = self.push(frame);
        self.ids.insert(frame, id);
        id
    }

    /// Stores a frame whose names are not known yet, under a handle of its own.
    pub fn push_pending(&mut self, placeholder: Frame) -> FrameId {
        self.push(placeholder)
    }

    /// Replaces a pending frame.
    ///
    /// # Panics
    /// When the handle is of another table.
    pub fn replace(&mut self, id: FrameId, frame: Frame) {
        self.frames[id.0 as usize] = frame;
    }

    fn push(&mut self, frame: Frame) -> FrameId {
        let id = FrameId(u32::try_from(self.frames.len()).expect("fewer than 2^32 frames fit in memory"));
        self.frames.push(frame);
        id
    }

    /// The frame behind a handle.
    ///
    /// # Panics
    /// When the handle is of another table.
    #[must_use]
    pub fn get(&self, id: FrameId) -> &Frame {
        &self.frames[id.0 as usize]
    }

    /// All frames, in order of their handles.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Frame> {
        self.frames.iter()
    }

    /// How many frames there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }
}
