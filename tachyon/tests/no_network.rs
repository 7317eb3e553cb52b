//! The program that holds capabilities uses no network: nothing that could is among its dependencies, or is imported.

use object::{Object as _, ObjectSymbol as _};
use std::collections::{BTreeMap, BTreeSet};

/// Crates that speak HTTP, TLS or DNS.
const NETWORK: [&str; 16] = [
    "curl",
    "h2",
    "hickory-resolver",
    "http",
    "hyper",
    "native-tls",
    "object_store",
    "openssl",
    "quinn",
    "reqwest",
    "ring",
    "rustls",
    "tonic",
    "trust-dns-resolver",
    "tungstenite",
    "ureq",
];

#[test]
fn no_dependency_speaks_to_a_network() {
    let lock = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.lock")).unwrap();
    let lock: toml::Table = lock.parse().unwrap();
    let mut needs: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in lock["package"].as_array().unwrap() {
        let of = needs.entry(package["name"].as_str().unwrap()).or_default();
        let names = package.get("dependencies").and_then(toml::Value::as_array).into_iter().flatten();
        // A name may be followed by its version.
        of.extend(names.map(|name| name.as_str().unwrap().split(' ').next().unwrap()));
    }
    let (mut met, mut left) = (BTreeSet::from(["tachyon"]), vec!["tachyon"]);
    while let Some(name) = left.pop() {
        left.extend(needs[name].iter().filter(|name| met.insert(name)));
    }
    assert!(met.len() > 50, "the lock file was not understood: {met:?}");
    let found: Vec<_> = NETWORK.iter().filter(|name| met.contains(*name)).collect();
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn the_program_imports_no_resolver_and_accepts_no_connection() {
    let program = std::fs::read(env!("CARGO_BIN_EXE_tachyon-bpf")).unwrap();
    let program = object::File::parse(&*program).unwrap();
    let imports: BTreeSet<String> = program
        .dynamic_symbols()
        .filter(object::ObjectSymbol::is_undefined)
        .filter_map(|it| Some(it.name().ok()?.to_owned()))
        .collect();
    assert!(imports.contains("openat") || imports.contains("open64"), "the imports were not understood: {imports:?}");
    for name in ["getaddrinfo", "gethostbyname", "res_query", "accept", "accept4", "listen", "SSL_new"] {
        assert!(!imports.contains(name), "{name}");
    }
}
