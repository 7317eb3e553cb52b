//! Which processes are wanted, if not all are: by control group, container, name, user.
//!
//! A process is judged when it is met and again at each `exec`; after that, one flag in its entry tells the kernel side,
//! which looks at nothing else of an unwanted process. Children are what their parent is until they `exec`. A process
//! that is moved to another control group, or takes another user or name, while it runs the same program is not judged
//! again.

use crate::remote::{RemoteError, RemoteProcess};
use crate::types::Pid;
use std::path::Path;

/// Where control groups are mounted; a group's path may begin with it.
const CGROUP_MOUNT: &str = "/sys/fs/cgroup";

/// Conditions that must all hold. If a kind has several values, any may match; a kind without values always holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Control groups ([`cgroup_path`]); those below belong to them.
    pub cgroups: Vec<String>,
    /// Container ids, or prefixes of them ([`container_id`]).
    pub containers: Vec<String>,
    /// Patterns for the kernel's short name of the process.
    pub comms: Vec<glob::Pattern>,
    /// Effective user ids in the profiler's user namespace.
    pub uids: Vec<u32>,
}

impl Filter {
    /// Whether every process is wanted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cgroups.is_empty() && self.containers.is_empty() && self.comms.is_empty() && self.uids.is_empty()
    }

    /// The conditions as the options that ask for them.
    #[must_use]
    pub fn options(&self) -> String {
        let uids: Vec<_> = self.uids.iter().map(u32::to_string).collect();
        let comms: Vec<_> = self.comms.iter().map(ToString::to_string).collect();
        let kinds =
            [("--cgroup", &self.cgroups), ("--container", &self.containers), ("--comm", &comms), ("--uid", &uids)];
        let options =
            kinds.into_iter().flat_map(|(name, values)| values.iter().map(move |value| format!("{name} {value}")));
        options.collect::<Vec<_>>().join(" ")
    }

    /// A control group that was asked for but does not exist: it has no folder, and nothing runs in it.
    #[must_use]
    pub fn missing_cgroup(&self) -> Option<&str> {
        self.cgroups.iter().map(String::as_str).find(|path| !has_folder(path) && !has_process(path))
    }

    /// Whether a process is wanted. Reads only what the conditions need.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn admits(&self, process: &RemoteProcess) -> Result<bool, RemoteError> {
        if !self.comms.is_empty() {
            let comm = process.comm()?;
            if !self.comms.iter().any(|pattern| pattern.matches(&comm)) {
                return Ok(false);
            }
        }
        if !self.uids.is_empty() && !self.uids.contains(&process.effective_uid()?) {
            return Ok(false);
        }
        if self.cgroups.is_empty() && self.containers.is_empty() {
            return Ok(true);
        }
        let cgroups = process.cgroups()?;
        let in_container = |wanted: &String| cgroups.container().is_some_and(|id| id.starts_with(wanted.as_str()));
        Ok((self.cgroups.is_empty() || self.cgroups.iter().any(|path| cgroups.is_below(path)))
            && (self.containers.is_empty() || self.containers.iter().any(in_container)))
    }
}

/// Whether a control group has a folder: of version 2, or in any of the hierarchies of version 1.
fn has_folder(path: &str) -> bool {
    let below = |mount: &Path| mount.join(path.trim_start_matches('/')).is_dir();
    let mount = Path::new(CGROUP_MOUNT);
    below(mount) || std::fs::read_dir(mount).is_ok_and(|all| all.flatten().any(|hierarchy| below(&hierarchy.path())))
}

/// Whether a process is in a control group or below it. If the groups are not mounted, nothing else shows that.
fn has_process(path: &str) -> bool {
    let is_below = |pid: &Pid| RemoteProcess::at(*pid).cgroups().is_ok_and(|cgroups| cgroups.is_below(path));
    super::pids().is_ok_and(|pids| pids.iter().any(is_below))
}

/// The path of a control group, without the mount point and with a leading slash.
///
/// # Errors
/// When there is nothing left.
pub fn cgroup_path(text: &str) -> Result<String, String> {
    let path = Path::new(text);
    let path = path.strip_prefix(CGROUP_MOUNT).unwrap_or(path);
    let names: Vec<&str> = path.to_str().unwrap_or_default().split('/').filter(|name| !name.is_empty()).collect();
    if names.is_empty() {
        return Err("every process is in the root group: leave the filter out".to_owned());
    }
    Ok(format!("/{}", names.join("/")))
}

