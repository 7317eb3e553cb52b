//! Opens the sink of a format: the same one for a recording and for `export`.

use super::firefox::FirefoxSink;
use super::flamegraph::FlamegraphSink;
use super::gperftools::GperftoolsSink;
use super::jsonl::JsonlSink;
use super::pprof::PprofSink;
use super::speedscope::SpeedscopeSink;
use super::{CollapsedSink, Format, Sink};
use std::io::Write;
use std::path::{Path, PathBuf};

/// What a sink may be asked for beside its format.
#[derive(Default)]
pub struct ExportOptions {
    /// Threads stay apart in formats that join them: gperftools, pprof, flame graphs.
    pub by_thread: bool,
    /// A flame graph as a bare SVG, without its reversed view.
    pub svg: bool,
    /// The second file of a gperftools profile.
    pub companion: Option<Companion>,
}

/// The file that names a gperftools profile's addresses.
pub struct Companion {
    /// Where to write it.
    pub file: Box<dyn Write + Send>,
    /// Where it will lie: absolute, because readers have a working directory of their own.
    pub path: PathBuf,
}

/// Why there is no sink.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    /// A TACH file is no export: [`super::TachSink`] writes it.
    #[error("tach files cannot go to a pipe: their header is written last")]
    Tach,
    /// A gperftools profile is two files.
    #[error("gperftools profiles cannot go to a pipe: a second file names their addresses")]
    NoCompanion,
}

impl ExportError {
    /// What to do next.
    pub const HINT: &str = "give a file with -o";
}

impl ExportOptions {
    /// Whether the name of a flame graph asks for a bare SVG.
    #[must_use]
    pub fn svg_wanted(path: &Path) -> bool {
        path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("svg"))
    }
}

/// The sink that writes `format` to `out`.
///
/// # Errors
/// When the format needs more than an output that only goes forward.
pub fn open<'a, W: Write + Send + 'a>(
    format: Format,
    out: W,
    options: ExportOptions,
) -> Result<Box<dyn Sink + Send + 'a>, ExportError> {
    Ok(match format {
        Format::Tach => return Err(ExportError::Tach),
        Format::Collapsed => Box::new(CollapsedSink::new(out)),
        Format::Gperftools => {
            let Companion { file, path } = options.companion.ok_or(ExportError::NoCompanion)?;
            Box::new(GperftoolsSink::new(out, file, path, options.by_thread))
        }
        Format::Pprof => Box::new(PprofSink::new(out, options.by_thread)),
        Format::Speedscope => Box::new(SpeedscopeSink::new(out)),
        Format::Flamegraph => Box::new(FlamegraphSink::new(out, options.by_thread, !options.svg)),
        Format::Firefox => Box::new(FirefoxSink::new(out)),
        Format::Jsonl => Box::new(JsonlSink::new(out)),
    })
}
