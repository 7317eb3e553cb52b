//! Giving strings and frames their indices, and fitting deep stacks into the format.

use super::{Frame, Location, MAX_DEPTH};
use std::collections::HashMap;
use std::sync::Arc;

/// Frames that [`trim_stack`] keeps on the inner side; the marker and as many on the outer side make [`MAX_DEPTH`].
const KEPT_INNER: usize = MAX_DEPTH / 2 - 1;
const KEPT_OUTER: usize = MAX_DEPTH - 1 - KEPT_INNER;

/// How many frames a stack of `depth` loses in [`trim_stack`]; `None` when it fits as it is.
#[must_use]
pub fn omitted(depth: usize) -> Option<usize> {
    (depth > MAX_DEPTH).then(|| depth - KEPT_INNER - KEPT_OUTER)
}

/// Function name of the frame (file name `~`, no location) that stands for omitted ones.
#[must_use]
pub fn omitted_name(omitted: usize) -> String {
    format!("<{omitted} frames omitted>")
}

/// Shortens a stack that is deeper than the format allows: the innermost 127 frames, `marker`, the outermost 128.
/// (CPython's writer drops the outermost ones instead, and with them the roots of the profile.)
pub fn trim_stack(frames: &mut Vec<u32>, marker: u32) {
    let depth = frames.len();
    if depth > MAX_DEPTH {
        frames.splice(KEPT_INNER..depth - KEPT_OUTER, [marker]);
    }
}

/// Tables in order of first use, as CPython's writer makes them: a frame's file name, then its function, each string
/// and each frame once.
///
/// ```
/// use std::io::Cursor;
/// use tachyon::tach::{Interner, Options, Sample, Writer};
///
/// let mut tables = Interner::default();
/// let stack = [tables.frame("app.py", "work", None, None), tables.frame("app.py", "main", None, None)];
/// let mut writer = Writer::new(Cursor::new(Vec::new()), Options::default())?;
/// writer.write_sample(&Sample { thread_id: 1, interpreter_id: 0, timestamp_us: 5, status: 3, frames: &stack })?;
/// let (_file, summary) = writer.finish(tables.strings(), tables.frames(), None)?;
/// assert_eq!((summary.strings, summary.frames), (3, 2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct Interner {
    strings: Vec<Arc<str>>,
    string_ids: HashMap<Arc<str>, u32>,
    frames: Vec<Frame>,
    frame_ids: HashMap<Frame, u32>,
}

impl Interner {
    /// The index of a string.
    ///
    /// # Panics
    /// After 2^32 different strings.
    pub fn string(&mut self, text: &str) -> u32 {
        if let Some(&index) = self.string_ids.get(text) {
            return index;
        }
        let index = u32::try_from(self.strings.len()).expect("fewer than 2^32 strings fit in memory");
        let text: Arc<str> = Arc::from(text);
        self.strings.push(Arc::clone(&text));
        self.string_ids.insert(text, index);
        index
    }

    /// The index of a frame.
    ///
    /// # Panics
    /// After 2^32 different frames.
    pub fn frame(&mut self, filename: &str, function: &str, location: Option<Location>, opcode: Option<u8>) -> u32 {
        let filename = self.string(filename);
        let function = self.string(function);
        let mut frame = Frame::without_location(filename, function);
        if let Some(Location { lineno, end_lineno, column, end_column }) = location {
            frame = Frame { lineno, end_lineno, column, end_column, ..frame };
        }
        frame.opcode = opcode.unwrap_or(Frame::NO_OPCODE);
        if let Some(&index) = self.frame_ids.get(&frame) {
            return index;
        }
        let index = u32::try_from(self.frames.len()).expect("fewer than 2^32 frames fit in memory");
        self.frames.push(frame);
        self.frame_ids.insert(frame, index);
        index
    }

    /// The index of the frame that stands for `count` omitted ones.
    pub fn omitted_frame(&mut self, count: usize) -> u32 {
        self.frame("~", &omitted_name(count), None, None)
    }

    /// All strings, for [`super::Writer::finish`].
    pub fn strings(&self) -> impl ExactSizeIterator<Item = &str> {
        self.strings.iter().map(|text| &**text)
    }

    /// All frames, for [`super::Writer::finish`].
    pub fn frames(&self) -> impl ExactSizeIterator<Item = Frame> {
        self.frames.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deep_stacks_keep_both_ends() {
        for depth in [0, 1, 256] {
            let mut frames: Vec<u32> = (0..depth).collect();
            trim_stack(&mut frames, 9999);
            assert_eq!(frames.len(), depth as usize);
            assert_eq!(omitted(depth as usize), None);
            assert!(!frames.contains(&9999));
        }
        for depth in [257, 1000_u32] {
            let mut frames: Vec<u32> = (0..depth).collect();
            trim_stack(&mut frames, 9999);
            assert_eq!(frames.len(), MAX_DEPTH);
            assert_eq!(frames[..127], (0..127).collect::<Vec<u32>>());
            assert_eq!(frames[127], 9999);
            assert_eq!(frames[128..], (depth - 128..depth).collect::<Vec<u32>>());
            assert_eq!(omitted(depth as usize), Some(depth as usize - 255));
        }
    }

    #[test]
    fn order_is_first_use() {
        let mut tables = Interner::default();
        let location = Location { lineno: 1, end_lineno: 1, column: 0, end_column: 3 };
        assert_eq!(tables.frame("f", "g", Some(location), None), 0);
        assert_eq!(tables.frame("f", "f", Some(location), Some(3)), 1);
        assert_eq!(tables.frame("f", "g", Some(location), None), 0);
        assert_eq!(tables.omitted_frame(12), 2);
        assert_eq!(tables.strings().collect::<Vec<_>>(), ["f", "g", "~", "<12 frames omitted>"]);
        assert_eq!(tables.frames().nth(2), Some(Frame::without_location(2, 3)));
    }
}
