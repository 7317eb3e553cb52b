//! What the program consists of: the crates that are linked into it and into its BPF object, from `cargo metadata`, and the npm
//! packages that are bundled into the page of its report.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::command;
use crate::vm::machine::Machine;

/// A part of the output of `cargo metadata`.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

/// A crate.
#[derive(Deserialize)]
pub(super) struct Package {
    id: String,
    pub(super) name: String,
    pub(super) version: String,
    pub(super) license: Option<String>,
    pub(super) repository: Option<String>,
    source: Option<String>,
    pub(super) manifest_path: PathBuf,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Target {
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<Kind>,
}

#[derive(Deserialize)]
struct Kind {
    /// `dev` or `build`; absent for what is linked.
    kind: Option<String>,
}

impl Package {
    /// Whether it is one of the project's own.
    pub(super) fn is_own(&self) -> bool {
        self.source.is_none()
    }

    fn runs_in_the_compiler(&self) -> bool {
        self.targets.iter().any(|target| target.kind.iter().any(|kind| kind == "proc-macro"))
    }
}

/// Crates that are linked, by name and version.
pub(super) struct Linked {
    packages: BTreeMap<(String, String), Package>,
    /// Which ones each of them calls.
    calls: BTreeMap<(String, String), BTreeSet<(String, String)>>,
    pub(super) root: (String, String),
}

impl Linked {
    /// What is linked into the program for this processor.
    pub(super) fn into_program(machine: Machine) -> Result<Self> {
        let mut cargo = metadata(command::project_root());
        cargo.args(["--filter-platform", &machine.triple()]);
        Self::read(&mut cargo, "tachyon")
    }

    /// What is linked into the BPF object. It is the same for each processor.
    pub(super) fn into_object() -> Result<Self> {
        Self::read(&mut metadata(&command::project_root().join("tachyon-ebpf")), "tachyon-ebpf")
    }

    fn read(cargo: &mut Command, root: &str) -> Result<Self> {
        let metadata: Metadata = serde_json::from_str(&command::stdout(cargo)?).context("cargo's metadata")?;
        let key = |package: &Package| (package.name.clone(), package.version.clone());
        let root = metadata.packages.iter().find(|found| found.name == root && found.is_own());
        let (root, first) =
            root.map(|found| (key(found), found.id.clone())).context("cargo does not know the package")?;
        let packages: BTreeMap<&str, &Package> =
            metadata.packages.iter().map(|found| (found.id.as_str(), found)).collect();
        let nodes: BTreeMap<&str, &Node> = metadata.resolve.nodes.iter().map(|node| (node.id.as_str(), node)).collect();
        let called = |id: &str| {
            let dependencies = nodes.get(id).into_iter().flat_map(|node| &node.deps);
            let normal = dependencies.filter(|found| found.dep_kinds.iter().any(|kind| kind.kind.is_none()));
            let packages = normal.filter_map(|found| packages.get(found.pkg.as_str()).copied());
            packages.filter(|found| !found.runs_in_the_compiler()).collect::<Vec<_>>()
        };
        let mut calls = BTreeMap::new();
        let mut open = vec![packages[first.as_str()]];
        while let Some(package) = open.pop() {
            if let Entry::Vacant(entry) = calls.entry(key(package)) {
                let called = called(&package.id);
                entry.insert(called.iter().map(|found| key(found)).collect::<BTreeSet<_>>());
                open.extend(called);
            }
        }
        let linked = metadata.packages.into_iter().map(|found| (key(&found), found));
        let packages = linked.filter(|(key, _)| calls.contains_key(key)).collect();
        Ok(Self { packages, calls, root })
    }

    /// All of them except the root, in order of their names.
    pub(super) fn libraries(&self) -> impl Iterator<Item = &Package> {
        self.packages.iter().filter(|(key, _)| **key != self.root).map(|(_, package)| package)
    }

    /// Names and versions: who calls whom.
    pub(super) fn calls(&self) -> impl Iterator<Item = (&(String, String), &BTreeSet<(String, String)>)> {
        self.calls.iter()
    }
}

fn metadata(dir: &Path) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(dir).args(["metadata", "--format-version", "1", "--locked"]);
    cargo
}

/// The SHA-256 of each crate's archive, in hexadecimal, by name and version.
pub(super) fn checksums(lock: &Path) -> Result<BTreeMap<(String, String), String>> {
    #[derive(Deserialize)]
    struct Lock {
        package: Vec<Locked>,
    }
    #[derive(Deserialize)]
    struct Locked {
        name: String,
        version: String,
        checksum: Option<String>,
    }
    let text = fs::read_to_string(lock).with_context(|| format!("cannot read {}", lock.display()))?;
    let lock: Lock = toml::from_str(&text).with_context(|| format!("{} is no lock file", lock.display()))?;
    let sums = lock.package.into_iter().filter_map(|found| Some(((found.name, found.version), found.checksum?)));
    Ok(sums.collect())
}

/// An npm package of the report's page.
#[derive(Deserialize)]
pub(super) struct Bundled {
    #[serde(default)]
    pub(super) name: String,
    pub(super) version: String,
    pub(super) license: Option<String>,
    /// `sha512-` and the digest of its archive in base64.
    pub(super) integrity: Option<String>,
    /// It is used to make the page, but is not in it.
    #[serde(default)]
    dev: bool,
}

/// What is bundled into the pages.
pub(super) fn bundled() -> Result<Vec<Bundled>> {
    #[derive(Deserialize)]
    struct Lock {
        packages: BTreeMap<String, serde_json::Value>,
    }
    let file = command::project_root().join("tachyon/report-page/package-lock.json");
    let text = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let lock: Lock = serde_json::from_slice(&text).with_context(|| format!("{} is no lock file", file.display()))?;
    let mut found = Vec::new();
    for (path, value) in lock.packages {
        // The first one is the page itself.
        let Some((_, name)) = path.rsplit_once("node_modules/") else { continue };
        let package: Bundled =
            serde_json::from_value(value).with_context(|| format!("{path} in {}", file.display()))?;
        if !package.dev {
            found.push(Bundled { name: name.to_owned(), ..package });
        }
    }
    Ok(found)
}
