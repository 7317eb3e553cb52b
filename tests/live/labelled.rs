//! Labels that the agent finds for programs that live 50 ms, in the control groups of every container runtime.

use crate::agent::{Agent, FAST};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tachyon::report::ProcessReport;
use tachyon_tests::{Interpreter, live};

const ID: &str = "4b1f9b1c2a3d4e5f60718293a4b5c6d7e8f900112233445566778899aabbccdd";
const UID: &str = "0a1b2c3d-1111-2222-3333-444455556666";
/// With underscores, as systemd wants it.
const UNDER: &str = "0a1b2c3d_1111_2222_3333_444455556666";

/// 50 ms of CPU time, the interpreter's own start included.
const SHORT: &str = "import time\nend = time.process_time() + 0.05\nwhile time.process_time() < end: pass";

/// Groups as runtimes and their drivers name them, and whether there is a pod.
fn layouts() -> Vec<(String, bool)> {
    let pods = format!("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDER}.slice");
    [
        (format!("docker/{ID}"), false),
        (format!("system.slice/docker-{ID}.scope"), false),
        (format!("system.slice/docker.service/docker/{ID}"), false),
        (format!("machine.slice/libpod-{ID}.scope/container"), false),
        (format!("user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope"), false),
        (format!("libpod_parent/libpod-{ID}"), false),
        (format!("default/{ID}"), false),
        (format!("kubepods/burstable/pod{UID}/{ID}"), true),
        (format!("kubepods/besteffort/pod{UID}/{ID}"), true),
        (format!("kubepods/pod{UID}/{ID}"), true),
        (format!("{pods}/cri-containerd-{ID}.scope"), true),
        (format!("{pods}/crio-{ID}.scope"), true),
        (format!("{pods}/crio-{ID}.scope/container"), true),
        (format!("{pods}/docker-{ID}.scope"), true),
        (format!("kubelet/kubepods/burstable/pod{UID}/{ID}"), true),
        (
            format!("kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UNDER}.slice/cri-containerd-{ID}.scope"),
            true,
        ),
        (format!("system.slice/containerd.service/kubepods-besteffort-pod{UNDER}.slice:cri-containerd:{ID}"), true),
    ]
    .into()
}

/// A group of a hierarchy, removed with the parents that it was made with.
struct Group {
    dir: PathBuf,
    made: Vec<PathBuf>,
}

impl Group {
    fn make(hierarchy: &Path, path: &str) -> Self {
        let dir = hierarchy.join(path);
        let made = dir.ancestors().take_while(|dir| !dir.exists()).map(Path::to_path_buf).collect();
        fs::create_dir_all(&dir).unwrap_or_else(|error| panic!("cannot make the group {}: {error}", dir.display()));
        Self { dir, made }
    }

    /// A command that joins the group and then executes its arguments.
    fn join(&self, private: bool) -> Command {
        let mut command = Command::new("sh");
        let namespace = if private { "unshare --cgroup " } else { "" };
        command.arg("-c").arg(format!("echo 0 >\"$0\" && exec {namespace}\"$@\"")).arg(self.dir.join("cgroup.procs"));
        command
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for dir in &self.made {
            // Another group may still need the directory.
            let _shared = fs::remove_dir(dir);
        }
    }
}

/// Where hierarchies of both versions are mounted.
struct Hierarchies {
    second: PathBuf,
    /// A named hierarchy, like systemd's.
    first: Mounted,
}

/// Unmounted when dropped.
struct Mounted(tempfile::TempDir);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _left = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
    }
}

impl Hierarchies {
    fn find() -> Self {
        let known = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(PathBuf::from);
        let second = known.into_iter().find(|mount| mount.join("cgroup.controllers").exists());
        let first = tempfile::tempdir().expect("a temporary directory can be made");
        let mut mount = Command::new("mount");
        mount.args(["-t", "cgroup", "-o", "none,name=tachyon-test", "cgroup"]).arg(first.path());
        assert!(mount.status().expect("mount is there").success(), "control groups of version 1 can be mounted");
        Self { second: second.expect("control groups of version 2 are mounted"), first: Mounted(first) }
    }
}

