//! Native frames with their addresses.
//!
//! A native frame is shown by its name alone (`libz.so.1!deflate`), but a sampled address is a finer thing: one
//! function is hit at many, and gperftools' format and pprof's want each. So there are two kinds of handles. The one
//! that [`Profile::native_frame`] returns stands for one *place*: one address of one object, with the function there.
//! [`Profile::shown`] leads from it to the frame of its name, which is the same for all places of a function. Sinks
//! that have no addresses count by that one: their tables and stacks do not grow with the number of addresses. Both
//! handles have the same names in the frame table, so a sink that knows nothing about places still shows the right
//! thing.
//!
//! An address is not the same in two processes, but the place in the object is: places are distinguished by object and
//! address before relocation, so workers of one program share them, and a place keeps the address that it had in the
//! process where it was first seen.

use super::{Frame, FrameId, Profile, SPECIAL_FILENAME, StrId};
use foldhash::fast::RandomState;
use std::collections::{BTreeSet, HashMap};

/// Index of a [`NativeMapping`] in [`NativePlaces::mappings`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MappingId(pub u32);

/// Code of an object in a process's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct NativeMapping {
    /// Its process: index into [`Profile::processes`].
    pub process: u32,
    /// First address.
    pub start: u64,
    /// Address past the end.
    pub end: u64,
    /// Where in the file it begins, in bytes.
    pub offset: u64,
    /// Path as the process sees it, or a name in brackets such as `[vdso]`.
    pub path: String,
    /// Build id in hexadecimal digits; empty when there is none.
    pub build_id: String,
}

/// One address in native code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NativePlace {
    /// The mapping that holds it; `None` for code that is in no file, as a just-in-time compiler makes it.
    pub mapping: Option<MappingId>,
    /// Address of the instruction in the process where it was first seen; for a caller, an address inside the call, as
    /// used to look up names: the return address less one.
    pub address: u64,
    /// The same in the object, before relocation; without an object, `address`.
    pub vaddr: u64,
    /// The function was inlined here into the next outer frame, which has the same place.
    pub inlined: bool,
}

/// What is known about a place.
#[derive(Clone, Copy, Debug)]
struct Known {
    place: NativePlace,
    shown: FrameId,
    file: Option<StrId>,
    line: Option<u32>,
}

/// What an address before relocation belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Holder {
    /// An object: index of its first mapping.
    Object(u32),
    /// Nothing: the address may be in any process, and identifies a place only together with a name.
    Nobody,
}

/// The native places of a profile.
#[derive(Clone, Debug, Default)]
pub struct NativePlaces {
    mappings: Vec<NativeMapping>,
    ids: HashMap<NativeMapping, MappingId>,
    /// By mapping: its object.
    objects: Vec<Holder>,
    /// By path and build id. Where there is no build id, the path has to do.
    objects_by_name: HashMap<(String, String), Holder>,
    known: HashMap<FrameId, Known, RandomState>,
    places: HashMap<(Holder, u64, StrId), FrameId, RandomState>,
    /// Path and build id of objects without a mapping here: those from a profile that was read from a file.
    told: BTreeSet<(String, String)>,
}

impl NativePlaces {
    /// All mappings, in order of their handles.
    #[must_use]
    pub fn mappings(&self) -> &[NativeMapping] {
        &self.mappings
    }

    /// The mapping behind a handle.
    ///
    /// # Panics
    /// When the handle is of another profile.
    #[must_use]
    pub fn mapping(&self, id: MappingId) -> &NativeMapping {
        &self.mappings[id.0 as usize]
    }

    /// Adds an object without a known mapping.
    pub fn tell_object(&mut self, path: String, build_id: String) {
        self.told.insert((path, build_id));
    }

    /// Path and build id of all objects that have one, each once.
    #[must_use]
    pub fn objects(&self) -> BTreeSet<(&str, &str)> {
        let told = self.told.iter().map(|(path, id)| (&**path, &**id));
        let mapped = self.mappings.iter().map(|mapping| (&*mapping.path, &*mapping.build_id));
        mapped.chain(told).filter(|(_, id)| !id.is_empty()).collect()
    }

    /// Whether there is no place.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    fn holder(&self, mapping: Option<MappingId>) -> Holder {
        mapping.map_or(Holder::Nobody, |id| self.objects[id.0 as usize])
    }
}

