//! The three questions give the same rows on DuckDB, on ClickHouse's engine (chDB), on Spark with executors of their own, and in plain Rust.

#[path = "../../tests/support/not_run.rs"]
mod not_run;
mod support;

use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Segment, succeeds, word};

/// Options of the three questions, in the order of the SQL.
const QUESTIONS: [&[&str]; 3] = [&[], &["--changes"], &["--losses"]];

/// Python with the engines that `cargo xtask test` fetches: `engines`, or `spark`.
fn engines(name: &str) -> Option<PathBuf> {
    let cache = std::env::var_os("TACHYON_CACHE").map(PathBuf::from);
    let cache = cache.or_else(|| Some(std::env::home_dir()?.join(".cache/tachyon-bpf")))?;
    Some(cache.join(name).join("bin")).filter(|programs| programs.join("python3").exists())
}

/// Tables of three hosts: services whose names are awkward, equal times, recursion, several versions, waits and losses.
fn fleet(dir: &Path) -> PathBuf {
    type Samples = Vec<(&'static str, &'static str, &'static [&'static str], u64)>;
    let day: Samples = vec![
        ("web", "1", &["main", "handle", "handle", "libz.so.1!deflate"], 30),
        ("web", "1", &["main", "handle", "Parse"], 20),
        ("web", "1", &["main", "handle", "parse"], 20),
        ("web", "1", &["main", "handle", "größe"], 20),
        ("web", "1", &["main", "<waiting: socket>"], 70),
        ("it's \"ü\"/%", "1.10", &["main"], 1),
    ];
    let night: Samples = vec![
        ("web", "2", &["main", "handle", "libz.so.1!deflate"], 10),
        ("web", "2", &["main", "handle", "Parse"], 20),
        ("web", "2", &["main", "other"], 3),
        ("it's \"ü\"/%", "1.9", &["main", "f"], 7),
        ("idle", "1", &["<waiting: lock>"], 5),
    ];
    let (spool, tables) = (dir.join("spool"), dir.join("it's tables"));
    fs::create_dir(&spool).unwrap();
    let losses: [&[(&str, u64)]; 3] = [&[("ring_full", 3), ("uninspected", 4)], &[], &[("ring_full", 1)]];
    for (host, loss) in ["h1", "h2", "h3"].into_iter().zip(losses) {
        Segment { host, sequence: 0, samples: &day, loss, before: &[] }.write(&spool);
        Segment { host, sequence: 1, samples: if host == "h3" { &night[..2] } else { &night }, loss, before: &[] }
            .write(&spool);
    }
    succeeds(&["convert", word(&spool), "-o", word(&tables)]);
    tables
}

/// The rows that plain Rust gives.
fn plain(tables: &Path, options: &[&str]) -> Vec<Value> {
    let ask = |question: &&[&str]| {
        let words = [&["top", word(tables), "--json"], *question, options].concat();
        let answer: Value = serde_json::from_str(&succeeds(&words)).unwrap();
        answer["rows"].clone()
    };
    QUESTIONS.iter().map(ask).collect()
}

/// The rows that an engine gives.
fn asked(engine: &str, programs: &Path, tables: &Path, options: &[&str]) -> Vec<Value> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tachyon-fleet"));
    command.args(["sql", engine, "--run", word(tables)]).args(options);
    // Spark starts Java, and by shell scripts.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}", programs.display())).env("SPARK_MASTER", "local-cluster[2,1,1024]");
    // It would make 200 parts of these few rows for each grouping.
    let conf = tables.with_file_name("spark");
    fs::create_dir_all(&conf).unwrap();
    fs::write(conf.join("spark-defaults.conf"), "spark.sql.shuffle.partitions 4\nspark.ui.enabled false\n").unwrap();
    command.env("SPARK_CONF_DIR", conf);
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{engine}: {}", String::from_utf8_lossy(&output.stderr));
    let answers = serde_json::Deserializer::from_slice(&output.stdout).into_iter().map(|answer| answer.unwrap());
    answers.collect()
}

