//! The committed BPF object, its manifest and its sources belong together; so do the HTML report's page and its sources.

#[path = "../../xtask/src/digest.rs"]
mod digest;

use std::fs;
use std::path::Path;

use serde::Deserialize;

#[derive(Deserialize)]
struct Manifest {
    sources: Sources,
    object: Object,
}

#[derive(Deserialize)]
struct PageManifest {
    sources: Sources,
    page: Object,
}

#[derive(Deserialize)]
struct Sources {
    sha256: String,
}

#[derive(Deserialize)]
struct Object {
    file: String,
    sha256: String,
    size: usize,
}

#[test]
fn sources_manifest_and_object_belong_together() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let prebuilt = package.join("prebuilt");
    let manifest = fs::read_to_string(prebuilt.join("manifest.toml")).unwrap();
    let manifest: Manifest = toml::from_str(&manifest).unwrap();

    let object = fs::read(prebuilt.join(&manifest.object.file)).unwrap();
    let found = (object.len(), digest::of_bytes(&object));
    let renew = "run `cargo xtask bpf build` and commit tachyon/prebuilt";
    assert_eq!(found, (manifest.object.size, manifest.object.sha256), "the BPF object is not the manifest's: {renew}");

    let sources = digest::of_sources(package.parent().unwrap()).unwrap();
    assert_eq!(sources, manifest.sources.sha256, "the BPF sources changed after the object was built: {renew}");
}

#[test]
fn the_page_its_manifest_and_its_sources_belong_together() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let prebuilt = package.join("prebuilt");
    let manifest: PageManifest = toml::from_str(&fs::read_to_string(prebuilt.join("report.toml")).unwrap()).unwrap();
    let page = fs::read(prebuilt.join(&manifest.page.file)).unwrap();
    let renew = "run `cargo xtask page build` and commit tachyon/prebuilt";
    let found = (page.len(), digest::of_bytes(&page));
    assert_eq!(found, (manifest.page.size, manifest.page.sha256), "the page is not the manifest's: {renew}");
    let sources = digest::of_page(package.parent().unwrap()).unwrap();
    assert_eq!(sources, manifest.sources.sha256, "the page's sources changed after it was made: {renew}");
}

#[test]
fn the_page_knows_each_cause_of_a_wait() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let docs = fs::read_to_string(package.join("../docs/waiting.md")).unwrap();
    let states = fs::read_to_string(package.join("report-page/src/states.ts")).unwrap();
    let (_, table) = docs.split_once("| cause | what was waited for |").unwrap();
    let rows = table.lines().skip(1).take_while(|line| line.starts_with('|')).filter_map(|row| row.split('|').nth(1));
    let causes: Vec<_> = rows.flat_map(|names| names.split('`').skip(1).step_by(2)).collect();
    assert!(causes.len() >= 11, "{causes:?}");
    for cause in causes {
        assert!(states.contains(&format!("  [\"{cause}\", ")), "the page takes `{cause}` for `other`");
    }
}
