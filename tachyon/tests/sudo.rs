//! What changes under sudo: files belong to the calling user, and a command runs as that user.

#[path = "../../tests/support/not_run.rs"]
mod not_run;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::process::Command;
use tachyon::cli::command::{CommandOutput, CommandStatus, PreparedCommand};
use tachyon::cli::output::{Destination, write_whole};

const NOBODY: u32 = 65534;

/// Output of a shell script run as `-- CMD` would run it.
fn run(script: &str, as_root: bool) -> String {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let out = directory.path().join("out");
    let words = ["sh", "-c", &format!("{{ {script}; }} > {}", out.display())].map(OsString::from);
    let mut command = PreparedCommand::prepare(&words, as_root, CommandOutput::Inherited).unwrap();
    command.start().unwrap();
    assert_eq!(command.wait().unwrap(), CommandStatus::Exited(0));
    fs::read_to_string(out).unwrap()
}

#[test]
fn under_sudo() {
    if !nix::unistd::Uid::effective().is_root() {
        not_run::not_run("root");
        return;
    }
    if env::var_os("SUDO_UID").is_none() {
        // Variables belong to the process: this test runs again in a process of its own.
        let status = Command::new(env::current_exe().unwrap())
            .args(["--exact", "under_sudo", "--nocapture"])
            .envs([("SUDO_UID", "65534"), ("SUDO_GID", "65534"), ("HOME", "/root"), ("KEPT", "as is")])
            .status();
        assert!(status.unwrap().success());
        return;
    }

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x");
    write_whole(&Destination::Path(path.clone()), false, b"x").unwrap();
    let written = fs::metadata(&path).unwrap();
    assert_eq!((written.uid(), written.gid(), written.mode() & 0o777), (NOBODY, NOBODY, 0o600));

    let ids = "id -u; id -g; id -G; sed -n 's/^CapPrm:.//p' /proc/self/status; echo $KEPT";
    assert_eq!(run(ids, false), "65534\n65534\n65534\n0000000000000000\nas is\n");
    assert_ne!(run("echo $HOME", false), "/root\n");
    assert!(run("id -u; id -g; echo $HOME", true).starts_with("0\n0\n/root\n"));
}
