//! Where a process stands in the control groups, and what container and pod that tells.

use super::{RemoteError, RemoteProcess};

/// Hexadecimal digits of a container id, as containerd, CRI-O, Docker and Podman make them.
const CONTAINER_ID_LEN: usize = 64;

/// The control groups of a process, as the profiler's own cgroup namespace names them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cgroups {
    /// One path for each hierarchy, and the same as below `/sys/fs/cgroup`: those of version 1 with their controllers in
    /// front, that of version 2 with `unified`, where it is mounted beside them (systemd's hybrid layout).
    paths: Vec<String>,
}

impl RemoteProcess {
    /// The control groups it is in now.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn cgroups(&self) -> Result<Cgroups, RemoteError> {
        Ok(Cgroups::parse(&String::from_utf8_lossy(&self.proc_file("cgroup")?)))
    }
}

impl Cgroups {
    /// Parses `/proc/PID/cgroup`: lines of `number:controllers:path` (cgroups(7)).
    fn parse(text: &str) -> Self {
        let mut paths = Vec::new();
        for line in text.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(_number), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
                continue;
            };
            paths.push(path.to_owned());
            let hierarchy = match controllers {
                "" => "unified",
                _ => controllers.strip_prefix("name=").unwrap_or(controllers),
            };
            paths.push(format!("/{hierarchy}{path}"));
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

    /// The path of the control group: of the unified hierarchy where there is one, else of the first that is listed.
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
/// `libpod-conmon-<id>.scope`, where a container's keeper is.
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
            let cgroups = Cgroups::parse(&format!("0::{path}\n"));
            assert_eq!(cgroups.container(), container, "{path}");
            assert_eq!(cgroups.pod().as_deref(), pod, "{path}");
        }
    }

    #[test]
    fn below_is_by_whole_names() {
        let cgroups = Cgroups::parse("5:cpu,cpuacct:/a/b\n1:name=systemd:/s\n0::/x/y/z\nodd\n");
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