/// A container's id or its first digits, in lower case.
///
/// # Errors
/// When it cannot be one.
pub fn container_id(text: &str) -> Result<String, String> {
    let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if digits && (8..=64).contains(&text.len()) {
        Ok(text.to_ascii_lowercase())
    } else {
        Err("a container's id has 64 hexadecimal digits, of which at least the first 8 are needed".to_owned())
    }
}

/// A pattern for the kernel's short name.
///
/// # Errors
/// When it is not a valid pattern, or no name can match it.
pub fn comm_pattern(text: &str) -> Result<glob::Pattern, String> {
    // `TASK_COMM_LEN` is 16 with the final NUL.
    const LONGEST: usize = 15;
    if !text.contains(['*', '?', '[']) && text.len() > LONGEST {
        return Err(format!(
            "the kernel keeps {LONGEST} bytes of a name: write {}*",
            text.get(..LONGEST).unwrap_or("")
        ));
    }
    glob::Pattern::new(text).map_err(|error| error.to_string())
}

/// A user by number or name.
///
/// # Errors
/// When there is none of that name.
pub fn user_id(text: &str) -> Result<u32, String> {
    if let Ok(uid) = text.parse() {
        return Ok(uid);
    }
    match nix::unistd::User::from_name(text) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        Ok(None) => Err("there is no such user here: give the number".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments() {
        for (text, path) in [
            ("/sys/fs/cgroup/a/b", Some("/a/b")),
            ("/a//b/", Some("/a/b")),
            ("a", Some("/a")),
            ("/sys/fs/cgroup/", None),
            ("", None),
        ] {
            assert_eq!(cgroup_path(text).ok().as_deref(), path, "{text}");
        }
        assert_eq!(container_id("ABCDEF012345").as_deref(), Ok("abcdef012345"));
        for odd in ["abc", "web-1-container", ""] {
            assert!(container_id(odd).is_err(), "{odd}");
        }
        assert!(comm_pattern("python3.12-with-a-long-name").unwrap_err().contains("python3.12-with*"));
        assert!(comm_pattern("[").is_err());
        assert_eq!(user_id("root"), Ok(0));
        assert_eq!(user_id("4711"), Ok(4711));
    }

    #[test]
    fn control_groups_that_do_not_exist() {
        let missing = |paths: &[&str]| {
            let cgroups = paths.iter().map(|&path| path.to_owned()).collect();
            Filter { cgroups, ..Filter::default() }.missing_cgroup().map(str::to_owned)
        };
        assert_eq!(missing(&[]), None);
        assert_eq!(missing(&["/no/such/group"]).as_deref(), Some("/no/such/group"));
        let own = std::fs::read_to_string("/proc/self/cgroup").expect("readable");
        let own = own.lines().filter_map(|line| line.rsplit_once(':')).map(|(_, path)| path);
        for path in own.filter(|path| *path != "/") {
            assert_eq!(missing(&[path]), None, "this process is in {path}");
        }
    }

    #[test]
    fn all_conditions_must_hold() {
        let own = RemoteProcess::open(Pid(std::process::id())).expect("this process runs");
        let comm = own.comm().expect("readable");
        let uid = own.effective_uid().expect("readable");
        let named = |pattern: &str| vec![glob::Pattern::new(pattern).expect("a pattern")];
        let pattern = format!("{}*", &comm[..1]);
        let admits = |filter: Filter| filter.admits(&own).expect("it runs");
        assert!(admits(Filter::default()));
        assert!(admits(Filter { comms: named(&pattern), uids: vec![uid + 1, uid], ..Filter::default() }));
        assert!(!admits(Filter { comms: named("no*"), uids: vec![uid], ..Filter::default() }));
        assert!(!admits(Filter { comms: named(&pattern), uids: vec![uid + 1], ..Filter::default() }));
        assert!(!admits(Filter { cgroups: vec!["/no/such/group".to_owned()], ..Filter::default() }));
        assert!(!admits(Filter { containers: vec!["0123456789ab".to_owned()], ..Filter::default() }));
        let shown =
            Filter { cgroups: vec!["/a".to_owned()], comms: named("py*"), uids: vec![1, 2], ..Filter::default() };
        assert_eq!(shown.options(), "--cgroup /a --comm py* --uid 1 --uid 2");
    }
}
