//! A host with many processes: start, memory, cost, and what it costs to leave most of them alone.

use std::fmt::Write as _;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};

use super::measure::{Bench, DEPTH, NothingSelected, SETTLE, StartPhases, WARM_HZ, sample_cost, start_phases};
use super::stats::median;
use super::target::Idle;
use super::tools::{Aim, Start, Tool, Usage};

/// Python processes while memory and start are measured.
pub(crate) const PYTHONS: usize = 50;
/// Processes on the whole machine at that time.
pub(crate) const PROCESSES: usize = 200;
/// The same on a large machine.
const MANY: usize = 2000;
/// Rates at which a host is watched for long.
const RATES_HZ: [u32; 2] = [19, 99];
/// Busy processes of which one is selected.
const BUSY: usize = 100;
/// The rate of that measurement: enough runs on two CPUs in a short time.
const FILTERED_HZ: u32 = 499;

const MIB: f64 = 1024.0 * 1024.0;

/// What was measured.
pub(crate) struct Crowd {
    /// The middle one of several starts, phase by phase, as seen from outside.
    pub(crate) start: StartPhases,
    /// The last run, which lasted as long as a cost measurement.
    pub(crate) whole: Usage,
    /// BPF time with one of a hundred busy processes selected, as a share of that with all of them selected, leaving out
    /// other programs.
    pub(crate) filtered: f64,
    /// The start's parts by the number of processes on the host, medians of several starts, as reported by the profiler.
    parts: Vec<(usize, Start)>,
    starts: usize,
    /// Nanoseconds in the kernel of a sample of the busy one, by the number of processes on the host.
    samples: Vec<(usize, f64)>,
    /// Share of a core of the profiler's process and of BPF, by rate.
    shares: Vec<(u32, f64, f64)>,
}

/// `--all-python` with 50 Python processes, one of them busy, on a machine with 200 processes and with 2,000.
pub(crate) fn crowd(bench: &Bench, nothing: NothingSelected) -> Result<Crowd> {
    eprintln!("{PYTHONS} Python processes, {PROCESSES} processes");
    let target = bench.target(DEPTH, 0)?;
    let _pythons = Idle::pythons(&bench.python, PYTHONS - 1)?;
    let _others = Idle::fill_up_to(PROCESSES)?;
    sleep(Duration::from_secs(2));
    let (phases, few) = starts(bench)?;
    let (mut shares, mut whole) = (Vec::new(), None);
    for rate_hz in RATES_HZ {
        let run = bench.begin(Tool::Native, Aim::AllPython, rate_hz)?;
        let watched = bench.watch(&run, &target, bench.effort.cost)?;
        let wall = watched.wall.as_secs_f64();
        let bpf_ns = watched.bpf.timer_ns + watched.bpf.other_ns;
        shares.push((rate_hz, watched.tool_cpu.as_secs_f64() / wall, bpf_ns as f64 / 1e9 / wall));
        whole = Some(run.finish()?);
    }
    let sample = || sample_cost(bench, &target, Tool::Tachyon, Aim::AllPython, WARM_HZ, nothing);
    let mut samples = vec![(PROCESSES, sample()?)];
    eprintln!("{MANY} processes");
    let _many = Idle::fill_up_to(MANY)?;
    sleep(Duration::from_secs(2));
    let (_, many) = starts(bench)?;
    samples.push((MANY, sample()?));
    Ok(Crowd {
        start: phases,
        whole: whole.context("at least one rate")?,
        filtered: filtered(bench)?,
        parts: vec![(PROCESSES, few), (MANY, many)],
        starts: bench.effort.starts,
        samples,
        shares,
    })
}

/// Several starts: what is seen from outside, and what the profiler reports about itself.
fn starts(bench: &Bench) -> Result<(StartPhases, Start)> {
    let (mut phases, mut parts) = (Vec::new(), Vec::new());
    for _ in 0..bench.effort.starts {
        let mut run = bench.tools.start(Tool::Native, Aim::AllPython, RATES_HZ[1])?;
        phases.push(start_phases(&mut run, Duration::from_millis(1))?);
        sleep(SETTLE);
        parts.push(run.finish()?.report.context("the profiler writes a report")?.cost.start);
    }
    let seen = |of: fn(&StartPhases) -> f64| median(&phases.iter().map(of).collect::<Vec<_>>()).unwrap_or(0.0);
    let told = |of: fn(&Start) -> f64| median(&parts.iter().map(of).collect::<Vec<_>>()).unwrap_or(0.0);
    let phases = StartPhases {
        types_ms: seen(|phases| phases.types_ms),
        loaded_ms: seen(|phases| phases.loaded_ms),
        attached_ms: seen(|phases| phases.attached_ms),
        first_run_ms: seen(|phases| phases.first_run_ms),
    };
    let parts = Start {
        machine_s: told(|parts| parts.machine_s),
        types_s: told(|parts| parts.types_s),
        maps_s: told(|parts| parts.maps_s),
        programs_s: told(|parts| parts.programs_s),
        processes_s: told(|parts| parts.processes_s),
        attach_s: told(|parts| parts.attach_s),
        total_s: told(|parts| parts.total_s),
    };
    Ok((phases, parts))
}

