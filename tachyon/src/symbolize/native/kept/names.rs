//! Answers by address: what is known of one file's functions, in tables that are searched as they are.
//!
//! A piece is a range of addresses of which all is the same: the function, and for lines the file, the line and the chain of
//! inlined functions. Chains share their outer parts, and all texts are there once.

use std::collections::HashMap;
use std::hash::Hash;
use std::ops::Range;

use crate::symbolize::native::dwarf::{MAX_INLINES, SourceFrame};
use crate::symbolize::native::{Detail, NativeName};

/// Most pieces for each of both details, functions, frames and texts of one file. `_PyEval_EvalFrameDefault` has some ten thousand
/// pieces for lines.
pub(super) const MAX_ENTRIES: usize = 1 << 17;

/// Most bytes of texts of one file.
pub(super) const MAX_TEXT: usize = 2 << 20;

/// What stands for nothing, where a number is otherwise one more than an index.
pub(super) const NONE: u32 = 0;

/// A function as a symbol table names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Function {
    /// Its name, and how an entry of the procedure linkage table is shown: numbers of texts.
    pub name: u32,
    pub plt: u32,
    pub vaddr: Option<u64>,
}

/// One frame of a chain, the innermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Frame {
    /// Numbers of texts.
    pub function: u32,
    pub file: u32,
    /// 0: there is none.
    pub line: u32,
    /// The number of the frame that it was inlined into.
    pub outer: u32,
}

/// Addresses with one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub begin: u64,
    pub len: u32,
    /// Index into the functions.
    pub function: u32,
    /// The number of the innermost frame.
    pub frame: u32,
}

impl Piece {
    pub(super) const fn end(&self) -> u64 {
        self.begin + self.len as u64
    }
}

/// Texts, one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::symbolize::native) struct Texts {
    pub(super) text: String,
    /// Where each of them ends.
    pub(super) ends: Vec<u32>,
}

impl Texts {
    pub(super) const fn len(&self) -> usize {
        self.ends.len()
    }

    /// The text with a number.
    fn get(&self, number: u32) -> Option<&str> {
        let index = usize::try_from(number.checked_sub(1)?).ok()?;
        let begin = match index.checked_sub(1) {
            Some(before) => *self.ends.get(before)?,
            None => 0,
        };
        self.text.get(begin as usize..*self.ends.get(index)? as usize)
    }

    fn iter(&self) -> impl Iterator<Item = &str> {
        (1..=self.len() as u32).filter_map(|number| self.get(number))
    }

    fn push(&mut self, text: &str) {
        self.text.push_str(text);
        self.ends.push(self.text.len() as u32);
    }

    /// Whether they are all of the text, and not too much.
    pub(super) fn is_sound(&self) -> bool {
        let ends_fit = self.ends.is_sorted() && self.ends.iter().all(|&end| self.text.is_char_boundary(end as usize));
        ends_fit && self.text.len() <= MAX_TEXT && self.text.len() == self.ends.last().map_or(0, |&end| end as usize)
    }
}

/// Everything that is kept for a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::symbolize::native) struct Names {
    pub(super) texts: Texts,
    pub(super) functions: Vec<Function>,
    /// An outer frame comes before the inner ones.
    pub(super) frames: Vec<Frame>,
    /// Pieces with the answers of [`Detail::Function`] and of [`Detail::Lines`], in order of address, none over another.
    pub(super) pieces: [Vec<Piece>; 2],
}

pub(super) const fn index_of(detail: Detail) -> usize {
    match detail {
        Detail::Function => 0,
        Detail::Lines => 1,
    }
}

impl Names {
    /// The answer for an address, without the name of the object. `None`: it is not known.
    pub(in crate::symbolize::native) fn find(&self, vaddr: u64, detail: Detail) -> Option<NativeName> {
        let pieces = &self.pieces[index_of(detail)];
        let piece = pieces.get(pieces.partition_point(|piece| piece.end() <= vaddr))?;
        if piece.begin > vaddr {
            return None;
        }
        let function = self.functions.get(piece.function as usize)?;
        let mut name = NativeName {
            vaddr,
            function: self.text(function.name),
            function_vaddr: function.vaddr,
            plt: self.text(function.plt),
            ..NativeName::default()
        };
        let mut next = piece.frame;
        while let Some(frame) = numbered(&self.frames, next).filter(|_| name.lines.len() < MAX_INLINES) {
            let line = (frame.line != 0).then_some(frame.line);
            name.lines.push(SourceFrame { function: self.text(frame.function), file: self.text(frame.file), line });
            next = frame.outer;
        }
        Some(name)
    }

    fn text(&self, number: u32) -> Option<String> {
        self.texts.get(number).map(str::to_owned)
    }

    /// The parts of a range that are not known.
    pub(super) fn gaps(&self, within: &Range<u64>, detail: Detail) -> Vec<Range<u64>> {
        let pieces = &self.pieces[index_of(detail)];
        let (mut gaps, mut at) = (Vec::new(), within.start);
        let first = pieces.partition_point(|piece| piece.end() <= within.start);
        for piece in pieces[first..].iter().take_while(|piece| piece.begin < within.end) {
            gaps.push(at..piece.begin);
            at = piece.end();
        }
        gaps.push(at..within.end);
        gaps.retain(|gap| gap.start < gap.end);
        gaps
    }

