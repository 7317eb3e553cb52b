//! `--split process`: a directory with one file for each process.

use super::{More, Outputs, commit, export_sink, tach_sink};
use crate::cli::output::{Destination, OutputDirectory, OutputFile, OutputPlan, WHOLE};
use crate::cli::plan::Plan;
use crate::profile::{Process, Profile};
use crate::sinks::split::{ProcessFiles, SplitSink};
use crate::sinks::{Format, Sink};
use std::collections::HashSet;
use std::io;
use std::sync::Arc;

/// Creates the directory, in it the file that holds the recording while it runs, and the sink.
pub(super) fn open(plan: &Plan, profile: &Profile, more: More) -> anyhow::Result<(Outputs, Box<dyn Sink + Send>)> {
    let Destination::Path(path) = &plan.output.destination else {
        unreachable!("the plan refuses --split with standard output")
    };
    let directory = Arc::new(OutputDirectory::create(path, plan.output.force)?);
    let output = OutputPlan { destination: Destination::Path(path.join(WHOLE)), format: Format::Tach, force: false };
    let mut first = directory.create_file(WHOLE.as_ref())?;
    let mut whole = tach_sink(plan, &output, Some(&directory), &first, &more, &profile.meta)?;
    if let Some((journal, tail)) = first.create_journal()? {
        whole = whole.with_journal(journal, tail, profile)?;
    }
    let files = Files { plan: plan.clone(), directory: Arc::clone(&directory), names: HashSet::new(), open: None };
    let sink = SplitSink::new(Box::new(whole), directory.unnamed_file()?, files);
    Ok((Outputs { first, more, directory: Some(directory) }, Box::new(sink)))
}

/// The processes' files, one open at a time.
struct Files {
    plan: Plan,
    directory: Arc<OutputDirectory>,
    /// Names given out: a pid may have been reused.
    names: HashSet<String>,
    open: Option<(OutputFile, More)>,
}

impl ProcessFiles for Files {
    fn open(&mut self, process: &Profile, lost_percent: Option<f64>) -> io::Result<Box<dyn Sink + Send>> {
        self.create(process, lost_percent).map_err(|error| match error.downcast() {
            Ok(error) => error,
            Err(error) => io::Error::other(format!("{error:#}")),
        })
    }

    fn close(&mut self) -> io::Result<()> {
        let Some((first, more)) = self.open.take() else { return Ok(()) };
        commit(first, &more).map_err(io::Error::other)
    }

    fn tell_work(&self) -> bool {
        matches!(self.plan.output.format, Format::Jsonl | Format::Pprof)
    }

    fn are_gone(&self) -> bool {
        self.directory.is_gone()
    }
}

impl Files {
    fn create(&mut self, process: &Profile, lost_percent: Option<f64>) -> anyhow::Result<Box<dyn Sink + Send>> {
        let format = self.plan.output.format;
        let name = self.name(&process.processes[0], format.extension());
        let path = self.directory.path().join(name);
        let (first, more) = (self.directory.create_file(&path)?, More::default());
        let output = OutputPlan { destination: Destination::Path(path), format, force: false };
        let sink = match format {
            Format::Tach => Box::new(
                tach_sink(&self.plan, &output, Some(&self.directory), &first, &more, &process.meta)?
                    .with_lost_percent(lost_percent),
            ),
            _ => export_sink(&self.plan, &output, Some(&self.directory), &first, &more)?,
        };
        self.open = Some((first, more));
        Ok(sink)
    }

