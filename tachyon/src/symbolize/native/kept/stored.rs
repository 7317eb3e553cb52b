//! Names as [sealed](crate::kept::sealed) bytes: columns of numbers, one for each field.
//!
//! What is read is checked completely before it is used, and takes no more memory than a small multiple of the largest allowed size.

use prost::Message as _;
use prost::bytes::Bytes;

use super::names::{Frame, Function, MAX_ENTRIES, Names, Piece, Texts};
use crate::kept::Key;
use crate::kept::sealed::{self, column, numbers, wide_column, wide_numbers};

/// The last number is the version: it changes when the format does, or the answers for the same file.
const MAGIC: [u8; 8] = *b"tachsym\x02";

#[derive(Clone, PartialEq, prost::Message)]
struct Stored {
    #[prost(message, optional, tag = "1")]
    key: Option<Key>,
    /// All texts, one after the other, and where each of them ends.
    #[prost(string, tag = "2")]
    text: String,
    #[prost(bytes = "bytes", tag = "3")]
    ends: Bytes,
    #[prost(bytes = "bytes", tag = "4")]
    function_names: Bytes,
    #[prost(bytes = "bytes", tag = "5")]
    function_plts: Bytes,
    /// 0, or one more than the address.
    #[prost(bytes = "bytes", tag = "6")]
    function_vaddrs: Bytes,
    #[prost(bytes = "bytes", tag = "7")]
    frame_functions: Bytes,
    #[prost(bytes = "bytes", tag = "8")]
    frame_files: Bytes,
    #[prost(bytes = "bytes", tag = "9")]
    frame_lines: Bytes,
    #[prost(bytes = "bytes", tag = "10")]
    frame_outers: Bytes,
    #[prost(message, optional, tag = "11")]
    functions: Option<Pieces>,
    #[prost(message, optional, tag = "12")]
    lines: Option<Pieces>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Pieces {
    /// From the end of the piece before: of 64 bits.
    #[prost(bytes = "bytes", tag = "1")]
    gaps: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    lengths: Bytes,
    #[prost(bytes = "bytes", tag = "3")]
    functions: Bytes,
    #[prost(bytes = "bytes", tag = "4")]
    frames: Bytes,
}

/// Names as a file's content; `None`: they are too large for one.
pub(super) fn encode(key: &Key, names: &Names) -> Option<Vec<u8>> {
    let [functions, lines] = &names.pieces;
    let of_functions = |field: fn(&Function) -> u32| column(names.functions.iter().map(field));
    let of_frames = |field: fn(&Frame) -> u32| column(names.frames.iter().map(field));
    let vaddrs = names.functions.iter().map(|it| it.vaddr.map_or(0, |vaddr| vaddr.saturating_add(1)));
    let stored = Stored {
        key: Some(key.clone()),
        text: names.texts.text.clone(),
        ends: column(names.texts.ends.iter().copied()),
        function_names: of_functions(|function| function.name),
        function_plts: of_functions(|function| function.plt),
        function_vaddrs: wide_column(vaddrs),
        frame_functions: of_frames(|frame| frame.function),
        frame_files: of_frames(|frame| frame.file),
        frame_lines: of_frames(|frame| frame.line),
        frame_outers: of_frames(|frame| frame.outer),
        functions: Some(pieces_of(functions)),
        lines: Some(pieces_of(lines)),
    };
    if names.is_full() {
        return None;
    }
    sealed::seal(MAGIC, &stored.encode_to_vec())
}

fn pieces_of(pieces: &[Piece]) -> Pieces {
    let before = std::iter::once(0).chain(pieces.iter().map(Piece::end));
    Pieces {
        gaps: wide_column(pieces.iter().zip(before).map(|(piece, before)| piece.begin - before)),
        lengths: column(pieces.iter().map(|piece| piece.len)),
        functions: column(pieces.iter().map(|piece| piece.function)),
        frames: column(pieces.iter().map(|piece| piece.frame)),
    }
}

/// The names in a file's content; `None`: they are of something else, or damaged.
pub(super) fn decode(content: &[u8], key: &Key) -> Option<Names> {
    let stored = Stored::decode(sealed::open(MAGIC, content)?).ok()?;
    if stored.key.as_ref() != Some(key) {
        return None;
    }
    names_of(stored)
}

fn names_of(stored: Stored) -> Option<Names> {
    let texts = Texts { text: stored.text, ends: numbers(&stored.ends)?.collect() };
    let (names, plts) = (numbers(&stored.function_names)?, numbers(&stored.function_plts)?);
    let vaddrs = wide_numbers(&stored.function_vaddrs)?;
    let count = names.len();
    if !texts.is_sound() || [plts.len(), vaddrs.len()] != [count; 2] {
        return None;
    }
    let functions = names.zip(plts).zip(vaddrs);
    let functions: Vec<_> =
        functions.map(|((name, plt), vaddr)| Function { name, plt, vaddr: vaddr.checked_sub(1) }).collect();
    let (functions_of, files) = (numbers(&stored.frame_functions)?, numbers(&stored.frame_files)?);
    let (lines, outers) = (numbers(&stored.frame_lines)?, numbers(&stored.frame_outers)?);
    let count = functions_of.len();
    if [files.len(), lines.len(), outers.len()] != [count; 3] {
        return None;
    }
    let frames = functions_of.zip(files).zip(lines.zip(outers));
    let frames: Vec<_> =
        frames.map(|((function, file), (line, outer))| Frame { function, file, line, outer }).collect();
    let is_text = |number: u32| number as usize <= texts.len();
    let functions_fit = functions.iter().all(|function| is_text(function.name) && is_text(function.plt));
    // An outer frame has a smaller number: no chain goes round.
    let frame_fits =
        |(at, frame): (usize, &Frame)| is_text(frame.function) && is_text(frame.file) && frame.outer as usize <= at;
    if !functions_fit || !frames.iter().enumerate().all(frame_fits) {
        return None;
    }
    let of = |pieces: &Option<Pieces>| placed(pieces.as_ref()?, functions.len(), frames.len());
    let pieces = [of(&stored.functions)?, of(&stored.lines)?];
    Some(Names { texts, functions, frames, pieces }).filter(|names| !names.is_full())
}

fn placed(stored: &Pieces, functions: usize, frames: usize) -> Option<Vec<Piece>> {
    let (gaps, lengths) = (wide_numbers(&stored.gaps)?, numbers(&stored.lengths)?);
    let (functions_of, frames_of) = (numbers(&stored.functions)?, numbers(&stored.frames)?);
    let count = gaps.len();
    if count > MAX_ENTRIES || [lengths.len(), functions_of.len(), frames_of.len()] != [count; 3] {
        return None;
    }
    let mut pieces = Vec::with_capacity(count);
    let mut end = 0_u64;
    for ((gap, len), (function, frame)) in gaps.zip(lengths).zip(functions_of.zip(frames_of)) {
        let begin = end.checked_add(gap)?;
        end = begin.checked_add(u64::from(len))?;
        if len == 0 || function as usize >= functions || frame as usize > frames {
            return None;
        }
        pieces.push(Piece { begin, len, function, frame });
    }
    Some(pieces)
}
