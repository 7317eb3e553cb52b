//! Which frames and strings are in a file's tables, and where: in order of first use.

use crate::profile::{self, FrameId, Profile, SPECIAL_FILENAME, StrId, waited_for};
use crate::sinks::process_frame_name;
use crate::tach::{Frame, omitted_name};
use foldhash::fast::RandomState;
use std::collections::HashMap;

/// What an entry of the file's frame table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Entry {
    /// A frame of the profile.
    Frame(FrameId),
    /// A frame without source of its own, at the line of Python that called it: CPython's heat map and function lists count
    /// by line, and the C code that a line called belongs to it.
    Called { callee: FrameId, caller: FrameId },
    /// The outermost frame that names a process: index into [`Profile::processes`].
    Process(u32),
    /// The frame in place of this many omitted ones.
    Omitted(usize),
}

impl Entry {
    /// The frame, with the profile's own names.
    pub fn of_profile(self, profile: &Profile) -> Option<profile::Frame> {
        match self {
            Self::Frame(id) => Some(*profile.frames.get(id)),
            Self::Called { callee, caller } => {
                let (callee, caller) = (profile.frames.get(callee), profile.frames.get(caller));
                // If the line is not known, what it called is not placed there either.
                if caller.lineno < 0 {
                    return Some(*callee);
                }
                let Frame { lineno, end_lineno, column, end_column, opcode, .. } =
                    Frame::called_at(0, 0, caller.lineno);
                let (filename, function) = (caller.filename, callee.function);
                Some(profile::Frame { filename, function, lineno, end_lineno, column, end_column, opcode })
            }
            Self::Process(_) | Self::Omitted(_) => None,
        }
    }

    /// The function name of an entry that is not a frame of the profile.
    pub fn own_name(self, profile: &Profile) -> String {
        match self {
            Self::Frame(id) | Self::Called { callee: id, .. } => {
                profile.strings.get(profile.frames.get(id).function).to_owned()
            }
            Self::Process(index) => match profile.processes.get(index as usize) {
                Some(process) => process_frame_name(process),
                None => "<unknown process>".to_owned(),
            },
            Self::Omitted(count) => omitted_name(count),
        }
    }
}

/// What is known about a frame of the profile.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Its index in the file, if it is there unchanged.
    index: Option<u32>,
    /// [`Profile::shown`].
    shown: FrameId,
    /// It has no source of its own.
    special: bool,
    /// Whether it is something that a line of Python called: native and kernel code, and waits. CPython has markers such
    /// as `<GC>` without a place, and so has this sink.
    called: bool,
}

/// Gives frames their indices in the file, in order of first use. The profile's own handles would not do: there are
/// additional frames, and the profile still grows.
#[derive(Debug, Default)]
pub(super) struct FrameIndices {
    pub entries: Vec<Entry>,
    /// By [`FrameId`]; `None` for frames that no sample used.
    places: Vec<Option<Place>>,
    of_others: HashMap<Entry, u32, RandomState>,
}

impl FrameIndices {
    /// Appends a whole stack, the leaf first.
    pub fn of_stack(&mut self, profile: &Profile, frames: &[FrameId], stack: &mut Vec<u32>) {
        let mut rest = frames;
        while let Some((&frame, outer)) = rest.split_first() {
            let place = self.place(profile, frame);
            if !place.special {
                stack.push(self.own(frame, place));
                rest = outer;
                continue;
            }
            let called = rest.iter().take_while(|&&frame| self.place(profile, frame).special).count();
            let (called, outer) = rest.split_at(called);
            for &frame in called {
                let place = self.place(profile, frame);
                stack.push(match outer.first().filter(|_| place.called) {
                    Some(&caller) => self.of(Entry::Called { callee: place.shown, caller }),
                    None => self.own(frame, place),
                });
            }
            rest = outer;
        }
    }

    fn place(&mut self, profile: &Profile, id: FrameId) -> Place {
        let at = id.0 as usize;
        if at >= self.places.len() {
            self.places.resize(at + 1, None);
        }
        *self.places[at].get_or_insert_with(|| {
            let shown = profile.shown(id);
            let frame = profile.frames.get(shown);
            let special = frame.lineno < 0 && profile.strings.get(frame.filename) == SPECIAL_FILENAME;
            let name = profile.strings.get(frame.function);
            let called = special && (!name.starts_with('<') || waited_for(name).is_some());
            Place { index: None, shown, special, called }
        })
    }

    /// The index of a frame unchanged; for a native place, that of the frame shown for it.
    fn own(&mut self, id: FrameId, place: Place) -> u32 {
        if let Some(index) = place.index {
            return index;
        }
        // A place may come before the frame that is shown for it, or after.
        let index = if place.special { self.of(Entry::Frame(place.shown)) } else { self.push(Entry::Frame(id)) };
        if let Some(known) = &mut self.places[id.0 as usize] {
            known.index = Some(index);
        }
        index
    }

    pub fn of(&mut self, entry: Entry) -> u32 {
        if let Some(&index) = self.of_others.get(&entry) {
            return index;
        }
        let index = self.push(entry);
        self.of_others.insert(entry, index);
        index
    }

    fn push(&mut self, entry: Entry) -> u32 {
        let index = u32::try_from(self.entries.len()).expect("fewer than 2^32 frames fit in memory");
        self.entries.push(entry);
        index
    }

    /// The file's tables, once all names are known.
    pub fn tables(&self, profile: &Profile) -> (Strings, Vec<Frame>) {
        let mut strings = Strings::default();
        let frames = self.entries.iter().map(|entry| {
            if let Some(frame) = entry.of_profile(profile) {
                return Frame {
                    filename: strings.of_profile(frame.filename),
                    function: strings.of_profile(frame.function),
                    lineno: frame.lineno,
                    end_lineno: frame.end_lineno,
                    column: frame.column,
                    end_column: frame.end_column,
                    opcode: frame.opcode,
                };
            }
            let (file, name) = (SPECIAL_FILENAME.to_owned(), entry.own_name(profile));
            Frame::without_location(strings.push(Text::Own(file)), strings.push(Text::Own(name)))
        });
        let frames = frames.collect();
        (strings, frames)
    }
}

/// The file's string table: the profile's strings that frames use, in order of first use, and some of its own.
#[derive(Debug, Default)]
pub(super) struct Strings {
    texts: Vec<Text>,
    of_profile: HashMap<StrId, u32>,
}

#[derive(Debug)]
enum Text {
    Profile(StrId),
    Own(String),
}

impl Strings {
    fn of_profile(&mut self, id: StrId) -> u32 {
        if let Some(&index) = self.of_profile.get(&id) {
            return index;
        }
        let index = self.push(Text::Profile(id));
        self.of_profile.insert(id, index);
        index
    }

    fn push(&mut self, text: Text) -> u32 {
        let index = u32::try_from(self.texts.len()).expect("fewer than 2^32 strings fit in memory");
        self.texts.push(text);
        index
    }

    pub fn iter<'a>(&'a self, profile: &'a Profile) -> impl Iterator<Item = &'a str> {
        self.texts.iter().map(|text| match text {
            Text::Profile(id) => profile.strings.get(*id),
            Text::Own(text) => text,
        })
    }
}
