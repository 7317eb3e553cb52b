//! Tables of a fleet where they are stored: a directory, or an object store by its URL. Files are found by their paths, and read column by
//! column, so that a week of a thousand hosts needs no more memory than the query requires.

use crate::args::Period;
use crate::net::bucket::{Bucket, Place, is_url};
use crate::net::secret::Secrets;
use crate::place;
use crate::tables::Table;
use anyhow::{Context as _, anyhow};
use arrow_array::RecordBatch;
use bytes::Bytes;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use percent_encoding::percent_decode_str;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};
use tachyon::advice::Refusal;

/// Rows that are read at once.
const BATCH: usize = 32 * 1024;
/// Most threads that read.
const THREADS: usize = 8;

/// A place with tables.
pub struct Lake {
    source: Source,
    shown: String,
}

enum Source {
    Directory(PathBuf),
    Bucket(Bucket, tokio::runtime::Runtime),
}

/// A file of a table.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LakeFile {
    /// Below the root.
    pub path: String,
    /// The service whose rows it has; none for losses, which belong to no service.
    pub service: Option<String>,
    /// `2026-11-22T19`.
    pub hour: String,
}

impl Lake {
    /// Opens a directory or a URL.
    ///
    /// # Errors
    /// When it is neither.
    pub fn open(root: &str) -> anyhow::Result<Self> {
        let source = if is_url(root) && !root.starts_with("file://") {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            Source::Bucket(Place::of(root).open(&Secrets::default())?, runtime)
        } else {
            Source::Directory(PathBuf::from(root.trim_start_matches("file://")))
        };
        Ok(Self { source, shown: root.to_owned() })
    }

    /// Files of a table that may have slices of the period, in order.
    ///
    /// # Errors
    /// When they cannot be listed.
    pub fn files(&self, table: Table, period: Period) -> anyhow::Result<Vec<LakeFile>> {
        let mut paths = Vec::new();
        match &self.source {
            Source::Directory(root) => walk(root, table.name(), &mut paths)?,
            Source::Bucket(bucket, runtime) => {
                paths.extend(runtime.block_on(bucket.list(table.name()))?.into_iter().map(|(path, _)| path));
            }
        }
        paths.sort();
        let hours = [period.since, period.until].map(|time| time.map(hour_of));
        // A slice starts in the hour that its directory names.
        let may_have = |file: &LakeFile| {
            let [since, until] = &hours;
            since.as_ref().is_none_or(|since| *since <= file.hour)
                && until.as_ref().is_none_or(|until| file.hour <= *until)
        };
        Ok(paths.into_iter().filter_map(described).filter(may_have).collect())
    }

    /// Fails if there is nothing.
    ///
    /// # Errors
    /// When no table has a file.
    pub fn expect_some(&self, files: &[LakeFile]) -> anyhow::Result<()> {
        if files.is_empty()
            && self.files(Table::Samples, Period::default())?.is_empty()
            && self.files(Table::Loss, Period::default())?.is_empty()
        {
            let message = format!("there are no tables in {}", self.shown);
            let hint =
                "`tachyon-fleet convert IN... -o DIR` makes some: DIR has directories samples, stacks, frames and loss";
            return Err(Refusal::new(message).with_hint(hint).into());
        }
        Ok(())
    }

    /// Reads columns of a file.
    ///
    /// # Errors
    /// When it cannot be read, or is not a Parquet file.
    pub fn batches(&self, file: &LakeFile, columns: &[&str]) -> anyhow::Result<Vec<RecordBatch>> {
        let cannot = || format!("cannot read {}", file.path);
        match &self.source {
            Source::Directory(root) => {
                let opened = tachyon::input::open(&root.join(&file.path)).with_context(cannot)?;
                read(opened, columns).with_context(cannot)
            }
            Source::Bucket(bucket, runtime) => {
                let bytes: Bytes = runtime.block_on(bucket.get(&file.path))?;
                read(bytes, columns).with_context(cannot)
            }
        }
    }

