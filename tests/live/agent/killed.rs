//! The agent and the program that reads its spool, both killed repeatedly.

use super::{Agent, FAST, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tachyon::report::Report;
use tachyon::types::KtimeNs;
use tachyon_tests::{Interpreter, Recorded, Target, binary, judge, live, waited_for_cpu};

/// `tachyon-fleet ship` of an agent's spool into a folder.
struct Shipper {
    config: PathBuf,
    lake: PathBuf,
}

impl Shipper {
    fn of(agent: &Agent) -> Self {
        let around = agent.around.path();
        let (config, lake) = (around.join("fleet.toml"), around.join("lake"));
        let (spool, state) = (agent.spool(), around.join("state"));
        let text = format!(
            "[spool]\npath = \"{}\"\nlook = \"100ms\"\n[state]\npath = \"{}\"\n[http]\nlisten = \"off\"\n[[store]]\nurl = \"{}\"\n",
            spool.display(),
            state.display(),
            lake.display()
        );
        fs::write(&config, text).unwrap();
        Self { config, lake }
    }

    fn fleet() -> Command {
        let program = binary().with_file_name("tachyon-fleet");
        assert!(program.is_file(), "{} is missing\nhint: `cargo build -p tachyon-fleet`", program.display());
        Command::new(program)
    }

    fn start(&self) -> Child {
        let mut command = Self::fleet();
        command.args(["ship", "--config"]).arg(&self.config).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().expect("the shipper can be run")
    }

    /// Ships what is left, and compares the folder with tables made from the spool in one go.
    fn has_each_segment_once(&self, agent: &Agent) {
        let shipped = Self::fleet().args(["ship", "--once", "--config"]).arg(&self.config).output().unwrap();
        assert!(shipped.status.success(), "{}", String::from_utf8_lossy(&shipped.stderr));
        let tables = agent.around.path().join("tables");
        let made = Self::fleet().arg("convert").arg(agent.spool()).arg("-o").arg(&tables).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let (lake, tables) = (contents(&self.lake), contents(&tables));
        let names = |of: &BTreeMap<PathBuf, Vec<u8>>| of.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&lake), names(&tables), "each object once");
        assert!(lake == tables, "an object is not whole");
        assert!(!lake.is_empty(), "nothing was shipped");
    }
}

/// All files below a directory, by path.
fn contents(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut open = vec![root.to_path_buf()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else {
                found.insert(path.strip_prefix(root).unwrap().to_path_buf(), fs::read(&path).unwrap());
            }
        }
    }
    found
}

/// After the next start every segment can be read, no sample is there twice, and each lost a second at most. Whoever reads the spool
/// meanwhile, and is killed at other moments, has each segment once.
///
/// `TACHYON_LONG=N` kills both N times as often: 5 are twenty.
#[test]
fn killed_they_are_carried_on() {
    let Some(_live) = live() else { return };
    let long: u32 = std::env::var("TACHYON_LONG").map_or(1, |text| text.parse().expect("TACHYON_LONG is a number"));
    let target =
        Target::start_in(&Interpreter::named("pyenv_3_12"), "spin.py", &[], &[("TACHYON_TEST_SECONDS", "600")]);
    // An agent killed within a second of a cut may have nothing on the disk yet, but hardly ever every time.
    let mut agent = Agent::start(&FAST.replace("500ms", "20s"));
    let shipper = Shipper::of(&agent);
    // The moments, and how long threads had waited for a CPU by then: the agent's in its whole life, the target's since the agent
    // began.
    let mut kills = Vec::new();
    for _ in 0..4 * long {
        let target_waited = waited_for_cpu(target.pid());
        let mut ship = shipper.start();
        let first = fastrand::u64(1_200..2_500);
        let second = fastrand::u64(0..first);
        std::thread::sleep(Duration::from_millis(second));
        ship.kill().expect("it is our child");
        ship.wait().expect("it is our child");
        let mut ship = shipper.start();
        std::thread::sleep(Duration::from_millis(first - second));
        let waited = waited_for_cpu(agent.pid()) + waited_for_cpu(target.pid()).saturating_sub(target_waited);
        agent.end(libc::SIGKILL);
        kills.push((KtimeNs::now().0 / 1_000, waited));
        // In the middle of what it does with what the agent left behind.
        std::thread::sleep(Duration::from_millis(fastrand::u64(0..40)));
        agent.start_again();
        ship.kill().expect("it is our child");
        ship.wait().expect("it is our child");
        assert_eq!(agent.files(".part").len(), 1, "only the new one's own is unfinished: {}", agent.log());
    }
    agent.end(libc::SIGTERM);
    assert!(agent.files(".broken").is_empty() && agent.files(".part").is_empty(), "{}", agent.log());
    let mut times_us = Vec::new();
    for path in agent.files(".tach") {
        let recorded = Recorded::read(&path);
        judge::agrees(&path, &recorded);
        let account: Report = serde_json::from_value(json(&path.with_extension("json"))).unwrap();
        assert_eq!(account.stored, recorded.samples.len() as u64, "{}", path.display());
        let own = recorded.samples.iter().filter(|sample| sample.thread_id == u64::from(target.pid()));
        times_us.extend(own.map(|sample| sample.timestamp_us));
    }
    assert!(times_us.is_sorted_by(|before, after| before < after), "a sample is there twice");
    let cut = agent.reports().iter().filter(|report| report.cut).count();
    assert!(cut > 0 && agent.log().contains("recovered "), "{cut} recovered: {}", agent.log());
    // The disk is written once a second, from a ring that is read every 0.2 s.
    for (kill_us, waited) in kills {
        let lost = Duration::from_micros(lost_before(&times_us, kill_us));
        println!("no sample in the last {lost:?} before a kill; waited {waited:?}");
        assert!(lost <= Duration::from_millis(1_200) + waited, "{lost:?} are lost, {waited:?} of them waiting");
    }
    shipper.has_each_segment_once(&agent);
}

/// How long before a moment the last sample was taken.
fn lost_before(times_us: &[u64], moment_us: u64) -> u64 {
    let after = times_us.partition_point(|time| *time <= moment_us);
    moment_us - times_us[..after].last().copied().unwrap_or(0)
}
