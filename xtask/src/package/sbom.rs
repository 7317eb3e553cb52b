//! The bill of materials of a release, in CycloneDX 1.5's JSON: what is in the program, with versions, licences and digests, so that
//! a scanner can say which known vulnerabilities concern it.
//!
//! It depends only on the lock files, and contains no paths of the machine that makes it (unlike `cargo cyclonedx` and maturin).

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use cyclonedx_bom::external_models::date_time::DateTime;
use cyclonedx_bom::external_models::uri::{Purl, Uri};
use cyclonedx_bom::models::bom::{Bom, SpecVersion};
use cyclonedx_bom::models::component::{Classification, Component, Components};
use cyclonedx_bom::models::dependency::{Dependencies, Dependency};
use cyclonedx_bom::models::external_reference::{
    ExternalReference, ExternalReferenceType, ExternalReferences, Uri as Reference,
};
use cyclonedx_bom::models::hash::{Hash, HashAlgorithm, HashValue, Hashes};
use cyclonedx_bom::models::license::{LicenseChoice, Licenses};
use cyclonedx_bom::models::metadata::Metadata;
use cyclonedx_bom::validation::Validate as _;

use super::commit_time;
use super::linked::{Bundled, Linked, Package, bundled, checksums};
use crate::vm::machine::Machine;
use crate::{cache, command, tools, zoo};

/// Its name in an archive.
pub(super) const FILE: &str = "tachyon-bpf.cdx.json";

/// CycloneDX's own library, with the schemas.
const VALIDATOR: &str = "cyclonedx-python-lib[json-validation]==11.12.0";

/// Lets CycloneDX's own validator judge a bill of materials.
///
/// # Errors
/// The validator is not available, or finds a fault.
pub(super) fn judge(bill: &Path) -> Result<()> {
    let python = zoo::newest_supported().context("no CPython 3.11 to 3.13 in pyenv")?;
    let programs = tools::in_venv(&python, &cache::dir()?.join("cyclonedx"), VALIDATOR)?;
    let script = "import sys\n\
                  from cyclonedx.schema import SchemaVersion\n\
                  from cyclonedx.validation.json import JsonStrictValidator\n\
                  fault = JsonStrictValidator(SchemaVersion.V1_5).validate_str(open(sys.argv[1]).read())\n\
                  assert fault is None, fault";
    command::stdout(Command::new(programs.join("python")).args(["-c", script]).arg(bill)).map(drop)
}

/// What is in the program for a processor.
///
/// # Errors
/// A lock file cannot be read, or the bill would not be valid.
pub(super) fn of(machine: Machine) -> Result<Vec<u8>> {
    let root = command::project_root();
    let mut bill = Bill::default();
    let program = Linked::into_program(machine)?;
    bill.add(&program, &checksums(&root.join("Cargo.lock"))?)?;
    let object = Linked::into_object()?;
    bill.add(&object, &checksums(&root.join("tachyon-ebpf/Cargo.lock"))?)?;
    let mut application = component(Classification::Application, "generic", "tachyon-bpf", &program.root.1)?;
    let own = application.bom_ref.clone().context("it was made with one")?;
    let mut parts = bill.calls.remove(&reference(&program.root)?).unwrap_or_default();
    parts.extend(bill.calls.remove(&reference(&object.root)?).unwrap_or_default());
    for package in bundled()? {
        parts.push(bill.bundle(&package)?);
    }
    parts.sort();
    parts.dedup();
    bill.calls.insert(own, parts);
    application.description =
        Some(text("A Linux profiler for running CPython programs, its BPF object and its report's page"));
    application.licenses = Some(licence("(Apache-2.0 OR MIT) AND (MIT OR GPL-2.0-only)"));
    let seconds: u64 = commit_time()?.parse().context("git told no time")?;
    let made = humantime::format_rfc3339_seconds(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).to_string();
    let metadata = Metadata {
        timestamp: Some(DateTime::try_from(made).context("the commit's time")?),
        component: Some(application),
        ..Metadata::default()
    };
    let dependencies =
        bill.calls.into_iter().map(|(dependency_ref, dependencies)| Dependency { dependency_ref, dependencies });
    let bom = Bom {
        // The same sources must give the same bytes: a random number would differ.
        serial_number: None,
        metadata: Some(metadata),
        components: Some(Components(bill.components.into_values().collect())),
        dependencies: Some(Dependencies(dependencies.collect())),
        spec_version: SpecVersion::V1_5,
        ..Bom::default()
    };
    let checked = bom.validate_version(SpecVersion::V1_5);
    ensure!(checked.passed(), "the bill of materials is not valid: {checked:?}");
    let mut json = Vec::new();
    bom.output_as_json_v1_5(&mut json).context("cannot write the bill of materials")?;
    json.push(b'\n');
    Ok(json)
}

/// What has been collected so far, by reference: a package's URL.
#[derive(Default)]
struct Bill {
    components: BTreeMap<String, Component>,
    calls: BTreeMap<String, Vec<String>>,
}

