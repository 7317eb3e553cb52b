//! Files that lie elsewhere on the other side: another checkout, another container, another version of Python.
//!
//! A file that only one side has is taken for the one of the other side that ends in the same names, when there is one
//! that fits best.

use crate::analysis::aggregate::{Aggregate, Place};
use crate::sinks::label::Kind;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// The places of `before`, with the files of `after` where they are the same ones.
pub(super) fn aligned(before: &Aggregate, after: &Aggregate) -> Vec<Place> {
    let files = |aggregate: &Aggregate| -> BTreeSet<Arc<str>> {
        let python = aggregate.places().iter().filter(|place| place.kind == Kind::Python);
        python.map(|place| Arc::clone(&place.file)).collect()
    };
    let (old, new) = (files(before), files(after));
    let moved = pairs(&old, &new);
    let place = |place: &Place| match moved.get(&*place.file) {
        Some(file) if place.kind == Kind::Python => Place { file: Arc::clone(file), ..place.clone() },
        _ => place.clone(),
    };
    before.places().iter().map(place).collect()
}

/// Files of one side alone by their name, as pairs.
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
        // `__init__.py` has many namesakes: each takes the nearest, and who has two that are as near takes none.
        for file in old {
            let Some(best) = nearest(file, new) else { continue };
            if nearest(best, old).is_some_and(|back| back == file) {
                pairs.insert(Arc::clone(file), Arc::clone(best));
            }
        }
    }
    pairs
}

/// The one that has most of its last names in common; `None` when that is more than one.
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