impl Profile {
    /// The handle of a mapping, which is stored if it is new.
    ///
    /// # Panics
    /// After 2^32 different mappings.
    pub fn native_mapping(&mut self, mapping: NativeMapping) -> MappingId {
        let native = &mut self.native;
        if let Some(&id) = native.ids.get(&mapping) {
            return id;
        }
        let id = MappingId(u32::try_from(native.mappings.len()).expect("fewer than 2^32 mappings fit in memory"));
        let name = (mapping.path.clone(), mapping.build_id.clone());
        let object = *native.objects_by_name.entry(name).or_insert(Holder::Object(id.0));
        native.objects.push(object);
        native.ids.insert(mapping.clone(), id);
        native.mappings.push(mapping);
        id
    }

    /// The frame of a place: one for each address of an object and function there. `name` is what is shown
    /// (`object!function`, `object+0x1234`), `file` and `line` are DWARF's.
    pub fn native_frame(&mut self, name: &str, file: Option<&str>, line: Option<u32>, place: NativePlace) -> FrameId {
        let function = self.strings.intern(name);
        let key = (self.native.holder(place.mapping), place.vaddr, function);
        if let Some(&id) = self.native.places.get(&key) {
            return id;
        }
        let shown = self.special_frame(name);
        let filename = self.strings.intern(SPECIAL_FILENAME);
        // Not interned: it has the names of the frame that is shown.
        let id = self.frames.push_pending(Frame::without_location(filename, function));
        let file = file.map(|file| self.strings.intern(file));
        self.native.known.insert(id, Known { place, shown, file, line });
        self.native.places.insert(key, id);
        id
    }

    /// Where a frame's code is; `None` for frames that are not from [`Profile::native_frame`].
    #[must_use]
    pub fn native_place(&self, id: FrameId) -> Option<&NativePlace> {
        Some(&self.native.known.get(&id)?.place)
    }

    /// Source file and line of a native frame, if its object's DWARF has them.
    #[must_use]
    pub fn native_source(&self, id: FrameId) -> Option<(&str, Option<u32>)> {
        let known = self.native.known.get(&id)?;
        Some((self.strings.get(known.file?), known.line))
    }

    /// The frame to count by if addresses do not matter: for a native place the one of its name, otherwise the frame
    /// itself.
    #[must_use]
    pub fn shown(&self, id: FrameId) -> FrameId {
        self.native.known.get(&id).map_or(id, |known| known.shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(process: u32, start: u64, build_id: &str) -> NativeMapping {
        let (path, build_id) = ("/lib/libz.so.1".into(), build_id.into());
        NativeMapping { process, start, end: start + 0x1000, offset: 0x2000, path, build_id }
    }

    fn place(mapping: Option<MappingId>, address: u64, vaddr: u64) -> NativePlace {
        NativePlace { mapping, address, vaddr, inlined: false }
    }

    #[test]
    fn a_place_is_an_address_of_an_object() {
        let mut profile = Profile::default();
        let one = profile.native_mapping(mapping(0, 0x7000_0000, "aa"));
        assert_eq!(profile.native_mapping(mapping(0, 0x7000_0000, "aa")), one);
        let two = profile.native_mapping(mapping(1, 0x8000_0000, "aa"));
        let other = profile.native_mapping(mapping(1, 0x9000_0000, "bb"));
        assert_eq!(profile.native.mappings().len(), 3);
        let name = "libz.so.1!deflate";
        let first = profile.native_frame(name, Some("/src/deflate.c"), Some(7), place(Some(one), 0x7000_0010, 0x2010));
        let again = profile.native_frame(name, None, None, place(Some(two), 0x8000_0010, 0x2010));
        assert_eq!(first, again, "two processes share their object's places");
        assert_eq!(profile.native_place(first).unwrap().address, 0x7000_0010, "of the first process");
        let next = profile.native_frame(name, None, None, place(Some(one), 0x7000_0018, 0x2018));
        let newer = profile.native_frame(name, None, None, place(Some(other), 0x9000_0010, 0x2010));
        let inner = profile.native_frame("libz.so.1!inner", None, None, place(Some(one), 0x7000_0010, 0x2010));
        let loose = profile.native_frame(name, None, None, place(None, 0x2010, 0x2010));
        let all = [first, next, newer, inner, loose];
        assert!(all.iter().enumerate().all(|(at, id)| !all[..at].contains(id)));

        let shown = profile.special_frame(name);
        assert!([first, next, newer, loose].iter().all(|&id| profile.shown(id) == shown));
        assert_eq!(profile.shown(shown), shown);
        assert_ne!(profile.shown(inner), shown);
        assert_eq!(profile.frames.get(first), profile.frames.get(shown), "names are the same under both");
        assert_eq!(profile.native_source(first), Some(("/src/deflate.c", Some(7))));
        assert_eq!((profile.native_source(next), profile.native_place(shown)), (None, None));
    }
}
