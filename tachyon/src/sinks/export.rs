//! Opens the sink for a format: the same one for a recording and for `export`.

use super::firefox::FirefoxSink;
use super::flamegraph::FlamegraphSink;
use super::gperftools::GperftoolsSink;
use super::jsonl::JsonlSink;
use super::page::PageSink;
use super::page::source::SourceFiles;
use super::pprof::PprofSink;
use super::speedscope::SpeedscopeSink;
use super::{CollapsedSink, Format, RootOptions, Sink};
use crate::advice::{Advice, advises};
use std::io::Write;
use std::path::{Path, PathBuf};

/// What a sink may be asked for besides its format.
#[derive(Default)]
pub struct ExportOptions {
    /// Keep threads apart in formats that join them: gperftools, pprof, flame graphs.
    pub by_thread: bool,
    /// In the same formats, merge processes of one program.
    pub merge_processes: bool,
    /// A flame graph as a bare SVG, without its reversed view.
    pub svg: bool,
    /// The second file of a gperftools profile.
    pub companion: Option<Companion>,
    /// Make the report show what asyncio tasks await, which it otherwise leaves out.
    pub task_waits: bool,
    /// Where the report finds source text; `None`: it has none.
    pub source: Option<Box<dyn SourceFiles>>,
}

/// The file that names a gperftools profile's addresses.
pub struct Companion {
    /// Where to write it.
    pub file: Box<dyn Write + Send>,
    /// Where it will be: absolute, because readers have a working directory of their own.
    pub path: PathBuf,
}

/// Why there is no sink.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    /// A TACH file is not an export: [`super::TachSink`] writes it.
    #[error("tach files cannot go to a pipe: their header is written last")]
    Tach,
    /// A gperftools profile consists of two files.
    #[error("gperftools profiles cannot go to a pipe: a second file names their addresses")]
    NoCompanion,
}

advises!(ExportError);

impl Advice for ExportError {
    fn hint(&self) -> Option<String> {
        Some("give a file with -o".to_owned())
    }
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
    let roots = RootOptions { by_thread: options.by_thread, merge_processes: options.merge_processes };
    Ok(match format {
        Format::Tach => return Err(ExportError::Tach),
        Format::Collapsed => Box::new(CollapsedSink::new(out)),
        Format::Gperftools => {
            let Companion { file, path } = options.companion.ok_or(ExportError::NoCompanion)?;
            Box::new(GperftoolsSink::new(out, file, path, roots))
        }
        Format::Pprof => Box::new(PprofSink::new(out, roots)),
        Format::Speedscope => Box::new(SpeedscopeSink::new(out)),
        Format::Report => Box::new(PageSink::new(out).with_source(options.source).of_task_waits(options.task_waits)),
        Format::Flamegraph => Box::new(FlamegraphSink::new(out, roots, !options.svg)),
        Format::Firefox => Box::new(FirefoxSink::new(out)),
        Format::Jsonl => Box::new(JsonlSink::new(out)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Frame, Merge, Process, Profile, Sample, Thread, ThreadId};
    use crate::report::Report;
    use crate::sinks::text::is_unsafe;

    #[test]
    fn no_text_of_ours_holds_what_a_terminal_obeys() {
        let odd = "a\u{85}\u{9b}31m\u{2028}\u{202e}\u{7f}z";
        let mut profile = Profile::default();
        let process =
            Process { comm: odd.into(), cmdline: vec![odd.into()], container: odd.into(), ..Process::default() };
        profile.processes.push(Process { pid: 5, ..process });
        profile.threads.push(Thread { tid: 6, name: odd.into(), ..Thread::default() });
        let (file, function) = (profile.strings.intern(odd), profile.strings.intern(&format!("f{odd}")));
        let frame = profile.frames.intern(Frame { lineno: 3, ..Frame::without_location(file, function) });
        for format in
            [Format::Jsonl, Format::Speedscope, Format::Firefox, Format::Collapsed, Format::Report, Format::Flamegraph]
        {
            let mut out = Vec::new();
            let options = ExportOptions { by_thread: true, ..ExportOptions::default() };
            let mut sink = open(format, &mut out, options).unwrap();
            let sample =
                Sample { thread: ThreadId(0), time_us: 9, status: 1, frames: &[frame], merge: Merge::None, work: None };
            sink.sample(&profile, &sample).unwrap();
            sink.finish(&profile, &Report::default()).unwrap();
            drop(sink);
            let text = String::from_utf8(out).unwrap();
            let found = text.chars().find(|&character| is_unsafe(character) && character != '\n' && character != '\t');
            assert_eq!(found, None, "{format}");
            if format == Format::Jsonl {
                let line: serde_json::Value = serde_json::from_str(&text).unwrap();
                assert_eq!((&line["comm"], &line["thread"]), (&odd.into(), &odd.into()));
            }
        }
    }
}
