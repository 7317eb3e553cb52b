//! Files at another path on the other side: another checkout, another container, another version of Python.
//!
//! A file that only one side has is matched with the file of the other side whose path ends in the same names, if there
//! is a single best match; otherwise with one of another name that has most of the same functions.

use crate::analysis::aggregate::{Aggregate, Place};
use crate::sinks::label::Kind;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Fewest functions that two files of different names must have in common.
const FEWEST_IN_COMMON: usize = 2;

/// Functions by file.
type Functions<'a> = BTreeMap<Arc<str>, BTreeSet<&'a str>>;

/// Files of the side before, with their counterparts on the side after.
pub(super) fn moved(before: &Aggregate, after: &Aggregate) -> BTreeMap<Arc<str>, Arc<str>> {
    let [old, new] = [before, after].map(|aggregate| {
        let mut files = Functions::new();
        for place in aggregate.places().iter().filter(|place| place.kind == Kind::Python) {
            files.entry(Arc::clone(&place.file)).or_default().insert(&place.function);
        }
        files
    });
    let names = |files: &Functions<'_>| files.keys().cloned().collect::<BTreeSet<_>>();
    let mut moved: BTreeMap<_, _> = pairs(&names(&old), &names(&new)).into_iter().collect();
    renamed(&old, &new, &mut moved);
    moved
}

/// The places of `before`, with the files of `after` where they correspond.
pub(super) fn aligned(before: &Aggregate, moved: &BTreeMap<Arc<str>, Arc<str>>) -> Vec<Place> {
    let place = |place: &Place| match moved.get(&place.file) {
        Some(file) if place.kind == Kind::Python => Place { file: Arc::clone(file), ..place.clone() },
        _ => place.clone(),
    };
    before.places().iter().map(place).collect()
}

/// Adds files that have another name on the other side, and the same functions.
fn renamed(old: &Functions<'_>, new: &Functions<'_>, moved: &mut BTreeMap<Arc<str>, Arc<str>>) {
    let taken: BTreeSet<_> = moved.values().cloned().collect();
    let lost: Vec<_> = old.iter().filter(|(file, _)| !new.contains_key(*file) && !moved.contains_key(*file)).collect();
    let found: Vec<_> = new.iter().filter(|(file, _)| !old.contains_key(*file) && !taken.contains(*file)).collect();
    let [lost, found] = [lost, found].map(|files| files.into_iter().map(telling).collect::<Vec<_>>());
    let in_common = |a: &BTreeSet<&str>, b: &BTreeSet<&str>| {
        let common = a.intersection(b).count();
        if common >= FEWEST_IN_COMMON && 2 * common > a.len().min(b.len()) { common } else { 0 }
    };
    let mut fits: Vec<(usize, &Arc<str>, &Arc<str>)> = Vec::new();
    for (file, functions) in &lost {
        for (other, others) in &found {
            fits.push((in_common(functions, others), file, other));
        }
    }
    fits.retain(|(common, ..)| *common > 0);
    fits.sort_by(|a, b| b.cmp(a));
    let mut taken = BTreeSet::new();
    for (_, file, other) in fits {
        if !moved.contains_key(file) && taken.insert(other) {
            moved.insert(Arc::clone(file), Arc::clone(other));
        }
    }
}

/// A file with those of its functions that are distinctive: what every file has says nothing.
fn telling<'a>((file, functions): (&'a Arc<str>, &BTreeSet<&'a str>)) -> (&'a Arc<str>, BTreeSet<&'a str>) {
    (file, functions.iter().copied().filter(|name| !name.starts_with('<') && *name != "main").collect())
}

/// Pairs files that only one side has, by their names.
fn pairs(old: &BTreeSet<Arc<str>>, new: &BTreeSet<Arc<str>>) -> HashMap<Arc<str>, Arc<str>> {
    let by_name = |files: BTreeSet<Arc<str>>| {
        let mut names: HashMap<String, Vec<Arc<str>>> = HashMap::new();
        for file in files {
            names.entry(base(&file).to_owned()).or_default().push(file);
        }
        names
    };
    let (old, new) = (by_name(old - new), by_name(new - old));
    let mut pairs = HashMap::new();
    for (name, old) in &old {
        let Some(new) = new.get(name) else { continue };
        // `__init__.py` has many namesakes: each takes the nearest, and none if two are equally near.
        for file in old {
            let Some(best) = nearest(file, new) else { continue };
            if nearest(best, old).is_some_and(|back| back == file) {
                pairs.insert(Arc::clone(file), Arc::clone(best));
            }
        }
    }
    pairs
}

/// The one whose path shares the longest end; `None` if that is more than one.
fn nearest<'a>(file: &str, among: &'a [Arc<str>]) -> Option<&'a Arc<str>> {
    let in_common = |other: &str| file.rsplit('/').zip(other.rsplit('/')).take_while(|(a, b)| a == b).count();
    let most = among.iter().map(|other| in_common(other)).max()?;
    let mut best = among.iter().filter(|other| in_common(other) == most);
    let first = best.next()?;
    best.next().is_none().then_some(first)
}

fn base(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_by_their_functions() {
        let files = |files: &[(&str, &[&'static str])]| -> Functions<'static> {
            files.iter().map(|(file, names)| (Arc::from(*file), names.iter().copied().collect())).collect()
        };
        let old = files(&[
            ("/a/shop.py", &["<module>", "main", "pack", "sign", "store"]),
            ("/a/x.py", &["<module>", "main"]),
        ]);
        let new = files(&[
            ("/a/store.py", &["<module>", "main", "pack", "signature", "store"]),
            ("/a/y.py", &["<module>", "main", "pack"]),
            ("/a/z.py", &["<module>", "main"]),
        ]);
        let mut moved = BTreeMap::new();
        renamed(&old, &new, &mut moved);
        assert_eq!(moved, BTreeMap::from([(Arc::from("/a/shop.py"), Arc::from("/a/store.py"))]));
    }

    #[test]
    fn files_by_their_last_names() {
        let set = |files: &[&str]| files.iter().map(|file| Arc::from(*file)).collect::<BTreeSet<Arc<str>>>();
        let old =
            set(&["/v1/app.py", "/v1/a/__init__.py", "/v1/b/__init__.py", "/same.py", "/v1/x/u.py", "/v1/y/u.py"]);
        let new = set(&["/v2/app.py", "/v2/a/__init__.py", "/v2/b/__init__.py", "/same.py", "/v2/z/u.py", "/v2/n.py"]);
        let pairs = pairs(&old, &new);
        let mut pairs: Vec<_> = pairs.iter().map(|(old, new)| (&**old, &**new)).collect();
        pairs.sort_unstable();
        assert_eq!(
            pairs,
            [
                ("/v1/a/__init__.py", "/v2/a/__init__.py"),
                ("/v1/app.py", "/v2/app.py"),
                ("/v1/b/__init__.py", "/v2/b/__init__.py"),
            ]
        );
    }
}
