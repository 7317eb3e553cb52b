//! Names of installed distributions, from the metadata beside them on this machine, if present.
//!
//! The paths come from a profile: they may be another machine's or a container's, and may be anything. Only regular
//! files called `*.dist-info/RECORD` and the like are read, up to a size; a missing file is not an error.

use crate::analysis::Distributions;
use std::cell::RefCell;
use std::collections::HashMap;
use std::io::Read as _;
use std::path::Path;

/// Most bytes of one file of metadata: torch's RECORD has 2 MB.
const MAX_BYTES: u64 = 16 << 20;
/// Most distributions of one directory.
const MAX_DISTRIBUTIONS: usize = 10_000;

/// Looks distributions up, each directory once.
#[derive(Debug, Default)]
pub struct Installed {
    sites: RefCell<HashMap<String, Site>>,
}

/// The distributions that each installed top-level name belongs to.
#[derive(Debug, Default)]
struct Site {
    owners: HashMap<String, Vec<Owner>>,
}

#[derive(Clone, Debug)]
struct Owner {
    name: String,
    /// Paths that it installed under this name, if several distributions share it.
    record: std::rc::Rc<Vec<String>>,
}

impl Distributions for Installed {
    fn name(&self, site: &str, path: &str) -> Option<String> {
        let mut sites = self.sites.borrow_mut();
        let known = match sites.get(site) {
            Some(known) => known,
            None => sites.entry(site.to_owned()).or_insert(Site::read(Path::new(site))),
        };
        let owners = known.owners.get(path.split('/').next()?)?;
        let owner = match &owners[..] {
            [one] => Some(one),
            // A namespace package: the one that has this very file.
            many => many.iter().find(|owner| owner.record.iter().any(|file| file == path)),
        };
        owner.map(|owner| owner.name.clone())
    }
}

impl Site {
    fn read(directory: &Path) -> Self {
        let mut site = Self::default();
        let Ok(entries) = std::fs::read_dir(directory) else { return site };
        let mut entries: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.file_name())).collect();
        entries.sort();
        for entry in entries.iter().filter_map(|name| name.to_str()).take(MAX_DISTRIBUTIONS) {
            let Some((stem, _)) = entry.rsplit_once('.').filter(|(_, end)| matches!(*end, "dist-info" | "egg-info"))
            else {
                continue;
            };
            let metadata = directory.join(entry);
            // `typing_extensions-4.12.2.dist-info`: the metadata has the name as its author spells it.
            let name = ["METADATA", "PKG-INFO"].iter().find_map(|file| {
                let text = read(&metadata.join(file))?;
                let line = text.lines().take_while(|line| !line.is_empty()).find(|line| line.starts_with("Name:"))?;
                Some(line["Name:".len()..].trim().to_owned()).filter(|name| !name.is_empty())
            });
            let name = name.unwrap_or_else(|| stem.split('-').next().unwrap_or(stem).to_owned());
            let record: Vec<String> = match read(&metadata.join("RECORD")) {
                Some(text) => text.lines().filter_map(record_path).collect(),
                None => read(&metadata.join("top_level.txt"))
                    .map(|text| text.lines().flat_map(|top| [top.to_owned(), format!("{top}.py")]).collect())
                    .unwrap_or_default(),
            };
            let mut tops: Vec<String> =
                record.iter().filter_map(|path| path.split('/').next()).map(str::to_owned).collect();
            tops.sort_unstable();
            tops.dedup();
            let record = std::rc::Rc::new(record);
            for top in tops.into_iter().filter(|top| top != "..") {
                site.owners.entry(top).or_default().push(Owner { name: name.clone(), record: record.clone() });
            }
        }
        site
    }
}

/// The path of a line of RECORD: CSV with path, hash and size; a path with a comma is quoted.
fn record_path(line: &str) -> Option<String> {
    let path = match line.strip_prefix('"') {
        Some(quoted) => quoted.split_once('"')?.0,
        None => line.split(',').next()?,
    };
    (!path.is_empty()).then(|| path.to_owned())
}

fn read(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    crate::input::open(path).ok()?.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_as_the_metadata_has_them() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("PyYAML-6.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: PyYAML\n\nName: other\n");
        write("PyYAML-6.0.dist-info/RECORD", "yaml/reader.py,sha256=x,1\n\"_yaml/a,b.py\",,\n../../../bin/x,,\n");
        write("google_auth-1.dist-info/RECORD", "google/auth/a.py,,\n");
        write("google_auth-1.dist-info/METADATA", "Name: google-auth\n");
        write("protobuf-1.dist-info/RECORD", "google/protobuf/b.py,,\n");
        write("six-1.egg-info/top_level.txt", "six\n");
        let installed = Installed::default();
        let site = dir.path().to_str().unwrap();
        for (path, name) in [
            ("yaml/reader.py", Some("PyYAML")),
            ("_yaml/x.py", Some("PyYAML")),
            ("google/auth/a.py", Some("google-auth")),
            ("google/protobuf/b.py", Some("protobuf")),
            ("google/c.py", None),
            ("six.py", Some("six")),
            ("unknown/x.py", None),
            ("../x", None),
        ] {
            assert_eq!(installed.name(site, path).as_deref(), name, "{path}");
        }
        assert_eq!(installed.name("/no/such/site-packages", "x/y.py"), None);
    }
}
