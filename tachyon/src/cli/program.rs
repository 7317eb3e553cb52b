//! The program `tachyon-bpf`: maps the outcome to a message and an exit status.
//!
//! 0 a profile was written (or what was asked for was shown), 1 could not profile, 2 usage; with `-- CMD` the command's own status.

use super::args::{self, ExportArgs, MergeArgs, NoVerb, RecoverArgs, Verb};
use super::events::AskedEvent;
use super::failure::{self, STATUS_FAILED};
use super::output::{self, Destination, OutputError, OutputFile};
use super::plan::{self, Plan, Surroundings};
use super::table::Style;
use super::{agent, diff, doctor, dump, events, export, info, record, recover, report, symbolize, top, watch};
use crate::profile::TASK_WAIT;
use crate::sinks::export::ExportOptions;
use std::io::{self, Write};
use std::process::ExitCode;

/// Runs the command line of this process; called once, by `main`.
pub fn main() -> ExitCode {
    output::refuse_instead_of_signal();
    let outcome = match args::parse(std::env::args_os()) {
        Ok(verb) => run(verb),
        Err(NoVerb::Shown(text)) => {
            // A closed pipe is not an error.
            let _ = text.print();
            Ok(0)
        }
        Err(NoVerb::Usage(failure)) => Err(failure.into()),
    };
    ExitCode::from(match outcome {
        Ok(status) => status,
        // A reader that went away (`| head`) has what it wanted.
        Err(error) if failure::is_closed_pipe(&error) => 0,
        Err(error) => failure::show(&error, &mut io::stderr()),
    })
}

/// Runs a verb to its end and returns the exit status.
fn run(verb: Verb) -> anyhow::Result<u8> {
    match verb {
        Verb::Record(args) if args.events.contains(&AskedEvent::List) => {
            let mut out = io::BufWriter::new(StandardOutput::lock());
            events::list(&crate::kernel::events(), Style::of_stdout(), &mut out)?;
            out.flush()?;
            Ok(0)
        }
        Verb::Record(args) => {
            let outcome = record::run(&Plan::new(*args, &Surroundings::current())?)?;
            Ok(outcome.command.map_or(0, super::command::CommandStatus::exit_status))
        }
        Verb::Export(args) => run_export(&args).map(|()| 0),
        Verb::Merge(args) => run_merge(&args).map(|()| 0),
        Verb::Recover(args) => run_recover(&args).map(|()| 0),
        Verb::Info(args) => {
            let _watch = watch::over(&args.files, args.force_large, "read");
            let mut out = io::BufWriter::new(StandardOutput::lock());
            info::run(&args, &mut out)?;
            out.flush()?;
            Ok(0)
        }
        Verb::Report(args) => {
            let _watch = watch::over(&args.files, args.force_large, "read");
            report::run(&args, &mut io::BufWriter::new(StandardOutput::lock()))?;
            Ok(0)
        }
        Verb::Diff(args) => {
            let (before, after) = args.sides()?;
            let inputs = [before, after].map(<[_]>::to_vec).concat();
            let _watch = watch::over(&inputs, args.force_large, "compare");
            diff::run(&args, &mut io::BufWriter::new(StandardOutput::lock()))
        }
        Verb::Top(args) => top::run(&args, &mut io::BufWriter::new(StandardOutput::lock())),
        Verb::Agent(args) => agent::run(&args, &mut StandardOutput::lock()).map(|()| 0),
        Verb::Symbolize(args) => symbolize::run(&args, &mut io::stderr()).map(|()| 0),
        Verb::Dump(args) => {
            dump::run(&args, &mut io::BufWriter::new(StandardOutput::lock()))?;
            Ok(0)
        }
        Verb::Man => {
            args::write_man(&mut StandardOutput::lock())?;
            Ok(0)
        }
        Verb::Completions(wanted) => {
            // Through a buffer: the generator assumes that a pipe is never closed.
            let mut text = Vec::new();
            args::write_completions(wanted.shell, &mut text)?;
            StandardOutput::lock().write_all(&text)?;
            Ok(0)
        }
        Verb::Doctor(args) => {
            let diagnosis = doctor::diagnose(doctor::running_interpreters(&args.pids));
            let asked_for = !args.pids.is_empty();
            let mut out = io::BufWriter::new(StandardOutput::lock());
            if args.json {
                doctor::write(&diagnosis, &mut out)?;
            } else {
                doctor::show(&diagnosis, args.verbose || asked_for, &mut out)?;
            }
            out.flush()?;
            Ok(if diagnosis.is_well(asked_for) { 0 } else { STATUS_FAILED })
        }
    }
}

