//! Which module a place belongs to: a distribution, the standard library, a native object, or the program's own file.
//!
//! The path alone decides: `site-packages/NAME` and `dist-packages/NAME` are distributions, everything else in
//! `lib/python3.N` is the standard library. A distribution's name may differ from what it installs (`yaml` is PyYAML);
//! callers that can look that up provide a [`Distributions`].

use super::aggregate::Place;
use crate::profile::{Library, SPECIAL_FILENAME, library, package};
use crate::sinks::label::Kind;

/// Module of the standard library.
pub const STDLIB: &str = "stdlib";

/// Knows the names of installed distributions.
pub trait Distributions {
    /// The distribution that installed `path`, which is relative to the directory `site`; `None`: not known.
    fn name(&self, site: &str, path: &str) -> Option<String>;
}

/// Knows no names: a distribution is named after the package that it installs.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoDistributions;

impl Distributions for NoDistributions {
    fn name(&self, _site: &str, _path: &str) -> Option<String> {
        None
    }
}

/// The module of a place.
#[must_use]
pub fn module(place: &Place, distributions: &dyn Distributions) -> String {
    match place.kind {
        Kind::Python => of_file(&place.file, distributions),
        Kind::Native | Kind::Kernel if !place.file.is_empty() => place.file.to_string(),
        Kind::Native | Kind::Kernel | Kind::Special => place.function.to_string(),
    }
}

fn of_file(file: &str, distributions: &dyn Distributions) -> String {
    if file.starts_with("<frozen ") {
        return STDLIB.to_owned();
    }
    if file.is_empty() || file == SPECIAL_FILENAME {
        return "<unknown>".to_owned();
    }
    // Profiles from Windows have its separators.
    let path = file.replace('\\', "/");
    match library(&path) {
        Some(Library::Site { site, inside }) => {
            distributions.name(site, inside).unwrap_or_else(|| package(inside).to_owned())
        }
        Some(Library::Standard(_)) => STDLIB.to_owned(),
        None => file.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_by_path() {
        struct Known;
        impl Distributions for Known {
            fn name(&self, site: &str, path: &str) -> Option<String> {
                (site == "/v/lib/python3.12/site-packages" && path.starts_with("yaml/")).then(|| "PyYAML".to_owned())
            }
        }
        for (file, expected) in [
            ("/usr/lib/python3.11/json/decoder.py", "stdlib"),
            ("/opt/python/lib/python3.13t/threading.py", "stdlib"),
            ("/usr/lib/python311.zip/os.py", "stdlib"),
            ("C:\\Users\\me\\Python312\\Lib\\json\\decoder.py", "stdlib"),
            ("<frozen importlib._bootstrap>", "stdlib"),
            ("/v/lib/python3.12/site-packages/yaml/reader.py", "PyYAML"),
            ("/v/lib/python3.12/site-packages/numpy/core/x.py", "numpy"),
            ("/usr/lib/python3/dist-packages/six.py", "six"),
            ("/srv/app.py", "/srv/app.py"),
            ("/home/lib/python3/app.py", "stdlib"),
            ("/home/python3.11/app.py", "/home/python3.11/app.py"),
            ("/home/lib/python3x/app.py", "/home/lib/python3x/app.py"),
            ("<string>", "<string>"),
            ("~", "<unknown>"),
        ] {
            let place = Place { kind: Kind::Python, function: "f".into(), file: file.into(), line: None };
            assert_eq!(module(&place, &Known), expected, "{file}");
        }
        let native = Place { kind: Kind::Native, function: "deflate".into(), file: "libz.so.1".into(), line: None };
        assert_eq!(module(&native, &Known), "libz.so.1");
        let special = Place { kind: Kind::Special, function: "<GC>".into(), file: "".into(), line: None };
        assert_eq!(module(&special, &Known), "<GC>");
    }
}
