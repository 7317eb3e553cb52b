//! What `record` and `top` both ask for: which processes, and how they are sampled.

use super::values;
use crate::discover::filter;
use crate::types::Pid;
use clap::{Args, ValueEnum};
use std::ffi::OsString;
use std::time::Duration;

/// Which processes.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "What to profile")]
pub struct TargetArgs {
    /// Process to profile; may be repeated
    #[arg(short, long = "pid", value_name = "PID", value_parser = values::pid)]
    pub pids: Vec<Pid>,

    /// Profile every CPython process on this machine, including those that start later
    #[arg(long, conflicts_with = "pids")]
    pub all_python: bool,

    /// Also profile the children of -p, running and future ones (always on with --all-python and -- CMD)
    #[arg(long)]
    pub subprocesses: bool,

    /// Only processes in this cgroup or below it, e.g. /system.slice/app.service
    #[arg(long = "cgroup", value_name = "PATH", value_parser = filter::cgroup_path)]
    pub cgroups: Vec<String>,

    /// Only processes in this container: its id, or at least the first 8 digits
    #[arg(long = "container", value_name = "ID", value_parser = filter::container_id)]
    pub containers: Vec<String>,

    /// Only processes whose kernel name (comm) matches this pattern, e.g. "gunicorn*"
    #[arg(long = "comm", value_name = "GLOB", value_parser = filter::comm_pattern)]
    pub comms: Vec<glob::Pattern>,

    /// Only processes of this user, by name or number
    #[arg(long = "uid", value_name = "USER", value_parser = filter::user_id)]
    pub uids: Vec<u32>,

    /// Under sudo, run -- CMD as root instead of as the user who called sudo
    #[arg(long)]
    pub as_root: bool,

    /// Program to run and profile from the start, with its children
    #[arg(last = true, value_name = "CMD", conflicts_with_all = ["pids", "all_python"])]
    pub command: Vec<OsString>,
}

/// How they are sampled.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "How")]
pub struct SamplingArgs {
    /// Samples per second of each thread's CPU time, 1 to 10000 [default: 99]
    #[arg(short = 'F', long, value_name = "HZ", value_parser = values::frequency)]
    pub frequency: Option<u32>,

    /// The same as an interval: CPU time between samples, 100us to 1s, e.g. 10ms
    #[arg(short, long, value_name = "TIME", value_parser = values::interval, conflicts_with = "frequency")]
    pub interval: Option<Duration>,

    /// Keep only samples whose thread holds the GIL
    #[arg(long)]
    pub gil: bool,

    /// Record native frames too: C, C++ and Rust code that Python calls, and that calls back into Python (the default);
    /// `--native=all` keeps what calls the outermost Python frame, too, such as `_start` or `clone3`
    #[arg(long, value_enum, value_name = "WHICH", num_args = 0..=1, require_equals = true, default_missing_value = "folded", overrides_with = "no_native")]
    pub native: Option<NativeFrames>,

    /// Record Python frames only
    #[arg(long, overrides_with = "native")]
    pub no_native: bool,

    /// Limit the profiler's own CPU use, user space and BPF together, to this percentage of one core, e.g. 1 or 0.5%;
    /// above it the sampling rate is lowered, and a message says so
    #[arg(long, value_name = "PERCENT", value_parser = values::share)]
    pub max_cpu: Option<f64>,
}

/// Which native frames are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NativeFrames {
    /// Those between and above Python frames
    Folded,
    /// Those below the outermost Python frame too
    All,
}
