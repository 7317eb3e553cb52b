//! What segments take in each form: `sizes SPOOL...` prints a line of JSON for each spool. docs/fleet.md has a table made of it.

use prost::Message as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tachyon_fleet::net::http::gzip;
use tachyon_fleet::segment::{self, Options, Segment};
use tachyon_fleet::ship::config::PyroscopeConfig;
use tachyon_fleet::ship::otlp;
use tachyon_fleet::ship::pyroscope::{Series, encode};
use tachyon_fleet::tables;

fn size(path: &Path) -> usize {
    fs::metadata(path).map_or(0, |stat| usize::try_from(stat.len()).unwrap_or(usize::MAX))
}

fn main() {
    for spool in std::env::args().skip(1) {
        let mut paths: Vec<PathBuf> = fs::read_dir(&spool).expect("a spool").map(|it| it.unwrap().path()).collect();
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "tach"));
        paths.sort();
        let options = Options { slice: Duration::from_secs(60), start: None };
        let segments: Vec<Arc<Segment>> =
            paths.iter().map(|path| Arc::new(segment::read(path, options).expect("a segment"))).collect();
        let [mut tach, mut account, mut parquet, mut objects, mut wire, mut packed, mut pprof, mut samples, mut rows] =
            [0; 9];
        let config = PyroscopeConfig { max_age: Duration::from_secs(1 << 40), ..PyroscopeConfig::default() };
        for (path, segment) in paths.iter().zip(&segments) {
            tach += size(path);
            account += size(&path.with_extension("json"));
            samples += usize::try_from(segment.sample_count).unwrap_or(0);
            rows += segment.samples.len();
            for file in tables::files(segment).expect("tables") {
                parquet += file.bytes.len();
                objects += 1;
            }
            for message in otlp::messages(segment, 3 << 20) {
                let bytes = message.request.encode_to_vec();
                wire += bytes.len();
                packed += gzip(&bytes).len();
            }
            let encoding = encode(segment, &config, &mut Series::default(), segment.start_ms as f64 / 1e3);
            pprof += encoding.requests.iter().map(|request| request.push.encoded_len()).sum::<usize>();
        }
        let joined = tables::files(&Segment::joined(&segments)).expect("tables");
        let joined_bytes: usize = joined.iter().map(|file| file.bytes.len()).sum();
        println!(
            "{}",
            serde_json::json!({
                "spool": spool, "segments": segments.len(), "samples": samples, "rows": rows, "tach": tach, "account": account,
                "parquet": parquet, "objects": objects, "joined_parquet": joined_bytes, "joined_objects": joined.len(),
                "otlp": wire, "otlp_gzip": packed, "pprof": pprof,
            })
        );
    }
}
