use super::*;
use std::fs;
use std::path::Path;

fn words(argv: &[&str]) -> Vec<OsString> {
    argv.iter().map(OsString::from).collect()
}

/// A shell command, whose output the test reads from a file.
fn shell(script: &str) -> PreparedCommand {
    PreparedCommand::prepare(&words(&["sh", "-c", script]), true, CommandOutput::Inherited).unwrap()
}

#[test]
fn waits_for_its_start() {
    let directory = tempfile::tempdir().unwrap();
    let ran = directory.path().join("ran");
    let mut command = shell(&format!("echo $$ > {}; exit 7", ran.display()));
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!ran.exists());
    assert_eq!(command.try_wait().unwrap(), None);
    command.start().unwrap();
    assert_eq!(command.wait().unwrap(), CommandStatus::Exited(7));
    assert_eq!(fs::read_to_string(&ran).unwrap().trim(), command.pid().to_string());
    assert_eq!(command.try_wait().unwrap().unwrap().exit_status(), 7);
}

#[test]
fn dropped_before_its_start_it_never_runs() {
    let directory = tempfile::tempdir().unwrap();
    let ran = directory.path().join("ran");
    let command = shell(&format!("touch {}", ran.display()));
    let pid = command.pid();
    drop(command);
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
    assert!(!ran.exists());
}

#[test]
fn failed_exec_is_told_as_shells_do() {
    for (program, status) in [("/no/such/program", 127), ("no-such-program-in-path", 127), ("/etc/passwd", 126)] {
        let mut command = PreparedCommand::prepare(&words(&[program]), true, CommandOutput::Inherited).unwrap();
        let error = command.start().unwrap_err();
        assert_eq!(error.exit_status(), status, "{error}");
        assert_eq!(error.to_string(), format!("cannot run {program}"));
        assert!(error.hint().is_some());
        assert!(command.try_wait().unwrap().is_some());
    }
}

#[test]
fn signals_end_it_as_in_a_shell() {
    let mut command = shell("kill -TERM $$");
    command.start().unwrap();
    assert_eq!(command.wait().unwrap().exit_status(), 128 + 15);
    let mut command = shell("sleep 60");
    command.start().unwrap();
    command.forward(Signal::SIGTERM).unwrap();
    assert_eq!(command.wait().unwrap(), CommandStatus::Signaled(15));
    command.forward(Signal::SIGTERM).unwrap();
}

#[test]
fn starts_with_plain_signals_and_no_descriptor_of_ours() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    let _ours = fs::File::create(directory.path().join("ours")).unwrap();
    let mut command = shell(&format!("cat /proc/self/status > {0}; ls -l /proc/self/fd/ >> {0}", out.display()));
    command.start().unwrap();
    command.wait().unwrap();
    let text = fs::read_to_string(&out).unwrap();
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim().to_owned();
    assert_eq!(value("SigBlk:"), "0000000000000000");
    let ignored = u64::from_str_radix(&value("SigIgn:"), 16).unwrap();
    assert_eq!(ignored & (1 << (libc::SIGPIPE - 1)), 0);
    assert!(text.contains("/out") && !text.contains("/ours"), "{text}");
}

#[test]
fn runs_as_the_calling_user() {
    if !nix::unistd::Uid::effective().is_root() {
        crate::not_run::not_run("root");
        return;
    }
    let caller = Caller { uid: nix::unistd::Uid::from_raw(65534), gid: nix::unistd::Gid::from_raw(65534) };
    let image = Image::new(&words(&["id"]), Some(caller), CommandOutput::Inherited).unwrap();
    let credentials = image.credentials.unwrap();
    assert_eq!((credentials.uid, credentials.gid), (65534, 65534));
    assert!(credentials.groups.contains(&65534));
}

#[test]
fn only_roots_own_variables_change() {
    let Some(root) = User::from_uid(nix::unistd::Uid::from_raw(0)).unwrap() else { return };
    let user = User { name: "ada".into(), dir: "/home/ada".into(), ..root.clone() };
    let own = |name: &str, value: &OsStr| users_own(OsStr::new(name), value, &user);
    assert_eq!(own("HOME", root.dir.as_os_str()), Some("/home/ada".into()));
    assert_eq!(own("USER", OsStr::new(&root.name)), Some("ada".into()));
    assert_eq!(own("HOME", OsStr::new("/elsewhere")), None);
    assert_eq!(own("PATH", root.dir.as_os_str()), None);
}