/// Standard output, whose errors say that they come from it.
struct StandardOutput(io::StdoutLock<'static>);

impl StandardOutput {
    fn lock() -> Self {
        Self(io::stdout().lock())
    }

    fn told(error: io::Error) -> io::Error {
        io::Error::new(error.kind(), OutputError::Stdout(error))
    }
}

impl Write for StandardOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(Self::told)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(Self::told)
    }
}

fn run_export(args: &ExportArgs) -> anyhow::Result<()> {
    let plan = plan::export_output(args, &Surroundings::current())?;
    let merge_processes = args.merge.wanted(plan.format)?;
    let output = OutputFile::create(&plan.destination, plan.force)?;
    let mut file = output.try_clone_file()?;
    let (companion_output, companion) = plan.create_companion(None)?.unzip();
    let source = args.source.then(super::source::Files::of_this_machine);
    let task_waits = args.event.as_deref() == Some(TASK_WAIT);
    let (by_thread, svg) = (args.threads, plan.is_svg());
    let options = ExportOptions { by_thread, merge_processes, svg, companion, task_waits, source };
    let wanted = export::Wanted::from(args);
    let watch = watch::over(&args.inputs, args.force_large, "export");
    let done = export::run_many(&args.inputs, export::Output::File(&mut file), plan.format, options, wanted)?;
    drop(watch);
    tell(&done.notes);
    if let Some(companion) = companion_output {
        companion.commit()?;
    }
    Ok(output.commit()?)
}

fn run_merge(args: &MergeArgs) -> anyhow::Result<()> {
    let plan = plan::merge_output(args)?;
    let output = OutputFile::create(&plan.destination, plan.force)?;
    let mut file = output.try_clone_file()?;
    let wanted = export::Wanted { force_large: args.force_large, ..export::Wanted::default() };
    let options = ExportOptions::default();
    let watch = watch::over(&args.inputs, args.force_large, "merge");
    let done = export::run_many(&args.inputs, export::Output::File(&mut file), plan.format, options, wanted)?;
    drop(watch);
    tell(&done.notes);
    Ok(output.commit()?)
}

/// Prints notes for the user. Standard error may be closed: that does not matter.
fn tell(notes: &[String]) {
    for note in notes {
        let _closed = writeln!(io::stderr(), "{}", super::escape::escape(note));
    }
}

fn run_recover(args: &RecoverArgs) -> anyhow::Result<()> {
    let output = OutputFile::create_recovered(&Destination::from_argument(args.output.clone()), args.force)?;
    let mut file = output.try_clone_file()?;
    let inputs = [args.input.clone()];
    let watch = watch::over(&inputs, args.force_large, "recover");
    let recovered = recover::run_at_any_cost(&args.input, args.journal.as_deref(), &mut file, args.force_large)?;
    drop(watch);
    output.commit()?;
    // Standard error may be closed: the file is written all the same.
    let _closed = writeln!(
        io::stderr(),
        "recovered {} samples of {} threads from {}",
        recovered.samples,
        recovered.threads,
        args.input.display()
    );
    if recovered.live {
        let _closed = writeln!(io::stderr(), "it is still being recorded: this is a snapshot");
    }
    if let Some(why) = &recovered.lost_tail {
        let _closed = writeln!(io::stderr(), "the newest samples are not among them: {why}");
    }
    if recovered.cut {
        let _closed = writeln!(
            io::stderr(),
            "its last sample is of {:.3} s after the start: what came later, and what was lost before, is unknown",
            recovered.recorded.as_secs_f64()
        );
    }
    Ok(())
}
