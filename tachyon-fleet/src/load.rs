//! Tables back to rows: all Parquet files below a directory.

use crate::columns::{Columns, id, list, map};
use crate::hash::StackId;
use crate::rows::{FrameRow, Labels, LossRow, SampleRow, StackRow};
use crate::tables::Table;
use anyhow::Context as _;
use arrow_array::{Array as _, Int32Array, ListArray, MapArray, RecordBatch, StringArray};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tachyon::advice::Refusal;

/// What tables hold.
#[derive(Debug, Default)]
pub struct Tables {
    /// Samples, in the order of their files.
    pub samples: Vec<SampleRow>,
    /// Stacks by id.
    pub stacks: HashMap<StackId, Arc<[i64]>>,
    /// Frames by id.
    pub frames: HashMap<i64, FrameRow>,
    /// Losses.
    pub loss: Vec<LossRow>,
}

/// Reads directories of tables.
///
/// # Errors
/// When there is none, or a file of one is not what this program writes.
pub fn read(roots: &[PathBuf]) -> anyhow::Result<Tables> {
    let mut tables = Tables::default();
    let mut texts = Texts::default();
    for root in roots {
        let mut found = false;
        for table in Table::ALL {
            for file in files(&root.join(table.name()))? {
                found = true;
                let cannot = || format!("cannot read {}", file.display());
                for batch in batches(&file).with_context(cannot)? {
                    tables.add(table, &batch.with_context(cannot)?, &mut texts).with_context(cannot)?;
                }
            }
        }
        if !found {
            let message = format!("there are no tables in {}", root.display());
            let hint =
                "`tachyon-fleet convert IN... -o DIR` makes some: DIR has directories samples, stacks, frames and loss";
            return Err(Refusal::new(message).with_hint(hint).into());
        }
    }
    Ok(tables)
}

/// All Parquet files below a directory, in order; none, if it does not exist.
fn files(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.with_context(|| format!("cannot open {}", directory.display()))?,
    };
    let mut entries = entries.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    let mut found = Vec::new();
    for entry in entries {
        let kind = entry.file_type()?;
        let path = entry.path();
        if kind.is_dir() {
            found.extend(files(&path)?);
        } else if kind.is_file() && path.extension().is_some_and(|extension| extension == "parquet") {
            found.push(path);
        }
    }
    Ok(found)
}

fn batches(path: &Path) -> anyhow::Result<impl Iterator<Item = anyhow::Result<RecordBatch>>> {
    let reader = ParquetRecordBatchReaderBuilder::try_new(tachyon::input::open(path)?)?.build()?;
    Ok(reader.map(|batch| Ok(batch?)))
}

impl Tables {
    /// Adds rows of a table.
    ///
    /// # Errors
    /// When they are not what this program writes.
    pub(crate) fn add(&mut self, table: Table, batch: &RecordBatch, texts: &mut Texts) -> anyhow::Result<()> {
        let columns = Columns { batch };
        match table {
            Table::Samples => samples(&columns, texts, &mut self.samples),
            Table::Stacks => {
                let (ids, lists): (_, &ListArray) = (columns.ids("stack_id")?, columns.get("frame_ids")?);
                let rows = (0..batch.num_rows()).map(|row| Ok((id(ids, row)?, list(lists, row)?)));
                rows.into_iter().try_for_each(|row: anyhow::Result<StackRow>| {
                    let (id, frames) = row?;
                    self.stacks.insert(id, frames);
                    Ok(())
                })
            }
            Table::Frames => frames(&columns, texts, &mut self.frames),
            Table::Loss => {
                let (times, runs) = (columns.times("slice_start")?, columns.numbers("runs")?);
                let (hosts, causes) = (columns.texts("host")?, columns.texts("cause")?);
                self.loss.extend((0..batch.num_rows()).map(|row| LossRow {
                    slice_start_ms: times[row],
                    host: texts.get(hosts.value(row)),
                    cause: causes.value(row).to_owned(),
                    runs: runs.value(row),
                }));
                Ok(())
            }
        }
    }
}

fn samples(columns: &Columns<'_>, texts: &mut Texts, rows: &mut Vec<SampleRow>) -> anyhow::Result<()> {
    let (times, ids) = (columns.times("slice_start")?, columns.ids("stack_id")?);
    let (hosts, services) = (columns.texts("host")?, columns.texts("service")?);
    let [version, python, script, comm, container, pod] =
        ["version", "python", "script", "comm", "container", "pod"].map(|name| columns.texts(name));
    let (version, python, script, comm, container, pod) = (version?, python?, script?, comm?, container?, pod?);
    let (pids, others): (&Int32Array, &MapArray) = (columns.get("pid")?, columns.get("labels")?);
    let [on_cpu, waiting, samples] = ["on_cpu_ns", "waiting_ns", "samples"].map(|name| columns.numbers(name));
    let (on_cpu, waiting, samples) = (on_cpu?, waiting?, samples?);
    let text = |column: &StringArray, row| column.is_valid(row).then(|| column.value(row).to_owned());
    for (row, &slice_start_ms) in times.iter().enumerate() {
        let labels = Labels {
            version: text(version, row),
            python: text(python, row),
            script: text(script, row),
            comm: text(comm, row),
            container: text(container, row),
            pod: text(pod, row),
            pid: pids.is_valid(row).then(|| pids.value(row)),
            others: map(others, row)?,
        };
        rows.push(SampleRow {
            service: texts.get(services.value(row)),
            slice_start_ms,
            stack_id: id(ids, row)?,
            labels: texts.labels(labels),
            host: texts.get(hosts.value(row)),
            on_cpu_ns: on_cpu.value(row),
            waiting_ns: waiting.value(row),
            samples: samples.value(row),
        });
    }
    Ok(())
}

fn frames(columns: &Columns<'_>, texts: &mut Texts, rows: &mut HashMap<i64, FrameRow>) -> anyhow::Result<()> {
    let (ids, lines): (_, &Int32Array) = (columns.numbers("frame_id")?, columns.get("line")?);
    let [function, file, kind, build_id] = ["function", "file", "type", "build_id"].map(|name| columns.texts(name));
    let (function, file, kind, build_id) = (function?, file?, kind?, build_id?);
    for row in 0..columns.batch.num_rows() {
        let frame_id = ids.value(row);
        rows.entry(frame_id).or_insert_with(|| FrameRow {
            frame_id,
            function: texts.get(function.value(row)),
            file: texts.get(file.value(row)),
            line: lines.is_valid(row).then(|| lines.value(row)),
            kind: texts.get(kind.value(row)),
            build_id: build_id.is_valid(row).then(|| texts.get(build_id.value(row))),
        });
    }
    Ok(())
}

/// Equal texts and labels, kept once.
#[derive(Default)]
pub(crate) struct Texts {
    texts: HashSet<Arc<str>>,
    labels: HashSet<Arc<Labels>>,
}

impl Texts {
    fn get(&mut self, text: &str) -> Arc<str> {
        match self.texts.get(text) {
            Some(known) => Arc::clone(known),
            None => {
                let new: Arc<str> = text.into();
                self.texts.insert(Arc::clone(&new));
                new
            }
        }
    }

    fn labels(&mut self, labels: Labels) -> Arc<Labels> {
        match self.labels.get(&labels) {
            Some(known) => Arc::clone(known),
            None => {
                let new = Arc::new(labels);
                self.labels.insert(Arc::clone(&new));
                new
            }
        }
    }
}
