//! Images for container engines, by `buildah` from `deploy/Containerfile`: no daemon, and no registry.
//!
//! The base is only busybox, from Debian: it has `sh` and `find`, which the probes of the Kubernetes manifests call. An image is made
//! twice and compared; x86-64's is run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{commit_time, ensure_same, sbom, tar};
use crate::vm::machine::{Machine, busybox};
use crate::{apt, cache, command};

/// Applets of busybox that the probes call, and that people use to look into a container.
const APPLETS: [&str; 5] = ["sh", "find", "cat", "ls", "test"];

/// Makes the image from what is in the stage of an archive, and tries it out.
///
/// # Errors
/// It cannot be made, is not reproducible, or does not do what it must.
pub(super) fn make(machine: Machine, stage: &Path, output: &Path) -> Result<PathBuf> {
    command::require_root("making an image")?;
    apt::ensure(&[("buildah", "buildah")])?;
    let work = tempfile::tempdir().context("cannot create a directory for an image")?;
    let context = work.path().join("context");
    fs::create_dir(&context).context("cannot create a directory for an image")?;
    for file in ["tachyon-bpf", sbom::FILE] {
        fs::copy(stage.join(file), context.join(file)).with_context(|| format!("cannot copy {file}"))?;
    }
    let image = output.join(format!("tachyon-bpf-{}-{}.oci.tar", env!("CARGO_PKG_VERSION"), machine.rust()));
    let again = work.path().join("again.oci.tar");
    for archive in [&again, &image] {
        let store = Store { dir: tempfile::tempdir_in(work.path()).context("cannot create a directory for an image")? };
        store.build(machine, &context, archive)?;
        if archive == &image {
            store.try_out(machine)?;
        }
    }
    ensure_same(&image, &again)?;
    eprintln!("{}: {} KiB", image.display(), fs::metadata(&image).context("the image was just written")?.len() >> 10);
    Ok(image)
}

/// Where buildah keeps images and containers, separate from the machine's own.
struct Store {
    dir: tempfile::TempDir,
}

const BASE: &str = "localhost/busybox";

impl Store {
    fn buildah(&self, words: &[&str]) -> Command {
        let mut buildah = Command::new("buildah");
        buildah.args(["--storage-driver", "vfs", "--root"]).arg(self.dir.path().join("root"));
        buildah.arg("--runroot").arg(self.dir.path().join("run")).args(words);
        buildah
    }

    fn build(&self, machine: Machine, context: &Path, archive: &Path) -> Result<()> {
        let time = commit_time()?;
        let base = self.dir.path().join("base");
        fs::create_dir_all(base.join("bin")).context("cannot create the base of an image")?;
        fs::copy(busybox(machine, &cache::dir()?.join("vm"))?, base.join("bin/busybox"))
            .context("cannot copy busybox")?;
        for applet in APPLETS {
            std::os::unix::fs::symlink("busybox", base.join("bin").join(applet)).context("cannot link busybox")?;
        }
        let arch = machine.debian();
        let container = command::stdout(&mut self.buildah(&["from", "--arch", arch, "scratch"]))?;
        let container = container.trim();
        command::stdout(self.buildah(&["copy", "--quiet", container]).arg(&base).arg("/"))?;
        command::stdout(&mut self.buildah(&["commit", "--quiet", "--timestamp", &time, container, BASE]))?;
        let named = name();
        let based = format!("BASE={BASE}");
        let mut build =
            self.buildah(&["build", "--quiet", "--arch", arch, "--timestamp", &time, "--build-arg", &based]);
        build.args(["--pull-never", "--tag", &named, "--file"]);
        command::stdout(build.arg(command::project_root().join("deploy/Containerfile")).arg(context))?;
        // An archive from buildah contains the time at which it was written.
        let layout = self.dir.path().join("layout");
        command::stdout(&mut self.buildah(&["push", "--quiet", &named, &format!("oci:{}:{named}", layout.display())]))?;
        command::stdout(tar(&time).arg("-C").arg(&layout).arg("-cf").arg(archive).args([
            "blobs",
            "index.json",
            "oci-layout",
        ]))
        .map(drop)
    }

    fn try_out(&self, machine: Machine) -> Result<()> {
        let facts = command::stdout(&mut self.buildah(&["inspect", "--type", "image", &name()]))?;
        let facts: serde_json::Value = serde_json::from_str(&facts).context("what buildah tells of an image")?;
        let image = &facts["OCIv1"];
        ensure!(image["architecture"] == machine.debian(), "the image is for {}", image["architecture"]);
        ensure!(image["config"]["Cmd"] == serde_json::json!(["tachyon-bpf", "agent"]), "{}", image["config"]);
        let container =
            command::stdout(&mut self.buildah(&["from", "--pull-never", "--arch", machine.debian(), &name()]))?;
        let container = container.trim();
        let mounted = command::stdout(&mut self.buildah(&["mount", container]))?;
        let mounted = Path::new(mounted.trim());
        let bill = mounted.join("usr/share/doc/tachyon-bpf").join(sbom::FILE);
        ensure!(bill.is_file(), "the image has no bill of materials");
        if machine == Machine::X86_64 {
            let run = |words: &[&str]| {
                command::stdout(self.buildah(&["run", "--isolation", "chroot", container, "--"]).args(words))
            };
            let said = run(&["tachyon-bpf", "--version"])?;
            ensure!(said.contains(env!("CARGO_PKG_VERSION")), "the image's program calls itself {said:?}");
            // The probe from the manifests, on a file that was just written.
            run(&["sh", "-c", ": >/state.json && test -n \"$(find /state.json -mmin -5)\""])?;
        }
        Ok(())
    }
}

fn name() -> String {
    format!("localhost/tachyon-bpf:{}", env!("CARGO_PKG_VERSION"))
}
