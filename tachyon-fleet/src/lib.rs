//! tachyon-fleet: what `tachyon-bpf` recorded on many hosts, in a form that common query engines can read.
//!
//! It runs as an ordinary user without capabilities, and only shares files with the profiler. Data flows from [`segment`] (a TACH file with
//! its account, counted) through [`rows`] to [`tables`] (files of four Parquet tables), and back through [`load`] and [`restore`];
//! [`convert`] is the command. [`questions`] about tables are answered by [`top`], and by engines in [`sql`].

mod args;
pub mod columns;
pub mod compact;
pub mod compare;
pub mod convert;
pub mod facts;
mod failure;
pub mod hash;
pub mod lake;
pub mod load;
pub mod net;
pub mod page;
pub mod place;
pub mod questions;
pub mod regressions;
pub mod restore;
pub mod rows;
pub mod segment;
pub mod ship;
pub mod sql;
pub mod tables;
pub mod timeline;
pub mod top;

use args::{CommandLine, Verb};
use std::ffi::OsString;
use std::io::{self, Write as _};
use std::process::ExitCode;

/// Runs the command line of this process; called once, by `main`.
pub fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let outcome = match args::parse(words) {
        Ok(line) => run(line),
        Err(error) if !error.use_stderr() => {
            // Help. A closed pipe is not an error.
            let _ = error.print();
            Ok(())
        }
        Err(error) => Err(failure::usage(&error).into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        // A reader that went away (`| head`) has what it wanted.
        Err(error) if failure::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => ExitCode::from(failure::show(&error, &mut io::stderr())),
    }
}

fn run(line: CommandLine) -> anyhow::Result<()> {
    match line.verb {
        Verb::Ship(args) => ship::run(&args, &mut io::stdout()),
        Verb::Convert(args) => convert::run(&args, &mut io::stderr()),
        Verb::Top(args) => whole(|out| top::run(&args, out)),
        Verb::Diff(args) => whole(|out| regressions::run_diff(&args, out)),
        Verb::Regressions(args) => whole(|out| regressions::run(&args, out)),
        Verb::Page(args) => page::run(&args, &mut io::stderr()),
        Verb::Sql(args) => whole(|out| sql::run(&args, out)),
    }
}

/// Runs a command that writes to standard output, and flushes to the last byte.
fn whole(write: impl FnOnce(&mut dyn io::Write) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    write(&mut out)?;
    Ok(out.flush()?)
}