#[test]
fn plain_rust_answers() {
    let dir = tempfile::tempdir().unwrap();
    let tables = fleet(dir.path());
    let [functions, changes, losses] = &plain(&tables, &["--lines", "3"])[..] else { panic!("three questions") };
    let ns = 10_000_000;
    // 3 hosts, 19 samples of deflate by day, 10 by night; both versions together.
    let row = |function: &str, file: &str, own: u64, total: u64| json!({"service": "web", "function": function, "file": file, "self_ns": own * ns, "total_ns": total * ns});
    let web: Vec<&Value> = functions.as_array().unwrap().iter().filter(|row| row["service"] == "web").collect();
    assert_eq!(
        web,
        [
            &row("Parse", "/srv/app.py", 120, 120),
            &row("deflate", "libz.so.1", 120, 120),
            &row("größe", "/srv/app.py", 60, 60)
        ],
        "equal times are in order of names"
    );
    assert!(functions.as_array().unwrap().iter().all(|row| row["service"] != "idle"), "waiting takes no CPU time");
    let web: Vec<&Value> = changes.as_array().unwrap().iter().filter(|row| row["service"] == "web").collect();
    // Version 1: 3 x 90 samples. Version 2: 3 x 30 and 2 x 3.
    let first = json!({"service": "web", "old_version": "1", "new_version": "2", "function": "Parse",
        "file": "/srv/app.py", "old_ppm": 222_222, "new_ppm": 625_000, "change_ppm": 402_778});
    assert_eq!(web[0], &first);
    assert_eq!(
        losses,
        &json!([
            {"host": "h1", "stored": 206, "lost": 14, "lost_ppm": 63_636, "recovered": 0},
            {"host": "h3", "stored": 191, "lost": 2, "lost_ppm": 10_363, "recovered": 0},
            {"host": "h2", "stored": 206, "lost": 0, "lost_ppm": 0, "recovered": 0},
        ])
    );
}

#[test]
fn all_engines_give_the_same_rows() {
    let Some(programs) = engines("engines") else {
        return not_run::not_run("DuckDB and chDB, which `cargo xtask test` fetches");
    };
    let dir = tempfile::tempdir().unwrap();
    let tables = fleet(dir.path());
    for options in [
        &["--lines", "4"][..],
        &["--lines", "100", "--since", "2026-11-22T19:02:00Z"],
        &["--until", "2026-11-22T19:01:13Z"],
        &["--since", "2026-11-22T19:01:13Z", "--until", "2026-11-22T19:01:14Z"],
    ] {
        let expected = plain(&tables, options);
        for engine in ["duckdb", "clickhouse"] {
            assert_eq!(asked(engine, &programs, &tables, options), expected, "{engine}, {options:?}");
        }
    }
}

#[test]
fn spark_gives_the_same_rows() {
    let Some(programs) = engines("spark") else {
        return not_run::not_run("pyspark, which `cargo xtask test` fetches");
    };
    let dir = tempfile::tempdir().unwrap();
    let tables = fleet(dir.path());
    // It takes long to start: once, and all that other engines are asked for is in it.
    let options = ["--lines", "100", "--since", "2026-11-22T19:01:13Z"];
    assert_eq!(asked("spark", &programs, &tables, &options), plain(&tables, &options));
}

#[test]
fn text_is_for_people() {
    let dir = tempfile::tempdir().unwrap();
    let tables = fleet(dir.path());
    let text = succeeds(&["top", word(&tables), "--lines", "1"]);
    assert!(
        text.contains(
            "web\n        SELF        TOTAL  FUNCTION  FILE\n      1.20 s       1.20 s  Parse  /srv/app.py\n"
        ),
        "{text}"
    );
    let text = succeeds(&["top", word(&tables), "--changes", "--lines", "1"]);
    assert!(text.contains("web: 1 -> 2, shares of its CPU time\n"), "{text}");
    assert!(text.contains("   22.22 %    62.50 %   +40.28 %  Parse  /srv/app.py\n"), "{text}");
    let text = succeeds(&["top", word(&tables), "--losses"]);
    assert!(text.contains("         206           14    6.36 %          0  h1\n"), "{text}");
}

#[test]
fn sql_is_printed_for_every_engine_and_run_where_it_can_be() {
    for engine in ["duckdb", "clickhouse", "spark", "trino"] {
        let sql = succeeds(&["sql", engine, "--from", "/lake"]);
        assert!(sql.contains("/lake/samples") && sql.contains("-- Which hosts lose samples"), "{sql}");
    }
    let sql = succeeds(&["sql", "duckdb", "--question", "losses"]);
    assert!(sql.contains("-- Which hosts lose samples") && !sql.contains("-- Top functions"), "{sql}");
    let told = support::fails(&["sql", "trino", "--run", "/lake"], 1);
    assert!(told.starts_with("tachyon-fleet: Trino is not run from here\nhint: "), "{told}");
    let told = support::fails(&["sql", "duckdb", "--run", "a\nb"], 2);
    assert!(told.contains("control characters"), "{told}");
}