/// Runs a short program `rounds` times in each layout, of version 2, of version 1, and in its own namespace; checks the
/// labels in what the agent wrote about them.
fn labels_are_found(mut agent: Agent, hierarchies: &Hierarchies, rounds: usize, least_percent: usize) {
    let python = Interpreter::named("pyenv_3_12");
    // What a job's labels must be.
    let mut expected: BTreeMap<String, bool> = BTreeMap::new();
    for (hierarchy, version) in [(&*hierarchies.second, 2), (hierarchies.first.0.path(), 1)] {
        for (number, (path, pod)) in layouts().into_iter().enumerate() {
            let group = Group::make(hierarchy, &path);
            for round in 0..rounds {
                let private = (number + round) % 2 == 1;
                let job = format!("v{version} {path} {round}");
                let mut command = group.join(private);
                command.arg(python.command().get_program()).args(["-S", "-c", SHORT]).env("OTEL_SERVICE_NAME", &job);
                let status = command.stdin(Stdio::null()).status().expect("it can be run");
                assert!(status.success(), "{job}: {status}");
                expected.insert(job, pod);
            }
        }
    }
    agent.end(libc::SIGTERM);
    let reports = agent.reports();
    let processes = || reports.iter().flat_map(|report| &report.processes);
    let label = |process: &ProcessReport, name: &str| process.labels.get(name).cloned().unwrap_or_default();
    let mut met = BTreeSet::new();
    for process in processes() {
        let Some((job, pod)) = expected.get_key_value(&label(process, "service.name")) else { continue };
        assert_eq!(label(process, "container"), ID, "{job}: {process:#?}");
        assert_eq!(label(process, "pod"), if *pod { UID } else { "" }, "{job}: {process:#?}");
        assert_eq!(label(process, "uid"), "0", "{job}: {process:#?}");
        met.insert(job);
    }
    // One may end before it was looked at: its samples are then counted as lost, under a named cause.
    let (jobs, found) = (expected.len(), met.len());
    assert!(found * 100 >= jobs * least_percent, "{found} of {jobs} are labelled: {}", agent.log());
    let every = layouts().len() * 2;
    let layouts: BTreeSet<&str> = met.iter().filter_map(|job| job.rsplit_once(' ')).map(|(layout, _)| layout).collect();
    assert!(rounds == 1 || layouts.len() == every, "{layouts:?}");
}

fn often() -> String {
    FAST.replace("500ms", "1s").replace("199", "999")
}

/// `TACHYON_SHORT_PROGRAMS` is for long runs: this many in all.
#[test]
fn short_programs_in_every_layout() {
    let Some(_live) = live() else { return };
    let hierarchies = Hierarchies::find();
    let asked = std::env::var("TACHYON_SHORT_PROGRAMS").ok().and_then(|count| count.parse::<usize>().ok());
    let rounds = asked.map_or(2, |count| count.div_ceil(layouts().len() * 2));
    labels_are_found(Agent::start(&often()), &hierarchies, rounds, 95);
}

/// An agent in a container: its own namespace hides the name of its group, and shows others' from there.
#[test]
fn an_agent_in_a_namespace_of_its_own() {
    let Some(_live) = live() else { return };
    let hierarchies = Hierarchies::find();
    let other = ID.replace('4', "5");
    let own = Group::make(
        &hierarchies.second,
        &format!("kubepods.slice/kubepods-pod{}.slice/cri-containerd-{other}.scope", UNDER.replace('0', "9")),
    );
    let mount = hierarchies.second.display();
    let script = format!("umount --lazy {mount} && mount -t cgroup2 none {mount} && exec \"$@\"");
    let agent = Agent::start_within(&often(), |agent| {
        let mut command = own.join(true);
        command.args(["unshare", "--mount", "sh", "-c", &script, "sh"]);
        command.arg(agent.get_program()).args(agent.get_args());
        command
    });
    labels_are_found(agent, &hierarchies, 1, 90);
}
