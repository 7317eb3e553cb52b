use super::*;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};

fn at(directory: &tempfile::TempDir, name: &str) -> (PathBuf, Destination) {
    let path = directory.path().join(name);
    (path.clone(), Destination::Path(path))
}

fn names(directory: &tempfile::TempDir) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn appears_whole_at_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let (path, destination) = at(&directory, "x.tach");
    let output = OutputFile::create(&destination, false).unwrap();
    assert_eq!(names(&directory), ["x.tach.part"]);
    assert_eq!(output.part_path().unwrap(), directory.path().join("x.tach.part"));
    output.file().write_all(b"data").unwrap();
    output.commit().unwrap();
    assert_eq!(names(&directory), ["x.tach"]);
    assert_eq!(fs::read(&path).unwrap(), b"data");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn vanishes_unless_kept() {
    let directory = tempfile::tempdir().unwrap();
    let (_, destination) = at(&directory, "x");
    drop(OutputFile::create(&destination, false).unwrap());
    assert!(names(&directory).is_empty());
    let kept = OutputFile::create(&destination, false).unwrap().keep_part().unwrap();
    assert_eq!(kept, directory.path().join("x.part"));
    assert_eq!(names(&directory), ["x.part"]);
}

#[test]
fn existing_files_need_force() {
    let directory = tempfile::tempdir().unwrap();
    let (path, destination) = at(&directory, "x");
    fs::write(&path, "old").unwrap();
    for result in [check(&destination, false), OutputFile::create(&destination, false).map(drop)] {
        assert!(matches!(result, Err(OutputError::Exists { .. })));
    }
    check(&destination, true).unwrap();
    write_whole(&destination, true, b"new").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
}

#[test]
fn a_name_taken_meanwhile_is_not_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let (path, destination) = at(&directory, "x");
    let output = OutputFile::create(&destination, false).unwrap();
    fs::write(&path, "another's").unwrap();
    let error = output.commit().unwrap_err();
    assert!(matches!(&error, OutputError::Rename { source, .. } if source.kind() == io::ErrorKind::AlreadyExists));
    assert_eq!(names(&directory), ["x", "x.part"]);
    assert_eq!(fs::read(&path).unwrap(), b"another's");
}

#[test]
fn links_and_directories_are_never_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let (victim, _) = at(&directory, "victim");
    fs::write(&victim, "precious").unwrap();
    let (link, to_link) = at(&directory, "link");
    symlink(&victim, &link).unwrap();
    let (folder, to_folder) = at(&directory, "folder");
    fs::create_dir(&folder).unwrap();
    for destination in [to_link, to_folder] {
        let result = OutputFile::create(&destination, true);
        assert!(matches!(result, Err(OutputError::NotRegular { .. })), "{destination:?}");
    }
    // A link planted as the .part is neither followed nor replaced.
    symlink(&victim, directory.path().join("y.part")).unwrap();
    let (_, destination) = at(&directory, "y");
    assert!(matches!(OutputFile::create(&destination, true), Err(OutputError::NotRegular { .. })));
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
}

#[test]
fn a_stale_part_needs_force_and_a_running_one_stands() {
    let directory = tempfile::tempdir().unwrap();
    let (_, destination) = at(&directory, "x");
    fs::write(directory.path().join("x.part"), "cut").unwrap();
    for result in [check(&destination, false), OutputFile::create(&destination, false).map(drop)] {
        assert!(matches!(result, Err(OutputError::StalePart { .. })));
    }
    let running = OutputFile::create(&destination, true).unwrap();
    for force in [false, true] {
        assert!(matches!(check(&destination, force), Err(OutputError::BusyPart { .. })));
        assert!(matches!(OutputFile::create(&destination, force), Err(OutputError::BusyPart { .. })));
    }
    running.commit().unwrap();
    assert_eq!(names(&directory), ["x"]);
}

#[test]
fn directories_are_checked() {
    let directory = tempfile::tempdir().unwrap();
    let (_, missing) = at(&directory, "no/such/x");
    assert!(matches!(check(&missing, false), Err(OutputError::Directory { .. })));
    let (_, trailing) = at(&directory, "x/");
    assert!(matches!(check(&trailing, false), Err(OutputError::NoFileName { .. })));
    assert!(matches!(check(&Destination::Path("/".into()), false), Err(OutputError::NoFileName { .. })));
}

#[test]
fn dash_is_standard_output() {
    assert_eq!(Destination::from_argument("-".into()), Destination::Stdout);
    assert_eq!(Destination::from_argument("./-".into()), Destination::Path("./-".into()));
    assert!(OutputFile::create(&Destination::Stdout, false).unwrap().part_path().is_none());
}
