//! Where code lies in the address spaces of a recording's processes.

use super::assembly::Assembly;
use crate::inspect::{Evaluator, EvaluatorCode};
use crate::merge::NativeKind;
use crate::recording::follow::lock;
use crate::remote::elf::Load;
use crate::symbolize::native::{MadeFunctions, Pinned};
use crate::types::KtimeNs;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// The code of an interpreter's file.
#[derive(Debug)]
pub struct InterpreterCode {
    pub evaluator: Evaluator,
    pub loads: Vec<Load>,
}

impl InterpreterCode {
    /// What kind of code the merge finds at an offset of the file; `None`: its function's name decides.
    pub fn kind_at(&self, offset: u64) -> Option<NativeKind> {
        let vaddr = Load::code_vaddr(&self.loads, offset)?;
        match self.evaluator.code_at(vaddr)? {
            EvaluatorCode::Evaluator => Some(NativeKind::Evaluator { entering: self.evaluator.is_prologue(vaddr) }),
            EvaluatorCode::Handler => Some(NativeKind::Handler),
        }
    }
}

/// A mapping that may hold code.
#[derive(Clone, Debug)]
pub struct Code {
    pub start: u64,
    pub end: u64,
    /// Offset of its start in the file.
    pub offset: u64,
    /// Short name of what is mapped.
    pub object: Arc<str>,
    /// Its path, or a name in brackets.
    pub path: Arc<str>,
    /// Its file; `None`: there is none, or it could not be held.
    pub file: Option<Pinned>,
    /// The interpreter's code in its file.
    pub interpreter: Option<Arc<InterpreterCode>>,
    /// It holds copies of the function through which `-X perf` calls the evaluator.
    pub trampolines: bool,
}

impl Code {
    /// It is in no file: the process generated it at run time.
    pub fn is_made(&self) -> bool {
        self.file.is_none() && self.object.is_empty() && self.interpreter.is_none() && !self.trampolines
    }
}

/// Code of one process, by address.
#[derive(Debug, Default)]
pub struct AddressSpace {
    /// Sorted, without overlaps.
    code: Arc<[Code]>,
    /// Functions that the process generated, in code without a file.
    made: Arc<MadeFunctions>,
}

impl AddressSpace {
    /// The mappings as they are now; what `before` had elsewhere stays, for samples still on their way.
    pub fn new(mut code: Vec<Code>, before: Option<&Self>) -> Self {
        code.sort_by_key(|code| code.start);
        let free = |old: &&Code| {
            let at = code.partition_point(|new| new.end <= old.start);
            code.get(at).is_none_or(|new| new.start >= old.end)
        };
        let gone: Vec<Code> = before.into_iter().flat_map(|before| &*before.code).filter(free).cloned().collect();
        if !gone.is_empty() {
            code.extend(gone);
            code.sort_by_key(|code| code.start);
        }
        let made = before.map(|before| Arc::clone(&before.made)).unwrap_or_default();
        Self { code: code.into(), made }
    }

    /// The same code with these functions in the parts without a file.
    pub fn with(&self, made: Arc<MadeFunctions>) -> Self {
        Self { code: Arc::clone(&self.code), made }
    }

    /// The linker name of the function that the process generated at an address.
    pub fn made(&self, address: u64) -> Option<&[u8]> {
        self.made.name(address)
    }

    /// All mappings, sorted by address.
    pub fn code(&self) -> &[Code] {
        &self.code
    }

    /// The mapping that holds an address.
    pub fn at(&self, address: u64) -> Option<&Code> {
        let at = self.code.partition_point(|code| code.end <= address);
        self.code.get(at).filter(|code| code.start <= address)
    }
}

/// Address spaces of one image: processes forked from each other have the same mappings until one of them maps more.
#[derive(Debug)]
struct OfImage {
    latest: Arc<AddressSpace>,
    by_instance: HashMap<u64, (Arc<AddressSpace>, KtimeNs), RandomState>,
}

/// Address spaces of all processes, by image and instance.
#[derive(Debug, Default)]
pub struct Spaces {
    images: Mutex<HashMap<u64, OfImage, RandomState>>,
    /// Code without unwind rules in `.eh_frame`.
    pub assembly: Assembly,
}