    pub(super) fn is_full(&self) -> bool {
        let longest =
            self.pieces.iter().map(Vec::len).chain([self.texts.len(), self.functions.len(), self.frames.len()]);
        longest.max() > Some(MAX_ENTRIES) || self.texts.text.len() > MAX_TEXT
    }

    /// Bytes that it takes, roughly.
    pub(in crate::symbolize::native) fn bytes(&self) -> usize {
        let texts = self.texts.text.len() + size_of_val(&*self.texts.ends);
        let pieces: usize = self.pieces.iter().map(|pieces| size_of_val(&**pieces)).sum();
        texts + size_of_val(&*self.functions) + size_of_val(&*self.frames) + pieces
    }
}

/// What has a number, which is one more than its index.
pub(super) fn numbered<T>(list: &[T], number: u32) -> Option<&T> {
    list.get(usize::try_from(number.checked_sub(1)?).ok()?)
}

/// Adds to [`Names`].
#[derive(Debug, Default)]
pub(super) struct Writer {
    pub names: Names,
    texts: HashMap<Box<str>, u32>,
    functions: HashMap<Function, u32>,
    frames: HashMap<Frame, u32>,
    /// Pieces that have been added, in no order.
    added: [Vec<Piece>; 2],
}

impl Writer {
    /// Goes on where others stopped.
    pub(super) fn new(names: Names) -> Self {
        fn numbers<T: Clone + Eq + Hash>(list: &[T], first: u32) -> HashMap<T, u32> {
            list.iter().cloned().zip(first..).collect()
        }
        let texts = names.texts.iter().map(Box::from).zip(1..).collect();
        let functions = numbers(&names.functions, 0);
        Self { texts, functions, frames: numbers(&names.frames, 1), added: Default::default(), names }
    }

    pub(super) fn text(&mut self, text: Option<&str>) -> u32 {
        let Some(text) = text else { return NONE };
        if let Some(&number) = self.texts.get(text) {
            return number;
        }
        self.names.texts.push(text);
        let number = self.names.texts.len() as u32;
        self.texts.insert(text.into(), number);
        number
    }

    pub(super) fn function(&mut self, name: &NativeName) -> u32 {
        let (text, plt) = (self.text(name.function.as_deref()), self.text(name.plt.as_deref()));
        let function = Function { name: text, plt, vaddr: name.function_vaddr };
        *self.functions.entry(function).or_insert_with(|| {
            self.names.functions.push(function);
            self.names.functions.len() as u32 - 1
        })
    }

    /// The number of a chain, by its frames from the innermost on; their `outer` is not looked at.
    pub(super) fn chain(&mut self, frames: impl DoubleEndedIterator<Item = Frame>) -> u32 {
        frames.rev().fold(NONE, |outer, frame| {
            let frame = Frame { outer, ..frame };
            *self.frames.entry(frame).or_insert_with(|| {
                self.names.frames.push(frame);
                self.names.frames.len() as u32
            })
        })
    }

    /// Adds the answer for one address, if there is none yet.
    pub(super) fn point(&mut self, name: &NativeName, detail: Detail) {
        let Some(end) = name.vaddr.checked_add(1) else { return };
        let function = self.function(name);
        let frames: Vec<Frame> = name.lines.iter().map(|frame| self.frame(frame)).collect();
        let frame = self.chain(frames.into_iter());
        self.piece(name.vaddr..end, function, frame, detail);
    }

    fn frame(&mut self, frame: &SourceFrame) -> Frame {
        let (function, file) = (self.text(frame.function.as_deref()), self.text(frame.file.as_deref()));
        Frame { function, file, line: frame.line.unwrap_or(0), outer: NONE }
    }

    /// Adds a piece that no other is in the way of, or as much of it as 32 bits can say.
    pub(super) fn piece(&mut self, range: Range<u64>, function: u32, frame: u32, detail: Detail) {
        let len = u32::try_from(range.end - range.start).unwrap_or(u32::MAX);
        self.added[index_of(detail)].push(Piece { begin: range.start, len, function, frame });
    }

    /// Whether there should be no more than what was met: all of it is read when the next recording starts.
    pub(super) fn is_well_filled(&self) -> bool {
        let pieces = |pieces: &[Vec<Piece>; 2]| pieces.iter().map(Vec::len).sum::<usize>();
        pieces(&self.names.pieces) + pieces(&self.added) > MAX_ENTRIES / 2 || self.names.is_full()
    }

    /// Puts what was added in its place, so that it is found.
    pub(super) fn settle(&mut self) {
        for (pieces, added) in self.names.pieces.iter_mut().zip(&mut self.added) {
            if added.is_empty() {
                continue;
            }
            pieces.append(added);
            // A stable sort: of two pieces at one address the first stays.
            pieces.sort_by_key(|piece| piece.begin);
            let mut joined: Vec<Piece> = Vec::with_capacity(pieces.len());
            for &piece in &*pieces {
                match joined.last_mut() {
                    Some(last) if last.end() > piece.begin => {}
                    Some(last)
                        if last.end() == piece.begin
                            && (last.function, last.frame) == (piece.function, piece.frame)
                            && last.len.checked_add(piece.len).is_some() =>
                    {
                        last.len += piece.len;
                    }
                    _ => joined.push(piece),
                }
            }
            *pieces = joined;
        }
    }
}