/// A hundred busy processes, as deep as the target elsewhere, all of them recorded and one of them: what a run costs in the
/// second case by what it costs in the first, on a host where nothing but the hundred runs. Runs that met other programs
/// are removed from both: they cost as much as a run with nothing selected, and would inflate the share of one.
fn filtered(bench: &Bench) -> Result<f64> {
    eprintln!("one of {BUSY} busy processes");
    let needle = bench.tools.work.path().join("needle");
    std::os::unix::fs::symlink(&bench.python, &needle).context("cannot make a link")?;
    let _hay = Idle::busy(&bench.python, DEPTH, BUSY - 1)?;
    let _needle = Idle::busy(&needle, DEPTH, 1)?;
    let target = bench.target(DEPTH, 0)?;
    sleep(Duration::from_secs(3));
    let runs = |aim| -> Result<Runs> {
        let run = bench.begin(Tool::Native, aim, FILTERED_HZ)?;
        let bpf = bench.watch(&run, &target, bench.effort.cost)?.bpf;
        let report = run.finish()?.report.context("the profiler writes a report")?;
        Ok(Runs {
            mean_ns: bpf.timer_ns as f64 / bpf.timer_runs.max(1) as f64,
            selected: report.stored as f64 / report.ran.max(1) as f64,
        })
    };
    share_of_one(&runs(Aim::AllPython)?, &runs(Aim::Named("needle*"))?).context("no run met a selected process")
}

/// Runs of the timer's program.
struct Runs {
    mean_ns: f64,
    /// Share of them that met a selected process.
    selected: f64,
}

/// Both means are made up of the costs of runs that meet a selected process and of runs that do not; from them follows
/// what a run costs with one of [`BUSY`] selected, divided by what it costs with all of them.
fn share_of_one(all: &Runs, one: &Runs) -> Option<f64> {
    // mean = other + selected * (sample - other), twice.
    let more = (all.mean_ns - one.mean_ns) / (all.selected - one.selected);
    let other = one.mean_ns - one.selected * more;
    let sample = other + more;
    (more.is_finite() && sample > 0.0).then(|| (other + more / BUSY as f64) / sample)
}

impl Crowd {
    /// The section of the page.
    pub(crate) fn describe(&self, page: &mut String) {
        let Self { start, whole, filtered, parts, starts, samples, shares } = self;
        let _ = write!(
            page,
            "\n## Start and memory\n\n`--all-python` at {} Hz with {PYTHONS} Python processes, one of them busy, on a \
             machine with {PROCESSES} processes; median of {starts} starts, watched from outside every millisecond.\n\n\
             | from the start until | ms |\n|---|---:|\n\
             | the first map exists (program start, kernel types) | {:.0} |\n\
             | the programs are loaded | {:.0} |\n\
             | processes are found and inspected, the timer is attached | {:.0} |\n\
             | the timer's program ran | {:.0} |\n\n\
             The parts as the profiler reports them (`cost.start` in the report). They follow one another, except that processes \
             are inspected while the verifier runs:\n\n\
             | processes on the host | can it profile? | kernel's types | object, maps | verifier | beside it processes | \
             output, threads, event | all, ms |\n|---:|---:|---:|---:|---:|---:|---:|---:|\n",
            RATES_HZ[1], start.types_ms, start.loaded_ms, start.attached_ms, start.first_run_ms,
        );
        for (processes, part) in parts {
            let seconds = [
                part.machine_s,
                part.types_s,
                part.maps_s,
                part.programs_s,
                part.processes_s,
                part.attach_s,
                part.total_s,
            ];
            let cells: Vec<String> = seconds.iter().map(|seconds| format!("{:.0}", seconds * 1e3)).collect();
            let _ = writeln!(page, "| {processes} | {} |", cells.join(" | "));
        }
        let _ = writeln!(
            page,
            "\nA sample of {DEPTH} frames in the kernel, with `--all-python` at {WARM_HZ} Hz and only Python frames:{}.",
            samples
                .iter()
                .map(|(processes, ns)| format!(" {:.1} µs with {processes} processes on the host", ns / 1e3))
                .collect::<Vec<_>>()
                .join(",")
        );
        let _ =
            write!(page, "\nWhat the profiler costs on that machine, with {PROCESSES} processes, while it samples:");
        for (rate_hz, process, bpf) in shares {
            let _ = write!(
                page,
                " at {rate_hz} Hz, {:.3} % of a core, including {:.3} % in BPF;",
                (process + bpf) * 100.0,
                bpf * 100.0
            );
        }
        let _ = writeln!(
            page,
            " a run of the timer's program with one of {BUSY} busy processes of {DEPTH} frames selected (`--comm`, \
             {FILTERED_HZ} Hz, with native frames) takes {:.1} % of the time of one with all of them selected, if nothing else runs.",
            filtered * 100.0
        );
        if let Some(report) = &whole.report {
            let _ = write!(
                page,
                "\nPeak RSS {:.1} MiB, maps {:.1} MiB, including {:.1} MiB for the sample ring. BPF statistics: {}.\n",
                whole.peak_rss_bytes as f64 / MIB,
                report.cost.map_bytes as f64 / MIB,
                report.cost.ring_bytes as f64 / MIB,
                report.cost.bpf_stats,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_programs_do_not_count() {
        // 10 µs a sample and 0.2 µs a run that meets something else: (0.2 + 0.098) / 10.
        let runs = |selected: f64| Runs { mean_ns: 200.0 + selected * 9_800.0, selected };
        for (all, one) in [(1.0, 0.01), (0.4, 0.01), (0.4, 0.002)] {
            let share = share_of_one(&runs(all), &runs(one)).expect("some were selected");
            assert!((share - 0.0298).abs() < 1e-9, "{all} {one}: {share}");
        }
        assert_eq!(share_of_one(&runs(0.0), &runs(0.0)).map(f64::to_bits), None);
    }
}
