//! A process's control groups, and the container and pod that they reveal.

use super::{RemoteError, RemoteProcess};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Hexadecimal digits of a container id, as containerd, CRI-O, Docker and Podman make them.
const CONTAINER_ID_LEN: usize = 64;

/// Where the hierarchy of version 2 is mounted, on its own and beside version 1.
const MOUNTS: [&str; 2] = ["sys/fs/cgroup", "sys/fs/cgroup/unified"];
/// The root of a hierarchy of version 2 has this inode, and no other group does (`cgroup_get_root_ino` is `kernfs`' first).
const ROOT_INODE: u64 = 1;
/// Most groups of a host that are searched for this process's own.
const GROUPS: usize = 1 << 16;

/// The control groups of a process, from the root of the host if that can be found out, otherwise as named in the profiler's own
/// cgroup namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cgroups {
    /// One path for each hierarchy, and the same as below `/sys/fs/cgroup`: those of version 1 prefixed with their
    /// controllers, that of version 2 with `unified` if it is mounted beside them (systemd's hybrid layout).
    paths: Vec<String>,
}

impl RemoteProcess {
    /// The control groups it is in now.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn cgroups(&self) -> Result<Cgroups, RemoteError> {
        Ok(Cgroups::parse(&String::from_utf8_lossy(&self.proc_file("cgroup")?), own_root()))
    }
}

/// The host's name for the group that is `/` in the profiler's own cgroup namespace. Empty in the host's namespace, and if the
/// host's hierarchy is not visible.
///
/// A container's namespace hides its own name (cgroup_namespaces(7)). But the directory mounted for it also exists somewhere
/// in the first process's hierarchy, with the same inode.
fn own_root() -> &'static str {
    static OWN: OnceLock<String> = OnceLock::new();
    OWN.get_or_init(|| {
        let found = MOUNTS.iter().find_map(|mount| {
            let own = inode(&Path::new("/").join(mount)).filter(|inode| *inode != ROOT_INODE)?;
            // Whoever made that mount could make the profiler wait for ever, if it were a file system of their own.
            if !leads_to_groups(&fs::read_to_string("/proc/1/mountinfo").ok()?, mount) {
                return None;
            }
            let host = Path::new("/proc/1/root").join(mount);
            below(&host, own)?.strip_prefix(&host).ok().map(Path::to_path_buf)
        });
        found.map(|path| format!("/{}", path.display())).filter(|path| path != "/").unwrap_or_default()
    })
}

/// Whether `mount` is version 2's hierarchy there, and everything on the way to it can be trusted to answer; `mounts` has
/// lines as in `proc_pid_mountinfo(5)`.
fn leads_to_groups(mounts: &str, mount: &str) -> bool {
    let kind_of = |line: &str| line.split_once(" - ").and_then(|(_, rest)| rest.split(' ').next().map(str::to_owned));
    // If several mounts are in one place, the last one is visible.
    let at = |place: &str| mounts.lines().rfind(|line| line.split(' ').nth(4) == Some(place)).and_then(kind_of);
    let answers = |kind: &String| !["fuse", "nfs", "cifs", "9p", "ceph"].iter().any(|slow| kind.starts_with(slow));
    let place = format!("/{mount}");
    let on_the_way = place.match_indices('/').map(|(end, _)| if end == 0 { "/" } else { &place[..end] });
    at(&place).is_some_and(|kind| kind == "cgroup2")
        && at("/").is_some_and(|kind| answers(&kind))
        && on_the_way.filter_map(at).all(|kind| answers(&kind))
}

/// The inode of a directory of version 2's hierarchy.
fn inode(directory: &Path) -> Option<u64> {
    let is_group = directory.join("cgroup.controllers").exists();
    fs::metadata(directory).ok().filter(|_| is_group).map(|metadata| metadata.ino())
}

/// The directory with this inode in or below `top`.
fn below(top: &Path, inode: u64) -> Option<PathBuf> {
    let mut open = vec![top.to_owned()];
    for _ in 0..GROUPS {
        let directory = open.pop()?;
        if fs::symlink_metadata(&directory).is_ok_and(|metadata| metadata.ino() == inode) {
            return Some(directory);
        }
        let entries = fs::read_dir(&directory).into_iter().flatten().flatten();
        open.extend(
            entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()),
        );
    }
    None
}

