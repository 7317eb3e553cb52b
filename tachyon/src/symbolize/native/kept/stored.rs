//! Names as bytes: a header with a checksum, then packed columns of numbers.
//!
//! ```text
//! 0   8  "tachsym" and the version of the format
//! 8   4  CRC-32 of all that follows
//! 12  4  bytes after unpacking
//! 16     Stored, as protocol buffers, packed with Zstandard
//! ```
//!
//! What is read may be damaged, or another program's: it is checked completely before it is used, and takes no more memory than a
//! small multiple of the largest allowed size.

use prost::Message as _;

use super::names::{Frame, Function, MAX_ENTRIES, MAX_TEXT, Names, Piece};
use crate::remote::FileState;

/// The last number is the version: it changes when the format does, or the answers for the same file.
const MAGIC: [u8; 8] = *b"tachsym\x01";
const HEADER: usize = 16;

/// Most bytes of a file of names, packed and unpacked.
pub(super) const MAX_PACKED: usize = 4 << 20;
const MAX_UNPACKED: usize = 8 << 20;

/// What the names were made from. Names for anything else are not used.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Key {
    /// The program's own version: another one may name functions differently.
    #[prost(string, tag = "1")]
    pub version: String,
    #[prost(string, tag = "2")]
    pub build_id: String,
    #[prost(message, optional, tag = "3")]
    pub file: Option<State>,
    /// Of the debug file, if there is one.
    #[prost(message, optional, tag = "4")]
    pub debug: Option<State>,
}

/// [`FileState`].
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct State {
    #[prost(uint64, tag = "1")]
    pub dev: u64,
    #[prost(uint64, tag = "2")]
    pub inode: u64,
    #[prost(uint64, tag = "3")]
    pub size: u64,
    /// Seconds and nanoseconds of the last change of the content, then of the last change at all.
    #[prost(sint64, repeated, tag = "4")]
    pub times: Vec<i64>,
}

