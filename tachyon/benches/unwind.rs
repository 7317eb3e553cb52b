//! What unwind tables cost to build and to keep: `cargo bench -p tachyon --bench unwind -- FILE...`. Prints a line for each
//! file, and the sum: what a process that has them all mapped needs of `--unwind-memory`.

use anyhow::{Context, Result};
use std::fs::File;
use std::time::{Duration, Instant};
use tachyon::remote::elf::Elf;
use tachyon::unwind::compile;
use tachyon_common::unwind::{Row, Rule};

/// Times each table is built; the fastest counts, which other work on the machine disturbs least.
const TURNS: usize = 5;

fn main() -> Result<()> {
    // `cargo bench` adds `--bench`.
    let files: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let (mut all, mut longest) = (0, Duration::ZERO);
    for path in &files {
        let mut fastest = Duration::MAX;
        let mut table = None;
        for _ in 0..TURNS {
            let begun = Instant::now();
            let elf = Elf::parse(File::open(path).with_context(|| format!("cannot open {path}"))?)?;
            table = compile(&elf).ok();
            fastest = fastest.min(begun.elapsed());
        }
        let Some(table) = table else {
            println!("{path}: no table");
            continue;
        };
        let bytes = table.rows.len() * size_of::<Row>();
        let places = table.rows.windows(2).map(|pair| (pair[0].rule(), u64::from(pair[1].pc() - pair[0].pc())));
        let (mut code, mut unsupported) = (0, 0);
        for (rule, size) in places.filter(|(rule, _)| *rule != Rule::GAP) {
            code += size;
            unsupported += if rule == Rule::UNSUPPORTED { size } else { 0 };
        }
        println!(
            "{path}: {:.1} ms, {} rows, {:.2} MiB; {unsupported} of {code} bytes of code have no compact rule",
            fastest.as_secs_f64() * 1e3,
            table.rows.len(),
            bytes as f64 / f64::from(1 << 20),
        );
        all += bytes;
        longest = longest.max(fastest);
    }
    println!("together {:.2} MiB, the slowest {:.1} ms", all as f64 / f64::from(1 << 20), longest.as_secs_f64() * 1e3);
    Ok(())
}