/// Resolves a path that starts in the group `root`, which leading `..`s lead up from.
fn absolute(root: &str, path: &str) -> String {
    if root.is_empty() {
        return path.to_owned();
    }
    let mut parts: Vec<&str> = root.split('/').filter(|part| !part.is_empty()).collect();
    for part in path.split('/').filter(|part| !part.is_empty()) {
        match part {
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}

impl Cgroups {
    /// Parses `/proc/PID/cgroup`: lines of `number:controllers:path` (cgroups(7)). Paths of version 2 start in the group `root`.
    fn parse(text: &str, root: &str) -> Self {
        let mut paths = Vec::new();
        for line in text.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(_number), Some(controllers), Some(own_name)) = (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            let (hierarchy, path) = match controllers {
                "" => ("unified", absolute(root, own_name)),
                _ => (controllers.strip_prefix("name=").unwrap_or(controllers), own_name.to_owned()),
            };
            // First its name on the host, then the one in the profiler's namespace.
            let names = [path.as_str(), own_name];
            for name in &names[..if path == own_name { 1 } else { 2 }] {
                paths.push((*name).to_owned());
                paths.push(format!("/{hierarchy}{name}"));
            }
        }
        Self { paths }
    }

    /// Whether the process is in the group `path` or below it. `path` begins with a slash and does not end with one,
    /// except for the root.
    #[must_use]
    pub fn is_below(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        self.paths.iter().any(|own| own.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
    }

    /// The path of the control group: in the unified hierarchy if there is one, otherwise in the first that is listed.
    #[must_use]
    pub fn path(&self) -> &str {
        let unified = self.paths.iter().find_map(|path| path.strip_prefix("/unified"));
        unified.filter(|path| path.starts_with('/')).or(self.paths.first().map(String::as_str)).unwrap_or_default()
    }

    /// The id of the innermost container, 64 hexadecimal digits.
    #[must_use]
    pub fn container(&self) -> Option<&str> {
        self.paths.iter().find_map(|path| path.rsplit('/').find_map(container_of))
    }

    /// The uid of the Kubernetes pod, with hyphens as `kubectl` prints it.
    #[must_use]
    pub fn pod(&self) -> Option<String> {
        self.paths.iter().find_map(|path| path.rsplit('/').find_map(pod_of))
    }
}

/// `<id>`, `docker-<id>.scope`, `cri-containerd-<id>.scope`, `crio-<id>.scope`, `libpod-<id>.scope`; not
/// `libpod-conmon-<id>.scope`, which holds a container's monitor.
fn container_of(part: &str) -> Option<&str> {
    let name = part.strip_suffix(".scope").unwrap_or(part);
    if name.contains("-conmon-") {
        return None;
    }
    let id = name.rsplit(['-', ':']).next()?;
    (id.len() == CONTAINER_ID_LEN && id.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(id)
}

/// `pod<uid>` (cgroupfs driver) or `kubepods-burstable-pod<uid with underscores>.slice` (systemd driver).
fn pod_of(part: &str) -> Option<String> {
    // containerd without a scope: `kubepods-…-pod<uid>.slice:cri-containerd:<id>`.
    let part = part.split(':').next().unwrap_or(part);
    let name = part.strip_suffix(".slice").unwrap_or(part);
    // A kubelet with a cgroup root of its own puts that before it: `kubelet-kubepods-pod<uid>.slice`.
    let of_slice = || Some(name.split_once("kubepods")?.1.split_once("-pod")?.1);
    let uid = name.strip_prefix("pod").or_else(of_slice)?;
    // A uid is a UUID; that of a static pod is a hash of 32 digits without hyphens.
    let plausible = uid.len() >= 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit() || b"-_".contains(&byte));
    plausible.then(|| uid.replace('_', "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "4b1f9b1c2a3d4e5f60718293a4b5c6d7e8f900112233445566778899aabbccdd";
    const UID: &str = "0a1b2c3d-1111-2222-3333-444455556666";

    #[test]
    fn containers_and_pods_of_many_runtimes() {
        let under = UID.replace('-', "_");
        for (path, container, pod) in [
            (format!("/docker/{ID}"), Some(ID), None),
            (format!("/system.slice/docker-{ID}.scope"), Some(ID), None),
            (format!("/machine.slice/libpod-{ID}.scope/container"), Some(ID), None),
            (format!("/machine.slice/libpod-conmon-{ID}.scope"), None, None),
            (format!("/kubepods/burstable/pod{UID}/{ID}"), Some(ID), Some(UID)),
            (
                format!(
                    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{under}.slice/cri-containerd-{ID}.scope"
                ),
                Some(ID),
                Some(UID),
            ),
            (
                format!("/system.slice/containerd.service/kubepods-besteffort-pod{under}.slice:cri-containerd:{ID}"),
                Some(ID),
                Some(UID),
            ),
            (format!("/kubepods.slice/kubepods-pod{under}.slice/crio-{ID}.scope"), Some(ID), Some(UID)),
            (format!("/kubepods.slice/kubepods-pod{under}.slice/crio-{ID}.scope/container"), Some(ID), Some(UID)),
            (format!("/kubepods/pod{UID}/{ID}"), Some(ID), Some(UID)),
            (format!("/kubepods/besteffort/pod{UID}/{ID}"), Some(ID), Some(UID)),
            (
                format!(
                    "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{under}.slice/crio-{ID}.scope"
                ),
                Some(ID),
                Some(UID),
            ),
            (
                format!(
                    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{under}.slice/docker-{ID}.scope"
                ),
                Some(ID),
                Some(UID),
            ),
            (format!("/kubelet/kubepods/burstable/pod{UID}/{ID}"), Some(ID), Some(UID)),
            (
                format!(
                    "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{under}.slice/cri-containerd-{ID}.scope"
                ),
                Some(ID),
                Some(UID),
            ),
            (
                format!("/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container"),
                Some(ID),
                None,
            ),
            (format!("/libpod_parent/libpod-{ID}"), Some(ID), None),
            (format!("/default/{ID}"), Some(ID), None),
            (format!("/system.slice/docker.service/docker/{ID}"), Some(ID), None),
            (format!("/ecs/0123456789abcdef0123456789abcdef/{ID}"), Some(ID), None),
            ("/user.slice/user-1000.slice/session-2.scope".to_owned(), None, None),
            ("/podium".to_owned(), None, None),
            ("/".to_owned(), None, None),
        ] {
            let cgroups = Cgroups::parse(&format!("0::{path}\n"), "");
            assert_eq!(cgroups.container(), container, "{path}");
            assert_eq!(cgroups.pod().as_deref(), pod, "{path}");
        }
    }

    #[test]
    fn in_a_namespace_of_its_own_names_begin_at_the_root_of_the_host() {
        let own = format!("/kubepods.slice/kubepods-pod{UID}.slice/cri-containerd-{ID}.scope");
        let other = ID.replace('4', "5");
        for (path, expected) in [
            ("/", own.clone()),
            ("/worker", format!("{own}/worker")),
            (&*format!("/../cri-containerd-{other}.scope"), own.replace(ID, &other)),
            ("/../../../system.slice/cron.service", "/system.slice/cron.service".to_owned()),
            ("/../../..", "/".to_owned()),
        ] {
            let cgroups = Cgroups::parse(&format!("1:name=systemd:/s\n0::{path}\n"), &own);
            assert_eq!(cgroups.path(), expected);
            assert!(cgroups.is_below("/systemd/s"), "version 1 has its own names");
        }
        assert_eq!(Cgroups::parse("0::/\n", &own).container(), Some(ID));
        assert_eq!(Cgroups::parse("0::/\n", &own).pod().as_deref(), Some(UID));
    }

    #[test]
    fn only_what_answers_is_looked_through() {
        let line = |place: &str, kind: &str| format!("30 20 0:26 / {place} rw,nosuid shared:4 - {kind} source rw\n");
        let host = line("/", "ext4") + &line("/sys", "sysfs") + &line("/sys/fs/cgroup", "cgroup2");
        assert!(leads_to_groups(&host, "sys/fs/cgroup"));
        assert!(!leads_to_groups(&host, "sys/fs/cgroup/unified"));
        for other in [
            line("/sys/fs/cgroup", "tmpfs"),
            line("/sys/fs/cgroup", "fuse.sshfs"),
            line("/", "fuse.fuse-overlayfs"),
            line("/sys", "nfs4"),
        ] {
            assert!(!leads_to_groups(&(host.clone() + &other), "sys/fs/cgroup"), "{other}");
        }
        assert!(!leads_to_groups("", "sys/fs/cgroup"));
    }

    #[test]
    fn the_directory_with_an_inode_is_found() {
        let around = tempfile::tempdir().unwrap();
        let deep = around.path().join("a/b/c");
        fs::create_dir_all(&deep).unwrap();
        fs::create_dir_all(around.path().join("a/d")).unwrap();
        let wanted = fs::metadata(&deep).unwrap().ino();
        assert_eq!(below(around.path(), wanted), Some(deep));
        assert_eq!(below(around.path(), u64::MAX), None);
    }

    #[test]
    fn below_is_by_whole_names() {
        let cgroups = Cgroups::parse("5:cpu,cpuacct:/a/b\n1:name=systemd:/s\n0::/x/y/z\nodd\n", "");
        for (path, below) in [
            ("/x/y/z", true),
            ("/x/y", true),
            ("/x/y/", true),
            ("/x/yy", false),
            ("/x/y/z/u", false),
            ("/", true),
            ("/cpu,cpuacct/a", true),
            ("/a", true),
            ("/systemd/s", true),
            ("/unified/x/y", true),
            ("/unified/s", false),
            ("/b", false),
        ] {
            assert_eq!(cgroups.is_below(path), below, "{path}");
        }
    }
}