impl Spaces {
    /// The address space of a process; for a forked one that has not been looked at, its image's latest.
    pub fn get(&self, image: u64, instance: u64) -> Option<Arc<AddressSpace>> {
        let images = lock(&self.images);
        let image = images.get(&image)?;
        Some(Arc::clone(image.by_instance.get(&instance).map_or(&image.latest, |(own, _)| own)))
    }

    /// Whether all that a process had mapped by a certain time is in its address space.
    pub fn is_seen(&self, image: u64, instance: u64, time: KtimeNs) -> bool {
        let images = lock(&self.images);
        let own = images.get(&image).and_then(|image| image.by_instance.get(&instance));
        own.is_some_and(|&(_, seen_at)| seen_at >= time)
    }

    /// A process's address space is still this at a later time.
    pub fn seen(&self, image: u64, instance: u64, at: KtimeNs) {
        if let Some((_, seen_at)) =
            lock(&self.images).get_mut(&image).and_then(|image| image.by_instance.get_mut(&instance))
        {
            *seen_at = at;
        }
    }

    /// Publishes a process's address space, as it was at a certain time.
    pub fn set(&self, image: u64, instance: u64, space: AddressSpace, at: KtimeNs) {
        let space = Arc::new(space);
        let mut images = lock(&self.images);
        let of_image = images
            .entry(image)
            .or_insert_with(|| OfImage { latest: Arc::clone(&space), by_instance: HashMap::default() });
        of_image.latest = Arc::clone(&space);
        of_image.by_instance.insert(instance, (space, at));
    }

    /// Forgets a process that has ended.
    pub fn forget(&self, image: u64, instance: u64) {
        if let Some(image) = lock(&self.images).get_mut(&image) {
            image.by_instance.remove(&instance);
        }
    }

    /// Forgets an image whose last process has ended.
    pub fn forget_image(&self, image: u64) {
        lock(&self.images).remove(&image);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(start: u64, end: u64, object: &str) -> Code {
        Code {
            start,
            end,
            offset: 0,
            object: object.into(),
            path: object.into(),
            file: None,
            interpreter: None,
            trampolines: false,
        }
    }

    fn name(space: &AddressSpace, address: u64) -> Option<&str> {
        space.at(address).map(|code| &*code.object)
    }

    #[test]
    fn what_was_unmapped_is_still_known_where_nothing_else_lies() {
        let before = AddressSpace::new(vec![code(30, 40, "c"), code(10, 20, "a")], None);
        assert_eq!([5, 10, 19, 20, 35].map(|at| name(&before, at)), [None, Some("a"), Some("a"), None, Some("c")]);
        let now = AddressSpace::new(vec![code(15, 25, "b")], Some(&before));
        assert_eq!([12, 15, 24, 25, 35].map(|at| name(&now, at)), [None, Some("b"), Some("b"), None, Some("c")]);
    }

    #[test]
    fn a_fork_maps_as_its_image_until_it_is_looked_at() {
        let spaces = Spaces::default();
        let named = |instance| spaces.get(1, instance).and_then(|space| name(&space, 10).map(ToOwned::to_owned));
        assert_eq!(named(7), None);
        spaces.set(1, 7, AddressSpace::new(vec![code(10, 20, "parent")], None), KtimeNs(5));
        assert_eq!(named(8).as_deref(), Some("parent"));
        let seen = |instance, time| spaces.is_seen(1, instance, KtimeNs(time));
        assert!(seen(7, 5) && !seen(7, 6) && !seen(8, 5), "its parent's may not be all");
        spaces.seen(1, 7, KtimeNs(6));
        assert!(seen(7, 6) && !seen(7, 7));
        spaces.set(1, 8, AddressSpace::new(vec![code(10, 20, "child")], None), KtimeNs(9));
        assert!(seen(8, 9) && !seen(7, 9));
        assert_eq!((named(7).as_deref(), named(8).as_deref()), (Some("parent"), Some("child")));
        spaces.forget(1, 7);
        assert_eq!(named(7).as_deref(), Some("child"));
        spaces.forget_image(1);
        assert_eq!(named(8), None);
    }
}