impl Bill {
    fn add(&mut self, linked: &Linked, sums: &BTreeMap<(String, String), String>) -> Result<()> {
        for package in linked.libraries() {
            let sum = sums.get(&(package.name.clone(), package.version.clone()));
            ensure!(sum.is_some() != package.is_own(), "{} {}: is its archive pinned?", package.name, package.version);
            let component = library(package, sum)?;
            self.components.insert(component.bom_ref.clone().context("it was made with one")?, component);
        }
        for (caller, called) in linked.calls() {
            let called = called.iter().map(reference).collect::<Result<Vec<_>>>()?;
            self.calls.insert(reference(caller)?, called);
        }
        Ok(())
    }

    /// Adds an npm package. Returns its reference.
    fn bundle(&mut self, package: &Bundled) -> Result<String> {
        let mut component = component(Classification::Library, "npm", &package.name, &package.version)?;
        component.licenses = package.license.as_deref().map(licence);
        let integrity = package.integrity.as_deref().and_then(|text| text.strip_prefix("sha512-"));
        let digest = integrity.with_context(|| format!("{} is not pinned", package.name))?;
        let digest = base64::engine::general_purpose::STANDARD.decode(digest).context("an npm package's digest")?;
        component.hashes = Some(hash(HashAlgorithm::SHA_512, &hexadecimal(&digest)));
        let reference = component.bom_ref.clone().context("it was made with one")?;
        self.components.insert(reference.clone(), component);
        Ok(reference)
    }
}

/// A crate, and the C library that it brings with it, if it does.
fn library(package: &Package, sum: Option<&String>) -> Result<Component> {
    let mut made = component(Classification::Library, "cargo", &package.name, &package.version)?;
    made.licenses = package.license.as_deref().map(licence);
    made.hashes = sum.map(|sum| hash(HashAlgorithm::SHA_256, sum));
    made.external_references = package.repository.as_deref().map(|url| {
        let url = Reference::Url(Uri::new(url));
        let external_reference_type = ExternalReferenceType::Vcs;
        ExternalReferences(vec![ExternalReference { external_reference_type, url, comment: None, hashes: None }])
    });
    // The version of `zstd-sys` says which Zstandard sources it contains.
    if let Some((_, version)) = package.version.split_once("+zstd.") {
        let mut zstandard = component(Classification::Library, "generic", "zstd", version)?;
        zstandard.licenses = Some(licence("BSD-3-Clause"));
        made.components = Some(Components(vec![zstandard]));
    }
    Ok(made)
}

fn component(kind: Classification, ecosystem: &str, name: &str, version: &str) -> Result<Component> {
    let purl = Purl::new(ecosystem, name, version).with_context(|| format!("{name} {version}"))?;
    let mut made = Component::new(kind, name, version, Some(purl.to_string()));
    made.purl = Some(purl);
    Ok(made)
}

fn reference((name, version): &(String, String)) -> Result<String> {
    Ok(Purl::new("cargo", name, version).with_context(|| format!("{name} {version}"))?.to_string())
}

/// Old crates write `/` where SPDX has `OR`.
fn licence(expression: &str) -> Licenses {
    Licenses(vec![LicenseChoice::expression(&expression.replace('/', " OR "))])
}

fn hash(alg: HashAlgorithm, hexadecimal: &str) -> Hashes {
    Hashes(vec![Hash { alg, content: HashValue(hexadecimal.to_owned()) }])
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn text(text: &str) -> cyclonedx_bom::prelude::NormalizedString {
    cyclonedx_bom::prelude::NormalizedString::new(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_the_program_is_told() {
        let made = of(Machine::Arm64).unwrap();
        assert_eq!(made, of(Machine::Arm64).unwrap(), "the same bytes of the same sources");
        let text = String::from_utf8(made).unwrap();
        let root = command::project_root().display().to_string();
        assert!(!text.contains(&root) && !text.contains("path+file"), "paths of this machine");
        let bill: serde_json::Value = serde_json::from_str(&text).unwrap();
        let components = bill["components"].as_array().unwrap();
        let find = |purl: &str| components.iter().find(|found| found["purl"].as_str().unwrap().starts_with(purl));
        // Linked into the program, into the BPF object, into the page.
        for (purl, algorithm) in
            [("pkg:cargo/aya@0.14.0", "SHA-256"), ("pkg:cargo/aya-ebpf@", "SHA-256"), ("pkg:npm/preact@", "SHA-512")]
        {
            let found = find(purl).unwrap_or_else(|| panic!("{purl} is missing"));
            assert_eq!(found["hashes"][0]["alg"], algorithm);
            assert!(found["licenses"][0]["expression"].is_string(), "{found}");
        }
        let zstd = find("pkg:cargo/zstd-sys@").unwrap();
        assert_eq!(zstd["components"][0]["name"], "zstd");
        // These are used to make it, but are not in it.
        for absent in ["pkg:cargo/criterion@", "pkg:cargo/serde_derive@", "pkg:cargo/syn@", "pkg:npm/esbuild@"] {
            assert!(find(absent).is_none(), "{absent}");
        }
        // Everything that is called is there.
        let known: Vec<&str> = components.iter().map(|found| found["bom-ref"].as_str().unwrap()).collect();
        for dependency in bill["dependencies"].as_array().unwrap() {
            for called in dependency["dependsOn"].as_array().into_iter().flatten() {
                assert!(known.contains(&called.as_str().unwrap()), "{called} is called by {}", dependency["ref"]);
            }
        }
    }
}
