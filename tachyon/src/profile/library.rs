//! Which part of a Python installation a source file belongs to, judged by its path alone.

/// A part of a Python installation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library<'a> {
    /// In a directory of distributions.
    Site {
        /// The directory.
        site: &'a str,
        /// The path in it.
        inside: &'a str,
    },
    /// The standard library: the path in it.
    Standard(&'a str),
}

/// Which part of an installation a file belongs to, if any.
#[must_use]
pub fn library(path: &str) -> Option<Library<'_>> {
    for name in ["/site-packages/", "/dist-packages/"] {
        // The last one: a virtual environment may lie in another's directory.
        if let Some(at) = path.rfind(name) {
            let end = at + name.len();
            return Some(Library::Site { site: &path[..end - 1], inside: &path[end..] });
        }
    }
    // `lib/python3.12/json/decoder.py`, `lib/python3.13t/…`, `lib/python312.zip/…`, and on Windows `Python312/Lib/…`.
    let mut place = 0;
    let mut previous = "";
    for part in path.split('/') {
        let after = place + part.len() + 1;
        let is_library = (previous.starts_with("lib") && part.strip_prefix("python3").is_some_and(is_version))
            || (part == "Lib" && previous.to_ascii_lowercase().starts_with("python3"));
        if is_library && after < path.len() {
            return Some(Library::Standard(&path[after..]));
        }
        (place, previous) = (after, part);
    }
    None
}

/// What follows `python3` in the name of a library's directory.
fn is_version(rest: &str) -> bool {
    let rest = rest.trim_end_matches(".zip").trim_end_matches('t').trim_start_matches('.');
    rest.bytes().all(|byte| byte.is_ascii_digit())
}

/// The package or module that a path in a directory of distributions belongs to, without the file's suffix: `six.py`,
/// `_cffi_backend.cpython-311-x86_64-linux-gnu.so`.
#[must_use]
pub fn package(inside: &str) -> &str {
    let package = inside.split('/').next().unwrap_or_default();
    let is_file = package.ends_with(".py") || package.ends_with(".so") || package.ends_with(".pyd");
    if is_file { package.split('.').next().unwrap_or(package) } else { package }
}

/// A source file for people: libraries' files by their package (`json/decoder.py`), the program's own without directories,
/// except where the name alone says nothing (`orders/__init__.py`).
#[must_use]
pub fn package_path(path: &str) -> &str {
    if let Some(Library::Site { inside, .. } | Library::Standard(inside)) = library(path) {
        return inside;
    }
    let start = |path: &str| path.rfind('/').map_or(0, |at| at + 1);
    let base = start(path);
    match &path[base..] {
        "__init__.py" | "__main__.py" if base > 1 => &path[start(&path[..base - 1])..],
        name => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_by_package() {
        for (path, shown) in [
            ("/srv/app.py", "app.py"),
            ("app.py", "app.py"),
            ("/srv/orders/__init__.py", "orders/__init__.py"),
            ("/__main__.py", "__main__.py"),
            ("__main__.py", "__main__.py"),
            ("/usr/lib/python3.11/re/__init__.py", "re/__init__.py"),
            ("/venv/lib/python3.12/site-packages/django/db/models/query.py", "django/db/models/query.py"),
            ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap>"),
            ("~", "~"),
            ("", ""),
        ] {
            assert_eq!(package_path(path), shown, "{path}");
        }
    }
}
