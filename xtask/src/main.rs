//! Developer tasks: builds the BPF object, generates layouts, sets up the interpreters and kernels that tests need.
//!
//! `cargo xtask <verb>`. A verb first says what it installs or downloads. Outside the project it only writes to the
//! cache directory (`$TACHYON_CACHE`, or else `~/.cache/tachyon-bpf`) and installs the packages and toolchains it names.

mod account;
mod apt;
mod bench;
mod bpf;
mod cache;
mod command;
mod dependencies;
mod differences;
mod digest;
mod docs;
mod flakes;
mod fleet;
mod fuzz;
mod layouts;
mod manifests;
mod miri;
mod oracle;
mod package;
mod page;
mod programs;
mod snapshots;
mod test;
mod tools;
mod vm;
mod zoo;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Developer tasks of tachyon-bpf.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build the BPF object, or compare the committed one with its sources
    #[command(subcommand)]
    Bpf(bpf::BpfCommand),
    /// Bundle the page of the HTML report, or compare the committed one with its sources
    #[command(subcommand)]
    Page(page::PageCommand),
    /// Generate the interpreter layouts of CPython versions that publish none
    Layouts(layouts::LayoutsArgs),
    /// Write the pages that are made from runs, or check that they are not too old
    #[command(subcommand)]
    Docs(docs::DocsCommand),
    /// Set up the interpreters that tests profile, and list them
    Zoo(zoo::ZooArgs),
    /// Boot other kernels in QEMU and profile a live interpreter on each
    VmTest(vm::VmTestArgs),
    /// Measure what profiling costs, beside py-spy, and compare it with the budget
    Bench(bench::BenchArgs),
    /// Try `diff`'s statistics on pairs drawn from recordings of real programs
    Differences(differences::DifferencesArgs),
    /// Profile a busy host for ten minutes: memory stays flat, the account adds up
    Soak(bench::soak::SoakArgs),
    /// Compare tens of thousands of stacks of each kind of work with what their programs tell
    Oracle(oracle::OracleArgs),
    /// Ask a fleet of a thousand hosts, made from real segments, what fleets are asked, on every engine
    Fleet(fleet::FleetArgs),
    /// Profile what people really run, beside py-spy, and write how well: servers, workers, libraries, short programs
    Programs(programs::ProgramsArgs),
    /// Record the snapshots of interpreters that tests walk
    Snapshots(snapshots::SnapshotsArgs),
    /// Make release archives and Debian packages for x86-64 and arm64 and a wheel, and try them out
    Package(package::PackageArgs),
    /// Validate the Kubernetes manifests, and compare what they ask for with docs/privileges.md
    Manifests,
    /// Set up the programs that judge exports: pprof, a browser, the viewers' importers; and a server to profile
    Tools,
    /// Fuzz the decoders of whole files and records, led by coverage
    Fuzz(fuzz::FuzzArgs),
    /// Run the walk, and decoders with unsafe code, in Miri
    Miri(miri::MiriArgs),
    /// Compare licences, versions and sources of all dependencies with deny.toml
    Dependencies,
    /// Set up what the tests need and run all of them, the live ones too
    Test(test::TestArgs),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().task {
        Task::Bpf(command) => bpf::run(command),
        Task::Page(command) => page::run(&command),
        Task::Layouts(args) => layouts::run(args),
        Task::Docs(command) => docs::run(command),
        Task::Zoo(args) => zoo::run(args),
        Task::VmTest(args) => vm::run(args),
        Task::Bench(args) => bench::run(args),
        Task::Differences(args) => differences::run(&args),
        Task::Soak(args) => bench::soak::run(args),
        Task::Oracle(args) => oracle::run(&args),
        Task::Fleet(args) => fleet::run(&args),
        Task::Programs(args) => programs::run(&args),
        Task::Snapshots(args) => snapshots::run(&args),
        Task::Package(args) => package::run(args),
        Task::Manifests => manifests::run(),
        Task::Tools => tools::set_up(),
        Task::Fuzz(args) => fuzz::run(&args),
        Task::Miri(args) => miri::run(&args),
        Task::Dependencies => dependencies::run(),
        Task::Test(args) => test::run(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
