//! What the profiler takes of a machine that has hardly anything to do: energy where the processors count theirs, and how often it
//! wakes, which stands for it where they do not.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::STEADY;
use crate::bench::measure::{Bench, DEPTH, RATES_HZ};
use crate::bench::stats::Interval;
use crate::bench::target::{Shape, Target};
use crate::bench::tools::{Aim, Tool};

/// Where the kernel shows the processors' counters (Documentation/power/powercap/powercap.rst).
const POWERCAP: &str = "/sys/class/powercap";
/// Within this time each counter has gone on: they are renewed every millisecond.
const GOES_ON: Duration = Duration::from_millis(500);
/// More pairs would take too long.
const MOST_PAIRS: usize = 8;

/// The page's sentences.
///
/// # Errors
/// A profiler failed, or a counter could not be read any more.
pub(super) fn sentences(bench: &Bench, quick: bool) -> Result<String> {
    let [rate_hz, _] = RATES_HZ;
    let shape = Shape { whose: "pauses", ..Shape::deep(DEPTH) };
    let target = Target::start(&bench.ordinary(), bench.cpu, shape)?;
    let wakeups = |tool: Tool| -> Result<f64> {
        eprintln!("{} at {rate_hz} Hz beside a process that hardly works", tool.name());
        Ok(bench.cost_after(STEADY, tool, Aim::Pid(target.pid()), rate_hz, &target)?.wakeups_a_second)
    };
    let (ours, theirs) = (wakeups(Tool::Native)?, wakeups(Tool::PySpy)?);
    let idle = format!(
        "Beside one Python process that works a tenth of the time, the profiler wakes {ours:.1} times a second at {rate_hz} Hz (py-spy \
         {theirs:.1} times)."
    );
    let Some(meter) = Meter::of(Path::new(POWERCAP)).filter(Meter::goes_on) else {
        return Ok(format!(
            "\n{idle} That stands for energy, which this machine does not tell (no readable package of `{POWERCAP}/intel-rapl:N`).\n"
        ));
    };
    let pairs = if quick { 2 } else { bench.effort.pairs.min(MOST_PAIRS) };
    let Drawn { without, more } = drawn(bench, &meter, &target, rate_hz, pairs)?;
    let [low, high] = [more.mean - more.half, more.upper()];
    Ok(format!(
        "\n{idle} Meanwhile the processors ({}) take {:.2} J a second without the profiler, and {:+.3} J with it \
         (95 % interval {low:+.3} to {high:+.3}; {} windows of {} s with it, each between two without).\n",
        meter.named(),
        without.mean,
        more.mean,
        more.count,
        bench.effort.cost.as_secs_f64(),
    ))
}

/// Joules a second.
struct Drawn {
    without: Interval,
    /// What comes on top with the profiler.
    more: Interval,
}

/// Windows with the profiler between windows without: each is compared with the mean of the two beside it, which removes slow drifts.
fn drawn(bench: &Bench, meter: &Meter, target: &Target, rate_hz: u32, pairs: usize) -> Result<Drawn> {
    let window = || -> Result<f64> {
        let (begun, before) = (Instant::now(), meter.read()?);
        sleep(bench.effort.cost);
        let after = meter.read()?;
        Ok(meter.joules(&before, &after) / begun.elapsed().as_secs_f64())
    };
    let mut without = vec![window()?];
    let mut more = Vec::new();
    for pair in 1..=pairs {
        eprintln!("energy, pair {pair} of {pairs}");
        let run = bench.begin(Tool::Native, Aim::Pid(target.pid()), rate_hz)?;
        sleep(STEADY);
        let with = window()?;
        run.finish()?;
        let (before, after) = (without[without.len() - 1], window()?);
        more.push(with - f64::midpoint(before, after));
        without.push(after);
    }
    let interval = |values: &[f64]| Interval::of(values).context("an interval needs two pairs");
    Ok(Drawn { without: interval(&without)?, more: interval(&more)? })
}

/// The energy counters of all processor packages.
struct Meter(Vec<Package>);

/// One of them: `intel-rapl:N`, on AMD's processors, too.
struct Package {
    name: String,
    counter: PathBuf,
    /// Where it begins again at 0, in microjoules.
    range_uj: u64,
}

impl Meter {
    /// The packages below a directory like [`POWERCAP`]; `None` if there is none, or one cannot be read.
    ///
    /// Parts of a package (`intel-rapl:0:0`) are not counted once more, nor is the same package in another interface
    /// (`intel-rapl-mmio:0`), nor the whole platform (`psys`), which has a number as if it were a package.
    fn of(dir: &Path) -> Option<Self> {
        let mut packages = Vec::new();
        for zone in fs::read_dir(dir).ok()?.filter_map(Result::ok) {
            let of_zones = zone.file_name();
            let number = of_zones.to_str().and_then(|name| name.strip_prefix("intel-rapl:")?.parse::<u32>().ok());
            let text = |file: &str| Some(fs::read_to_string(zone.path().join(file)).ok()?.trim().to_owned());
            let Some(name) = number.and_then(|_| text("name")).filter(|name| name.starts_with("package")) else {
                continue;
            };
            let range_uj = text("max_energy_range_uj")?.parse().ok()?;
            packages.push(Package { name, counter: zone.path().join("energy_uj"), range_uj });
        }
        packages.sort_by(|one, other| one.name.cmp(&other.name));
        let meter = Self(packages);
        (!meter.0.is_empty() && meter.read().is_ok()).then_some(meter)
    }

