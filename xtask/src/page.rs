//! The only builder of the HTML report's page and of the fleet's, and the check that the committed pages match their sources.
//!
//! The sources of both are `tachyon/report-page/`; `package-lock.json` pins every package with its hash, and esbuild gives the
//! same bytes for the same sources. What npm installs is in the cache directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::command::{self, project_root};
use crate::{apt, cache, digest};

mod bench;

/// `cargo xtask page ...`.
#[derive(clap::Subcommand)]
pub(crate) enum PageCommand {
    /// Check the pages' types, bundle them, and write them and their manifests into tachyon/prebuilt and tachyon-fleet/prebuilt
    Build,
    /// Bundle the pages again and compare their bytes with the committed ones
    Check,
    /// Open a report of a million samples, and the same samples in speedscope, and measure what a user waits for
    Bench(bench::BenchArgs),
}

const SOURCES: &str = "tachyon/report-page";
/// Pages, their manifests, and where they are committed.
const PAGES: [(&str, &str, &str); 2] =
    [("report.html", "report.toml", "tachyon/prebuilt"), ("fleet.html", "fleet.toml", "tachyon-fleet/prebuilt")];

/// What a page was made from, stored beside it. `package-lock.json`, one of the sources, lists the tools.
#[derive(Serialize)]
struct Manifest {
    sources: Sources,
    page: PageFacts,
}

#[derive(Serialize)]
struct Sources {
    sha256: String,
}

#[derive(Serialize)]
struct PageFacts {
    file: &'static str,
    sha256: String,
    size: usize,
}

/// Runs `cargo xtask page ...`.
///
/// # Errors
/// A package is not available, the types do not match, or (check) the bytes differ.
pub(crate) fn run(command: &PageCommand) -> Result<()> {
    match command {
        PageCommand::Build => each_page(write),
        PageCommand::Check => each_page(compare),
        PageCommand::Bench(args) => bench::run(args),
    }
}

/// Bundles the pages, and does something with the path and the bytes of each page and each manifest.
fn each_page(done: impl Fn(&Path, &[u8]) -> Result<()>) -> Result<()> {
    for ((name, manifest_name, directory), page) in PAGES.into_iter().zip(bundle()?) {
        let directory = project_root().join(directory);
        done(&directory.join(manifest_name), manifest_of(name, &page)?.as_bytes())?;
        done(&directory.join(name), &page)?;
    }
    Ok(())
}

fn write(path: &Path, contents: &[u8]) -> Result<()> {
    let directory = path.parent().expect("it lies in a directory");
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    fs::write(path, contents).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("wrote {} ({} bytes)", path.display(), contents.len());
    Ok(())
}

fn compare(path: &Path, contents: &[u8]) -> Result<()> {
    let committed = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(
        committed == contents,
        "the committed {} differs from what its sources give: {} bytes, sha256 {}; made again: {} bytes, sha256 {}\n\
         hint: cargo xtask page build, then commit tachyon/prebuilt and tachyon-fleet/prebuilt",
        path.display(),
        committed.len(),
        digest::of_bytes(&committed),
        contents.len(),
        digest::of_bytes(contents),
    );
    eprintln!("{} is what its sources give: {} bytes, byte for byte", path.display(), contents.len());
    Ok(())
}

fn manifest_of(file: &'static str, page: &[u8]) -> Result<String> {
    let manifest = Manifest {
        sources: Sources { sha256: digest::of_page(project_root()).context("cannot read the page's sources")? },
        page: PageFacts { file, sha256: digest::of_bytes(page), size: page.len() },
    };
    let text = toml::to_string(&manifest).context("cannot write the manifest")?;
    Ok(format!("# Written by `cargo xtask page build`, never by hand.\n\n{text}"))
}

/// Bundles a copy of the sources beside what npm installs for them.
fn bundle() -> Result<Vec<Vec<u8>>> {
    apt::ensure(&[("npm", "npm")])?;
    let stage = cache::dir()?.join("report-page");
    let _lock = cache::lock(&stage)?;
    let sources = project_root().join(SOURCES);
    cache::remove(&stage.join("src"))?;
    for file in digest::page_sources(project_root()).context("cannot read the page's sources")? {
        let target = stage.join(file.strip_prefix(&sources).expect("the sources lie there"));
        let parent = target.parent().expect("a file below the stage has a parent");
        fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        fs::copy(&file, &target).with_context(|| format!("cannot copy {}", file.display()))?;
    }
    install(&stage)?;
    command::run_quietly("checking the page's types", npm(&stage).args(["run", "check"]))?;
    command::run_quietly("bundling the pages", npm(&stage).args(["run", "build", "--"]).arg(&stage))?;
    let read = |(name, ..): (&str, &str, &str)| {
        let out: PathBuf = stage.join(name);
        fs::read(&out).with_context(|| format!("cannot read {}", out.display()))
    };
    PAGES.into_iter().map(read).collect()
}

fn install(stage: &Path) -> Result<()> {
    let lock = fs::read(stage.join("package-lock.json")).context("the page has no package-lock.json")?;
    let stamp = digest::of_bytes(&lock);
    if cache::is_finished(stage, &stamp) {
        return Ok(());
    }
    if cache::was_finished(stage) {
        cache::reopen(stage)?;
    }
    command::run_quietly("npm ci of the page", npm(stage).args(["ci", "--no-audit", "--no-fund", "--ignore-scripts"]))?;
    cache::finish(stage, &stamp)
}

fn npm(stage: &Path) -> Command {
    let mut npm = Command::new("npm");
    npm.current_dir(stage);
    npm
}
