//! Which format a file is written in: from `--format`, otherwise from the extension.

use crate::sinks::Format;
use std::path::Path;

/// What `--format` means.
///
/// # Errors
/// A message that names the available formats.
pub fn parse_name(name: &str) -> Result<Format, String> {
    name.parse().map_err(|_| format!("one of {}", names(", ", Format::name)))
}

/// The format that `path`'s extension names; TACH when it has none.
///
/// # Errors
/// The extension, when it is not known.
pub fn of_path(path: &Path) -> Result<Format, String> {
    let Some(extension) = path.extension() else { return Ok(Format::Tach) };
    Format::from_extension(path).ok_or_else(|| extension.to_string_lossy().into_owned())
}

/// The help of `--format`: each format with the file name endings that select it. `of` says whose.
#[must_use]
pub fn long_help(of: &str) -> String {
    let told = Format::ALL.map(|format| {
        let endings = Format::ENDINGS.iter().filter(|&&(_, told)| told == format).map(|&(ending, _)| ending);
        format!("{format} ({})", endings.collect::<Vec<_>>().join(" "))
    });
    format!("Format: {} [default: by the extension of {of}]", told.join(", "))
}

/// All formats' extensions for a message.
#[must_use]
pub fn extensions() -> String {
    names(" ", Format::extension).split(' ').map(|extension| format!(".{extension}")).collect::<Vec<_>>().join(" ")
}

fn names(between: &str, name: impl Fn(Format) -> &'static str) -> String {
    Format::ALL.map(name).join(between)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extension_picks_the_format() {
        for (path, format) in [
            ("x.tach", Ok(Format::Tach)),
            ("dir.d/x", Ok(Format::Tach)),
            ("x.TACH", Ok(Format::Tach)),
            ("a.b.collapsed", Ok(Format::Collapsed)),
            ("x.folded", Ok(Format::Collapsed)),
            ("x.svg", Ok(Format::Flamegraph)),
            ("x.json", Err("json".to_owned())),
        ] {
            assert_eq!(of_path(Path::new(path)), format, "{path}");
        }
        assert!(extensions().starts_with(".tach .collapsed .prof .pb.gz "));
        let help = long_help("OUT");
        assert!(help.starts_with("Format: tach (.tach), collapsed (.collapsed .folded .txt), gperftools (.prof), "));
        assert!(help.ends_with("jsonl (.jsonl) [default: by the extension of OUT]"), "{help}");
    }
}