    /// Reads files with some threads, each of which sums up what it reads; returns the sums.
    ///
    /// # Errors
    /// When a file cannot be read, or `add` fails.
    pub fn sums<S: Default + Send>(
        &self,
        files: &[LakeFile],
        columns: &[&str],
        add: impl Fn(&mut S, &LakeFile, &RecordBatch) -> anyhow::Result<()> + Sync,
    ) -> anyhow::Result<Vec<S>> {
        let next = AtomicUsize::new(0);
        let work = || -> anyhow::Result<S> {
            let mut sum = S::default();
            while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                for batch in self.batches(file, columns)? {
                    add(&mut sum, file, &batch).with_context(|| format!("cannot read {}", file.path))?;
                }
            }
            Ok(sum)
        };
        on_threads(THREADS.min(files.len().max(1)), work)
    }
}

/// Does shared work on one thread per CPU, at most `most`; returns each thread's result.
///
/// # Errors
/// When one of them fails; all are waited for.
pub(crate) fn on_threads<S: Send>(most: usize, work: impl Fn() -> anyhow::Result<S> + Sync) -> anyhow::Result<Vec<S>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(most);
    let ended: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(&work)).collect();
        running.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
    });
    ended.into_iter().map(|ended| ended.map_err(|_| anyhow!("a thread that works on tables failed"))?).collect()
}

fn read<R: parquet::file::reader::ChunkReader + 'static>(
    reader: R,
    columns: &[&str],
) -> anyhow::Result<Vec<RecordBatch>> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(reader)?;
    let schema = builder.parquet_schema();
    let wanted = (0..schema.num_columns()).filter(|&leaf| {
        let column = schema.column(leaf);
        column.path().parts().first().is_some_and(|name| columns.contains(&name.as_str()))
    });
    let mask = ProjectionMask::leaves(schema, wanted);
    let reader = builder.with_projection(mask).with_batch_size(BATCH).build()?;
    reader.map(|batch| Ok(batch?)).collect()
}

/// All Parquet files below a directory; none, if it does not exist.
fn walk(root: &Path, below: &str, found: &mut Vec<String>) -> anyhow::Result<()> {
    let directory = root.join(below);
    let entries = match fs::read_dir(&directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        other => other.with_context(|| format!("cannot open {}", directory.display()))?,
    };
    for entry in entries {
        let entry = entry?;
        let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
        let (kind, path) = (entry.file_type()?, format!("{below}/{name}"));
        if kind.is_dir() {
            walk(root, &path, found)?;
        } else if kind.is_file() && name.ends_with(".parquet") && !name.starts_with('.') {
            found.push(path);
        }
    }
    Ok(())
}

/// `TABLE/date=…/hour=…/service=…/NAME.parquet`.
fn described(path: String) -> Option<LakeFile> {
    let parts: Vec<&str> = path.split('/').collect();
    let [_, date, hour, service, _] = parts[..] else { return None };
    let hour = format!("{}T{}", date.strip_prefix("date=")?, hour.strip_prefix("hour=")?);
    let service = service.strip_prefix("service=")?;
    let service = (service != place::NO_SERVICE).then(|| percent_decode_str(service).decode_utf8_lossy().into_owned());
    Some(LakeFile { service, hour, path })
}

fn hour_of(time: SystemTime) -> String {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    humantime::format_rfc3339_seconds(SystemTime::UNIX_EPOCH + since).to_string()[..13].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_told_by_their_paths() {
        let file = described("samples/date=2026-11-22/hour=19/service=my%20shop/h-1.parquet".to_owned()).unwrap();
        assert_eq!((file.service.as_deref(), file.hour.as_str()), (Some("my shop"), "2026-11-22T19"));
        let file = described("loss/date=2026-11-22/hour=19/service=__HIVE_DEFAULT_PARTITION__/h-1.parquet".to_owned())
            .unwrap();
        assert_eq!(file.service, None);
        assert_eq!(described("samples/x.parquet".to_owned()), None);
    }
}