    /// `4242-gunicorn.tach`, and `4242-gunicorn-2.tach` if the pid was reused.
    fn name(&mut self, process: &Process, extension: &str) -> String {
        // A program's name must not become a path, an option or a control character.
        let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
        let comm: String = process.comm.chars().map(plain).collect();
        let mut name = format!("{}-{comm}.{extension}", process.pid);
        for number in 2_u64.. {
            if !self.names.contains(&name) {
                break;
            }
            name = format!("{}-{comm}-{number}.{extension}", process.pid);
        }
        self.names.insert(name.clone());
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::{self, Verb};
    use crate::cli::output::OutputError;
    use crate::cli::plan::Surroundings;
    use crate::profile::{FrameId, Merge, Sample, Thread, ThreadId};
    use crate::report::{ProcessReport, Report};
    use crate::sinks::metadata::Metadata;
    use crate::tach::Reader;
    use std::fs::{self, File};
    use std::path::Path;

    fn plan(path: &Path, more: &[&str]) -> Plan {
        let words = ["tachyon-bpf", "--all-python", "--split", "process", "-o", path.to_str().unwrap()];
        let words = words.iter().chain(more).map(std::ffi::OsString::from);
        let Ok(Verb::Record(args)) = args::parse(words) else { panic!("a recording") };
        Plan::new(*args, &Surroundings::current()).unwrap()
    }

    /// Three processes, of which two have the same pid, and the first two threads the same id in their own namespace.
    fn record(plan: &Plan) -> (Outputs, Box<dyn Sink + Send>, Profile, Report) {
        let mut profile = Profile::default();
        profile.meta.many_processes = true;
        profile.meta.interval_us = 10_000;
        profile.meta.start_us = 5;
        for (index, comm) in (0..).zip(["a/../b\n", "web", "web"]) {
            let version = format!("3.{}.1", 11 + index);
            let pid = if index == 0 { 10 } else { 20 };
            profile.processes.push(Process { pid, comm: comm.into(), python_version: version, ..Process::default() });
            let tid = 100 + index;
            let thread = Thread { process: index, tid, unique_tid: tid.into(), ns_tid: tid / 102, ..Thread::default() };
            profile.threads.push(thread);
        }
        let frames: Vec<FrameId> = (0..400).map(|n| profile.special_frame(&format!("f{n}"))).collect();
        let (outputs, mut sink) = Outputs::open(plan, &profile).unwrap();
        let mut counts = [0; 3];
        for number in 0..600_u32 {
            let thread = number % 7 % 3;
            // Now and then deeper than a TACH file's stacks.
            let frames = &frames[(number as usize * 13) % 250..][..if number % 50 == 0 { 150 } else { 3 }];
            let (time_us, status) = (1000 + u64::from(number), (number % 64) as u8);
            sink.sample(
                &profile,
                &Sample { thread: ThreadId(thread), time_us, status, frames, merge: Merge::None, work: None },
            )
            .unwrap();
            counts[thread as usize] += 1;
            if number % 100 == 0 {
                sink.tick(&profile).unwrap();
            }
        }
        let process = |samples| ProcessReport { samples, cpu_s: Some(3.0), ..ProcessReport::default() };
        let report = Report {
            ran: 700,
            stored: 600,
            idle: 60,
            filtered: 10,
            loss: [("ring_full".to_owned(), 30)].into(),
            rate_hz: 200.0,
            effective_rate_hz: 100.0,
            processes: counts.map(process).to_vec(),
            ..Report::default()
        };
        (outputs, sink, profile, report)
    }

    fn names(path: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn each_process_has_a_file_that_stands_for_itself() {
        let around = tempfile::tempdir().unwrap();
        let path = around.path().join("d");
        let plan = plan(&path, &[]);
        let (outputs, mut sink, profile, report) = record(&plan);
        let running = ["recording.tach.part", "recording.tach.part.journal", "recording.tach.part.tail"];
        assert_eq!(names(&around.path().join("d.part")), running);
        sink.finish(&profile, &report).unwrap();
        outputs.commit(plan.output.format).unwrap();
        assert_eq!(names(around.path()), ["d"]);
        let files = ["10-a_.._b_.tach", "20-web-2.tach", "20-web.tach"];
        assert_eq!(names(&path), files);
        let mut sum = 0;
        for (name, process) in files.into_iter().zip([0, 2, 1]) {
            let mut reader = Reader::new(File::open(path.join(name)).unwrap()).unwrap();
            assert_eq!(reader.header().python_version, [3, 11 + process, 1]);
            let metadata = Metadata::find(reader.tables()).unwrap();
            assert!(!metadata.many_processes && metadata.processes.len() == 1 && metadata.threads.len() == 1);
            let own = &metadata.report;
            let loss: u64 = own.loss.values().sum();
            assert_eq!(own.ran, own.stored + own.idle + own.filtered + own.not_python + loss);
            assert_eq!((own.expected, own.not_fired), (Some(300), Some(300 - own.stored.min(300))));
            assert_eq!(reader.statistics().unwrap().error_rate, Some(30.0 * 100.0 / 630.0));
            let mut samples = reader.samples().unwrap();
            let mut stored = 0;
            while let Some(sample) = samples.next_sample().unwrap() {
                assert_eq!(sample.thread_id, if process == 2 { 1 } else { 100 + u64::from(process) });
                assert_eq!(sample.frames.len(), if (sample.timestamp_us - 1000) % 50 == 0 { 150 } else { 3 });
                stored += 1;
            }
            assert_eq!((stored, stored), (own.stored, report.processes[usize::from(process)].samples));
            sum += stored;
        }
        assert_eq!(sum, report.stored);
    }

    #[test]
    fn other_formats_and_their_companions() {
        let around = tempfile::tempdir().unwrap();
        let path = around.path().join("d");
        let plan = plan(&path, &["--format", "gperftools"]);
        let (outputs, mut sink, profile, report) = record(&plan);
        sink.finish(&profile, &report).unwrap();
        outputs.commit(plan.output.format).unwrap();
        let found = names(&path);
        assert_eq!(found.len(), 6, "{found:?}");
        let bytes = fs::read(path.join("10-a_.._b_.prof")).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        let companion = found.iter().find(|name| name.starts_with("10-") && !name.ends_with(".prof")).unwrap();
        assert!(text.contains(path.join(companion).to_str().unwrap()), "the profile names its companion's last place");
    }

    #[test]
    fn what_is_cut_can_be_recovered_as_a_whole() {
        let around = tempfile::tempdir().unwrap();
        let path = around.path().join("d");
        let (outputs, mut sink, profile, _) = record(&plan(&path, &[]));
        sink.tick(&profile).unwrap();
        let kept = outputs.keep();
        drop(sink);
        let part = around.path().join("d.part");
        assert_eq!(kept, [part.join("recording.tach.part")]);
        let mut good = io::Cursor::new(Vec::new());
        let recovered = crate::cli::recover::run(&kept[0], None, &mut good).unwrap();
        assert_eq!((recovered.samples, recovered.threads), (600, 3));
    }

    #[test]
    fn of_a_directory_that_was_removed_the_whole_recording_is_left() {
        let around = tempfile::tempdir().unwrap();
        let path = around.path().join("d");
        let plan = plan(&path, &[]);
        let (outputs, mut sink, profile, report) = record(&plan);
        fs::remove_dir_all(around.path().join("d.part")).unwrap();
        sink.finish(&profile, &report).unwrap();
        let error = outputs.commit(plan.output.format).unwrap_err();
        let OutputError::Gone { path, kept: Ok(kept) } = error else { panic!("{error:?}") };
        assert_eq!(path, around.path().join("d.part/recording.tach"));
        assert!(names(around.path()).is_empty());
        let mut reader = Reader::new(File::open(&kept).unwrap()).unwrap();
        fs::remove_file(kept).unwrap();
        assert_eq!(Metadata::find(reader.tables()).unwrap().processes.len(), 3);
        let mut samples = reader.samples().unwrap();
        while samples.next_sample().unwrap().is_some() {}
        assert_eq!(samples.records().samples(), report.stored);
    }
}
