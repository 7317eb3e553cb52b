//! The names of the formats.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// A file format for profiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// CPython 3.15's binary format; the only one that keeps everything.
    Tach,
    /// One line for each distinct stack with its count, for flame graph tools.
    Collapsed,
    /// gperftools' CPU profile.
    Gperftools,
    /// pprof's protocol buffer.
    Pprof,
    /// speedscope's JSON.
    Speedscope,
    /// A self-contained page: flame graph, time line, functions.
    Report,
    /// A flame graph, as a drawing or a self-contained page.
    Flamegraph,
    /// The Firefox profiler's JSON.
    Firefox,
    /// One JSON object for each sample.
    Jsonl,
}

/// A name that no format has.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown format {0:?}\nhint: one of {formats}", formats = names(&Format::ALL))]
pub struct UnknownFormat(String);

impl Format {
    /// All formats.
    pub const ALL: [Self; 9] = [
        Self::Tach,
        Self::Collapsed,
        Self::Gperftools,
        Self::Pprof,
        Self::Speedscope,
        Self::Report,
        Self::Flamegraph,
        Self::Firefox,
        Self::Jsonl,
    ];

    /// Formats by file name endings.
    pub const ENDINGS: [(&'static str, Self); 14] = [
        (".tach", Self::Tach),
        (".collapsed", Self::Collapsed),
        (".folded", Self::Collapsed),
        (".txt", Self::Collapsed),
        (".prof", Self::Gperftools),
        (".pprof", Self::Pprof),
        (".pb.gz", Self::Pprof),
        (".pb", Self::Pprof),
        (".speedscope.json", Self::Speedscope),
        (".speedscope", Self::Speedscope),
        (".html", Self::Report),
        (".svg", Self::Flamegraph),
        (".firefox.json", Self::Firefox),
        (".jsonl", Self::Jsonl),
    ];

    /// The name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tach => "tach",
            Self::Collapsed => "collapsed",
            Self::Gperftools => "gperftools",
            Self::Pprof => "pprof",
            Self::Speedscope => "speedscope",
            Self::Report => "report",
            Self::Flamegraph => "flamegraph",
            Self::Firefox => "firefox",
            Self::Jsonl => "jsonl",
        }
    }

    /// The format that a file's name indicates, if any.
    #[must_use]
    pub fn from_extension(path: &Path) -> Option<Self> {
        // Bytes that are not text come before the ending, or there is none.
        let name = path.file_name()?.to_string_lossy().to_ascii_lowercase();
        Self::ENDINGS.iter().find(|(ending, _)| name.ends_with(ending)).map(|&(_, format)| format)
    }

    /// The ending that a file in this format gets by default, without the dot.
    #[must_use]
    pub fn extension(self) -> &'static str {
        match self {
            Self::Tach => "tach",
            Self::Collapsed => "collapsed",
            Self::Gperftools => "prof",
            Self::Pprof => "pb.gz",
            Self::Speedscope => "speedscope.json",
            Self::Report => "html",
            Self::Flamegraph => "svg",
            Self::Firefox => "firefox.json",
            Self::Jsonl => "jsonl",
        }
    }

    /// Whether the format is bytes that do not belong on a terminal.
    #[must_use]
    pub fn is_binary(self) -> bool {
        matches!(self, Self::Tach | Self::Gperftools | Self::Pprof)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        let found = Self::ALL.into_iter().find(|format| format.name() == name);
        found.ok_or_else(|| UnknownFormat(name.to_owned()))
    }
}

fn names(formats: &[Format]) -> String {
    formats.iter().map(|format| format.name()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    #[test]
    fn names_and_endings() {
        for format in Format::ALL {
            assert_eq!(format.name().parse(), Ok(format));
            let path = format!("x.{}", format.extension());
            assert_eq!(Format::from_extension(Path::new(&path)), Some(format));
        }
        for (path, format) in [
            ("a/b.tach", Some(Format::Tach)),
            ("B.TACH", Some(Format::Tach)),
            ("x.folded", Some(Format::Collapsed)),
            ("x.pb.gz", Some(Format::Pprof)),
            ("x.speedscope.json", Some(Format::Speedscope)),
            ("x.json", None),
            ("tach", None),
            ("/", None),
        ] {
            assert_eq!(Format::from_extension(Path::new(path)), format, "{path}");
        }
        let not_text = |name: &[u8]| Format::from_extension(Path::new(OsStr::from_bytes(name)));
        assert_eq!([not_text(b"x\xff.pb.gz"), not_text(b"x.pb.gz\xff")], [Some(Format::Pprof), None]);
    }

    #[test]
    fn errors_name_the_choices() {
        assert_eq!(
            "gif".parse::<Format>().unwrap_err().to_string(),
            "unknown format \"gif\"\nhint: one of tach, collapsed, gperftools, pprof, speedscope, report, flamegraph, firefox, jsonl"
        );
    }
}