    /// Whether the counters count: some hypervisors show ones that stand still.
    fn goes_on(&self) -> bool {
        let Ok(before) = self.read() else { return false };
        sleep(GOES_ON);
        self.read().is_ok_and(|after| before.iter().zip(&after).all(|(before, after)| before != after))
    }

    /// Microjoules of each package since some moment.
    ///
    /// # Errors
    /// A counter cannot be read, which is root's alone.
    fn read(&self) -> Result<Vec<u64>> {
        let counted = |package: &Package| {
            let path = &package.counter;
            let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            text.trim().parse().with_context(|| format!("{} holds no number: {text:?}", path.display()))
        };
        self.0.iter().map(counted).collect()
    }

    /// Joules of all packages between two readings, between which no counter has begun again more than once: at 250 W that takes 17
    /// minutes or more.
    fn joules(&self, before: &[u64], after: &[u64]) -> f64 {
        let readings = self.0.iter().zip(before).zip(after);
        let used = readings.map(|((package, &before), &after)| {
            after.checked_sub(before).unwrap_or_else(|| package.range_uj.saturating_sub(before).saturating_add(after))
        });
        used.sum::<u64>() as f64 / 1e6
    }

    fn named(&self) -> String {
        let names: Vec<_> = self.0.iter().map(|package| &*package.name).collect();
        names.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory like [`POWERCAP`], of zones with a name, a range and a counter.
    fn powercap(zones: &[(&str, &str, &str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (zone, name, range, counter) in zones {
            let zone = dir.path().join(zone);
            fs::create_dir(&zone).unwrap();
            for (file, text) in [("name", name), ("max_energy_range_uj", range), ("energy_uj", counter)] {
                fs::write(zone.join(file), format!("{text}\n")).unwrap();
            }
        }
        dir
    }

    #[test]
    fn packages_are_counted_once() {
        let dir = powercap(&[
            ("intel-rapl:1", "package-1", "1000", "7"),
            ("intel-rapl:0", "package-0", "1000", "5"),
            ("intel-rapl:0:0", "core", "1000", "3"),
            ("intel-rapl:0:1", "dram", "1000", "2"),
            ("intel-rapl:2", "psys", "1000", "90"),
            ("intel-rapl-mmio:0", "package-0", "1000", "5"),
            ("dtpm", "package-0", "1000", "5"),
        ]);
        fs::create_dir(dir.path().join("intel-rapl")).unwrap();
        let meter = Meter::of(dir.path()).unwrap();
        assert_eq!(meter.named(), "package-0, package-1");
        assert_eq!(meter.read().unwrap(), [5, 7]);
    }

    #[test]
    fn a_counter_begins_again() {
        let dir = powercap(&[
            ("intel-rapl:0", "package-0", "65532610987", "65532000000"),
            ("intel-rapl:1", "package-1", "262143328850", "1000000"),
        ]);
        let meter = Meter::of(dir.path()).unwrap();
        let before = meter.read().unwrap();
        fs::write(dir.path().join("intel-rapl:0/energy_uj"), "889013\n").unwrap();
        fs::write(dir.path().join("intel-rapl:1/energy_uj"), "3000000\n").unwrap();
        let joules = meter.joules(&before, &meter.read().unwrap());
        assert!((joules - 3.5).abs() < 1e-9, "{joules}");
        assert_eq!(meter.joules(&before, &before), 0.0);
    }

    #[test]
    fn what_cannot_be_read_tells_nothing() {
        assert!(Meter::of(Path::new("/nonexistent")).is_none());
        assert!(Meter::of(powercap(&[]).path()).is_none());
        assert!(Meter::of(powercap(&[("intel-rapl:0", "psys", "1000", "5")]).path()).is_none());
        // Half of the packages is not the machine.
        let half = [("intel-rapl:0", "package-0", "1000", "5"), ("intel-rapl:1", "package-1", "1000", "")];
        assert!(Meter::of(powercap(&half).path()).is_none());
        let dir = powercap(&half[..1]);
        let meter = Meter::of(dir.path()).unwrap();
        assert!(!meter.goes_on(), "nobody writes to it");
        fs::remove_file(dir.path().join("intel-rapl:0/energy_uj")).unwrap();
        assert!(meter.read().unwrap_err().to_string().contains("energy_uj"));
        assert!(Meter::of(dir.path()).is_none());
    }
}