impl From<FileState> for State {
    fn from(state: FileState) -> Self {
        let times = vec![state.modified.0, state.modified.1, state.changed.0, state.changed.1];
        Self { dev: state.dev, inode: state.inode, size: state.size, times }
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct Stored {
    #[prost(message, optional, tag = "1")]
    key: Option<Key>,
    /// All texts, one after the other, and their lengths.
    #[prost(string, tag = "2")]
    text: String,
    #[prost(uint32, repeated, tag = "3")]
    lengths: Vec<u32>,
    #[prost(uint32, repeated, tag = "4")]
    function_names: Vec<u32>,
    #[prost(uint32, repeated, tag = "5")]
    function_plts: Vec<u32>,
    /// 0, or one more than the address.
    #[prost(uint64, repeated, tag = "6")]
    function_vaddrs: Vec<u64>,
    #[prost(uint32, repeated, tag = "7")]
    frame_functions: Vec<u32>,
    #[prost(uint32, repeated, tag = "8")]
    frame_files: Vec<u32>,
    #[prost(uint32, repeated, tag = "9")]
    frame_lines: Vec<u32>,
    #[prost(uint32, repeated, tag = "10")]
    frame_outers: Vec<u32>,
    #[prost(message, optional, tag = "11")]
    functions: Option<Pieces>,
    #[prost(message, optional, tag = "12")]
    lines: Option<Pieces>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Pieces {
    /// From the end of the piece before.
    #[prost(uint64, repeated, tag = "1")]
    gaps: Vec<u64>,
    #[prost(uint32, repeated, tag = "2")]
    lengths: Vec<u32>,
    #[prost(uint32, repeated, tag = "3")]
    functions: Vec<u32>,
    #[prost(uint32, repeated, tag = "4")]
    frames: Vec<u32>,
}

/// Names as a file's content; `None`: they are too large for one.
pub(super) fn encode(key: &Key, names: &Names) -> Option<Vec<u8>> {
    let [functions, lines] = &names.pieces;
    let stored = Stored {
        key: Some(key.clone()),
        text: names.texts.concat(),
        lengths: names.texts.iter().map(|text| text.len() as u32).collect(),
        function_names: names.functions.iter().map(|function| function.name).collect(),
        function_plts: names.functions.iter().map(|function| function.plt).collect(),
        function_vaddrs: names.functions.iter().map(|it| it.vaddr.map_or(0, |vaddr| vaddr.saturating_add(1))).collect(),
        frame_functions: names.frames.iter().map(|frame| frame.function).collect(),
        frame_files: names.frames.iter().map(|frame| frame.file).collect(),
        frame_lines: names.frames.iter().map(|frame| frame.line).collect(),
        frame_outers: names.frames.iter().map(|frame| frame.outer).collect(),
        functions: Some(pieces_of(functions)),
        lines: Some(pieces_of(lines)),
    };
    let bytes = stored.encode_to_vec();
    if bytes.len() > MAX_UNPACKED || names.is_full() {
        return None;
    }
    let packed = zstd::bulk::compress(&bytes, 1).ok()?;
    let mut rest = u32::try_from(bytes.len()).ok()?.to_le_bytes().to_vec();
    rest.extend(packed);
    let content = [&MAGIC[..], &crc32fast::hash(&rest).to_le_bytes(), &rest].concat();
    (content.len() <= MAX_PACKED).then_some(content)
}

fn pieces_of(pieces: &[Piece]) -> Pieces {
    let before = std::iter::once(0).chain(pieces.iter().map(Piece::end));
    Pieces {
        gaps: pieces.iter().zip(before).map(|(piece, before)| piece.begin - before).collect(),
        lengths: pieces.iter().map(|piece| piece.len).collect(),
        functions: pieces.iter().map(|piece| piece.function).collect(),
        frames: pieces.iter().map(|piece| piece.frame).collect(),
    }
}

/// The names in a file's content; `None`: they are of something else, or damaged.
pub(super) fn decode(content: &[u8], key: &Key) -> Option<Names> {
    let (header, packed) = content.split_at_checked(HEADER).filter(|_| content.len() <= MAX_PACKED)?;
    let word = |at: usize| Some(u32::from_le_bytes(*header.get(at..)?.first_chunk()?));
    if header[..8] != MAGIC || word(8)? != crc32fast::hash(&content[12..]) {
        return None;
    }
    let len = usize::try_from(word(12)?).ok().filter(|len| *len <= MAX_UNPACKED)?;
    let bytes = zstd::bulk::decompress(packed, len).ok().filter(|bytes| bytes.len() == len)?;
    let stored = Stored::decode(&*bytes).ok()?;
    if stored.key.as_ref() != Some(key) {
        return None;
    }
    names_of(&stored)
}

fn names_of(stored: &Stored) -> Option<Names> {
    let mut rest = Some(stored.text.as_str()).filter(|text| text.len() <= MAX_TEXT)?;
    let mut texts = Vec::with_capacity(stored.lengths.len().min(MAX_ENTRIES));
    for &len in &stored.lengths {
        let (text, after) = rest.split_at_checked(len as usize)?;
        texts.push(text.into());
        rest = after;
    }
    let count = stored.function_names.len();
    if !rest.is_empty() || [stored.function_plts.len(), stored.function_vaddrs.len()] != [count; 2] {
        return None;
    }
    let functions = (0..count).map(|at| Function {
        name: stored.function_names[at],
        plt: stored.function_plts[at],
        vaddr: stored.function_vaddrs[at].checked_sub(1),
    });
    let count = stored.frame_functions.len();
    if [stored.frame_files.len(), stored.frame_lines.len(), stored.frame_outers.len()] != [count; 3] {
        return None;
    }
    let frames = (0..count).map(|at| Frame {
        function: stored.frame_functions[at],
        file: stored.frame_files[at],
        line: stored.frame_lines[at],
        outer: stored.frame_outers[at],
    });
    let (functions, frames): (Vec<_>, Vec<_>) = (functions.collect(), frames.collect());
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
    let count = stored.gaps.len();
    if [stored.lengths.len(), stored.functions.len(), stored.frames.len()] != [count; 3] {
        return None;
    }
    let mut end = 0_u64;
    let piece = |at: usize| {
        let begin = end.checked_add(stored.gaps[at])?;
        let piece = Piece { begin, len: stored.lengths[at], function: stored.functions[at], frame: stored.frames[at] };
        end = begin.checked_add(u64::from(piece.len))?;
        (piece.len > 0 && (piece.function as usize) < functions && piece.frame as usize <= frames).then_some(piece)
    };
    (0..count).map(piece).collect()
}
