//! Folders and files that are not the user's own are not used.

use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::*;

fn folder() -> (tempfile::TempDir, Folder) {
    let above = tempfile::tempdir().expect("a folder");
    let folder = SymbolCache::at(above.path().join("symbols")).open().expect("it is ours");
    (above, folder)
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("it is ours");
}

#[test]
fn files_are_written_read_and_replaced() {
    let (above, folder) = folder();
    let path = above.path().join("symbols");
    assert_eq!(std::fs::metadata(&path).expect("made").mode() & 0o777, 0o700);
    assert_eq!(folder.read("1-2.names"), None);
    for content in [&b"one"[..], b"another"] {
        folder.write("1-2.names", content).expect("written");
        assert_eq!(folder.read("1-2.names").as_deref(), Some(content));
    }
    let names: Vec<_> =
        std::fs::read_dir(&path).expect("there").map(|entry| entry.expect("there").file_name()).collect();
    assert_eq!(names, ["1-2.names"]);
    assert_eq!(std::fs::metadata(path.join("1-2.names")).expect("there").mode() & 0o777, 0o600);
    folder.write("1-2.names", &vec![0; MAX_PACKED + 1]).expect("written");
    assert_eq!(folder.read("1-2.names"), None, "too large");
}

#[test]
fn what_others_may_write_or_point_at_is_refused() {
    let (above, folder) = folder();
    let path = above.path().join("symbols");
    folder.write("1-2.names", b"text").expect("written");
    for (mode, is_read) in [(0o644, true), (0o620, false), (0o602, false), (0o600, true)] {
        set_mode(&path.join("1-2.names"), mode);
        assert_eq!(folder.read("1-2.names").is_some(), is_read, "{mode:o}");
    }
    symlink("1-2.names", path.join("3-4.names")).expect("a link");
    assert_eq!(folder.read("3-4.names"), None);
    std::fs::create_dir(path.join("5-6.names")).expect("a folder");
    assert_eq!(folder.read("5-6.names"), None);
    nix::unistd::mkfifo(&path.join("7-8.names"), Mode::S_IRUSR).expect("a fifo");
    assert_eq!(folder.read("7-8.names"), None);
    for (mode, is_used) in [(0o755, true), (0o770, false), (0o702, false), (0o700, true)] {
        set_mode(&path, mode);
        assert_eq!(SymbolCache::at(path.clone()).open().is_some(), is_used, "{mode:o}");
    }
    let below = SymbolCache { base: path.clone(), below: &["link", "symbols"] };
    symlink(above.path(), path.join("link")).expect("a link");
    assert!(below.open().is_none(), "a link that leads elsewhere");
    if geteuid().is_root() {
        std::os::unix::fs::chown(path.join("1-2.names"), Some(65_534), None).expect("root may");
        assert_eq!(folder.read("1-2.names"), None, "another user's file");
        std::os::unix::fs::chown(&path, Some(65_534), None).expect("root may");
        assert!(SymbolCache::at(path).open().is_none(), "another user's folder");
    }
}

#[test]
fn the_least_recently_used_files_go_first() {
    let (above, folder) = folder();
    let path = above.path().join("symbols");
    let now = SystemTime::now();
    let age = |name: &str, age: u64| {
        let file = File::options().write(true).open(path.join(name)).expect("there");
        file.set_modified(now - Duration::from_secs(age)).expect("it is ours");
    };
    for number in 0..10 {
        let name = format!("{number}{}", Kind::ALL[number as usize % 2].extension());
        folder.write(&name, &[0; 100]).expect("written");
        age(&name, 1_000 + number * 1_000);
    }
    std::fs::write(path.join("others"), [0; 5_000]).expect("written");
    std::fs::write(path.join("9.0.part"), []).expect("written");
    std::fs::write(path.join("8.0.part"), []).expect("written");
    age("9.0.part", 4_000);
    // Reading a file is using it.
    assert!(folder.read("9.rules").is_some());
    folder.tidy_to(999, 500);
    let mut left: Vec<_> = folder.files().into_iter().map(|file| file.name).collect();
    left.sort();
    assert_eq!(left, ["0.names", "1.rules", "2.names", "3.rules", "8.0.part", "9.rules"]);
    assert!(path.join("others").exists(), "what is not ours is left alone");
    folder.tidy_to(999, 500);
    assert_eq!(folder.files().len(), 6);
}

#[test]
fn where_the_environment_says() {
    let home = tempfile::tempdir().expect("a folder");
    let base = home.path().to_owned();
    let found = |variables: &[(&str, &str)]| {
        SymbolCache::of(|name| {
            let value = variables.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)?;
            Some(PathBuf::from(value.replace('~', base.to_str().expect("text"))))
        })
    };
    let at = |below: &'static [&'static str]| Some(SymbolCache { base: base.clone(), below });
    assert_eq!(found(&[("TACHYON_SYMBOL_CACHE", "off"), ("HOME", "~")]), None);
    assert_eq!(found(&[("TACHYON_SYMBOL_CACHE", "~"), ("CACHE_DIRECTORY", "~")]), at(&[]));
    assert_eq!(found(&[("CACHE_DIRECTORY", "~:/other"), ("HOME", "~")]), at(&["symbols"]));
    assert_eq!(found(&[("XDG_CACHE_HOME", "~"), ("HOME", "/")]), at(&["tachyon-bpf", "symbols"]));
    assert_eq!(found(&[("HOME", "~")]), at(&[".cache", "tachyon-bpf", "symbols"]));
    let made = found(&[("HOME", "~")]).and_then(|cache| cache.open());
    assert!(made.is_some() && base.join(".cache/tachyon-bpf/symbols").is_dir());
    if geteuid().is_root() {
        std::os::unix::fs::chown(&base, Some(65_534), None).expect("root may");
        // The calling user's, under sudo.
        assert_ne!(found(&[("HOME", "~")]), at(&[".cache", "tachyon-bpf", "symbols"]));
    }
}
