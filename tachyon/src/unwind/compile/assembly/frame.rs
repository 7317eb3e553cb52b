//! A function's paths, from its first instruction to all of its ends.

use super::super::Piece;
use super::state::{Next, State};
use foldhash::HashMap;
use iced_x86::{Decoder, DecoderOptions, FlowControl, InstructionInfoFactory};
use std::collections::hash_map::Entry;
use std::ops::Range;

/// Most instructions of a function that are followed, some of them more than once.
const MAX_STEPS: u64 = 1 << 16;

/// A function may have holes for data or a loop's alignment; a jump further away than this goes to another function.
const MAX_HOLE: u64 = 64;

/// How often a function is followed again because a jump showed that code was decoded out of step.
const MAX_TURNS: usize = 8;

/// A contiguous piece of code.
pub(super) struct Code<'a> {
    bytes: &'a [u8],
    start: u64,
    /// A bit for each byte: set for instructions that others jump to.
    targets: Vec<u64>,
}

impl<'a> Code<'a> {
    /// Code at an address.
    pub fn new(bytes: &'a [u8], start: u64) -> Self {
        let mut code = Self { bytes, start, targets: vec![0; bytes.len() / 64 + 1] };
        for instruction in &mut code.decoder(start) {
            if matches!(instruction.flow_control(), FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch) {
                code.add_target(instruction.near_branch_target());
            }
        }
        code
    }

    fn add_target(&mut self, at: u64) {
        if let Some(at) = self.offset(at) {
            self.targets[at / 64] |= 1 << (at % 64);
        }
    }

    fn offset(&self, at: u64) -> Option<usize> {
        usize::try_from(at.checked_sub(self.start)?).ok().filter(|&at| at < self.bytes.len())
    }

    /// The bytes from an address on.
    pub fn from(&self, at: u64) -> &'a [u8] {
        self.offset(at).map_or(&[], |at| &self.bytes[at..])
    }

    /// Decodes from an address on.
    pub fn decoder(&self, at: u64) -> Decoder<'a> {
        Decoder::with_ip(64, self.from(at), at, DecoderOptions::NONE)
    }

    fn is_target(&self, at: u64) -> bool {
        self.offset(at).is_some_and(|at| self.targets[at / 64] >> (at % 64) & 1 != 0)
    }
}

/// A function that was followed to all of its ends.
pub(super) struct Function {
    /// By address. Holes of up to [`MAX_HOLE`] are closed.
    pub pieces: Vec<Piece>,
}

impl Function {
    /// Follows the function that begins at an address. Counts down `left` for each instruction. `None`: it cannot be verified.
    pub fn follow(code: &mut Code<'_>, at: u64, left: &mut u64) -> Option<Self> {
        code.add_target(at);
        for _ in 0..MAX_TURNS {
            let mut most = MAX_STEPS.min(*left);
            *left -= most;
            let mut paths = Paths::new(code);
            let whole = paths.follow(at, &mut most);
            *left += most;
            match (whole, paths.missed) {
                (Some(()), _) => return paths.returns.then(|| Self::of(paths.walks)),
                (None, Some(target)) => code.add_target(target),
                (None, None) => return None,
            }
        }
        None
    }

    fn of(walks: HashMap<u64, Vec<Piece>>) -> Self {
        let mut walked: Vec<Piece> = walks.into_values().flatten().collect();
        walked.sort_by_key(|piece| piece.start);
        let mut pieces: Vec<Piece> = Vec::new();
        for piece in walked {
            match pieces.last_mut() {
                Some(last) if piece.start <= last.end + MAX_HOLE && last.rule == piece.rule => last.end = piece.end,
                Some(last) if piece.start <= last.end + MAX_HOLE => {
                    last.end = piece.start;
                    pieces.push(piece);
                }
                _ => pieces.push(piece),
            }
        }
        Self { pieces }
    }

    /// Its contiguous parts.
    pub fn parts(&self) -> impl Iterator<Item = Range<u64>> {
        let parts = self.pieces.chunk_by(|one, next| one.end == next.start);
        parts.filter_map(|part| Some(part.first()?.start..part.last()?.end))
    }
}

/// The paths through a function.
struct Paths<'a> {
    code: &'a Code<'a>,
    /// What is known where paths meet.
    known: HashMap<u64, State>,
    /// Addresses from which paths are still to be followed.
    open: Vec<u64>,
    /// The rules found between one meeting of paths and the next; a stretch that is followed again is replaced, as less
    /// is known then.
    walks: HashMap<u64, Vec<Piece>>,
    /// An instruction that a path jumps to and that was not known to be a target.
    missed: Option<u64>,
    /// Whether a path returns. A part of a function that only jumps to others verifies nothing.
    returns: bool,
}

impl<'a> Paths<'a> {
    fn new(code: &'a Code<'a>) -> Self {
        let (known, walks) = (HashMap::default(), HashMap::default());
        Self { code, known, open: Vec::new(), walks, missed: None, returns: false }
    }

    /// Follows all to their ends. `None`: one cannot be followed.
    fn follow(&mut self, at: u64, left: &mut u64) -> Option<()> {
        let mut info = InstructionInfoFactory::new();
        self.go(at, &State::entered())?;
        while let Some(at) = self.open.pop() {
            let mut walked = self.walks.remove(&at).unwrap_or_default();
            walked.clear();
            self.follow_one(at, left, &mut walked, &mut info)?;
            self.walks.insert(at, walked);
        }
        Some(())
    }

    /// Follows one until it ends, or meets another path that knew no more.
    fn follow_one(
        &mut self,
        at: u64,
        left: &mut u64,
        walked: &mut Vec<Piece>,
        info: &mut InstructionInfoFactory,
    ) -> Option<()> {
        let mut decoder = self.code.decoder(at);
        let mut state = self.known.get(&at)?.clone();
        loop {
            *left = left.checked_sub(1)?;
            let instruction = decoder.decode();
            if instruction.is_invalid() {
                return None;
            }
            let (rule, behind) = (state.rule(), instruction.next_ip());
            match walked.last_mut() {
                Some(last) if last.rule == rule => last.end = behind,
                _ => walked.push(Piece { start: instruction.ip(), end: behind, rule }),
            }
            match state.step(&instruction, info)? {
                Next::Behind => {}
                Next::Branch(target) => return self.jump(target, &state),
                Next::Both(target) => self.jump(target, &state)?,
                Next::Return => {
                    self.returns = true;
                    return state.is_left().then_some(());
                }
                // To another function in place of this one.
                Next::Away => return state.is_left().then_some(()),
                Next::Nowhere => return Some(()),
            }
            if self.code.from(behind).is_empty() {
                return state.is_left().then_some(());
            }
            if self.code.is_target(behind) {
                return self.go(behind, &state);
            }
        }
    }

    fn jump(&mut self, target: u64, state: &State) -> Option<()> {
        if self.code.from(target).is_empty() {
            return state.is_left().then_some(());
        }
        if self.code.is_target(target) {
            return self.go(target, state);
        }
        self.missed = Some(target);
        None
    }

    /// Goes on at an address where paths meet.
    fn go(&mut self, at: u64, state: &State) -> Option<()> {
        let news = match self.known.entry(at) {
            Entry::Vacant(place) => {
                place.insert(state.clone());
                true
            }
            Entry::Occupied(mut known) => known.get_mut().meet(state),
        };
        if news {
            self.open.push(at);
        }
        Some(())
    }
}
