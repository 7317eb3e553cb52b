//! A large profile to open the HTML report with: `cargo bench -p tachyon --bench page -- write OUT SAMPLES STACKS` writes a TACH file
//! of a made-up service. `cargo xtask page bench` measures the page with it.

mod service;

use std::fs::File;
use std::io::BufWriter;

use anyhow::{Context, Result, bail};

fn main() -> Result<()> {
    // `cargo bench` passes `--bench` to every benchmark, also to those without a harness.
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["write", to, samples, stacks] => {
            let file = BufWriter::new(File::create(to).with_context(|| format!("cannot make {to}"))?);
            service::write(file, samples.parse()?, stacks.parse()?)?;
            Ok(())
        }
        // Run by hand without words there is nothing to measure.
        [] => Ok(()),
        _ => bail!("write OUT SAMPLES STACKS"),
    }
}
