//! Turns a segment into Parquet files, one for each table, hour and service. The same segment gives the same bytes.

use crate::hash::StackId;
use crate::place::{self, NO_SERVICE};
use crate::rows::{FrameRow, LossRow, SampleRow, StackRow};
use crate::segment::Segment;
use anyhow::{Context as _, ensure};
use arrow_array::builder::{Int64Builder, ListBuilder, MapBuilder, MapFieldNames, StringBuilder};
use arrow_array::{
    ArrayRef, FixedSizeBinaryArray, Int32Array, Int64Array, RecordBatch, StringArray, TimestampMillisecondArray,
};
use arrow_schema::{DataType, Field, Schema};
use parquet::arrow::arrow_writer::{ArrowWriter, ArrowWriterOptions};
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::properties::{EnabledStatistics, WriterProperties, WriterVersion};
use parquet::schema::types::ColumnPath;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Most directories that one file's rows may go to: the hours of a week, for a dozen services. A file with arbitrary times
/// would make as many as it has samples.
const MOST_PLACES: usize = 2048;
/// Higher levels take several times as long for one percent.
const ZSTD_LEVEL: i32 = 9;

/// A table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Table {
    /// [`SampleRow`].
    Samples,
    /// [`StackRow`].
    Stacks,
    /// [`FrameRow`].
    Frames,
    /// [`LossRow`].
    Loss,
}

impl Table {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Samples, Self::Stacks, Self::Frames, Self::Loss];

    /// The name of its directory.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Samples => "samples",
            Self::Stacks => "stacks",
            Self::Frames => "frames",
            Self::Loss => "loss",
        }
    }
}

/// A file of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableFile {
    /// The table.
    pub table: Table,
    /// Path below the root of all tables.
    pub path: String,
    /// Content.
    pub bytes: Vec<u8>,
}

/// All files of a segment. Each directory has the stacks and frames that its samples use.
///
/// # Errors
/// When its times are so far apart that there would be more files than for any real recording.
pub fn files(segment: &Segment) -> anyhow::Result<Vec<TableFile>> {
    let mut places: BTreeMap<String, Vec<SampleRow>> = BTreeMap::new();
    let of_one = |a: &SampleRow, b: &SampleRow| (&a.service, a.slice_start_ms) == (&b.service, b.slice_start_ms);
    for rows in segment.samples.chunk_by(of_one) {
        let directory = place::directory(rows[0].slice_start_ms, &place::part(&rows[0].service));
        places.entry(directory).or_default().extend_from_slice(rows);
        let count = places.len();
        ensure!(count <= MOST_PLACES, "its samples lie in more than {MOST_PLACES} hours and services");
    }
    let mut files = Vec::new();
    let mut push = |table: Table, directory: &str, batch: RecordBatch, dictionary: bool| -> anyhow::Result<()> {
        let bytes = write(&batch, dictionary).with_context(|| format!("cannot write the table {}", table.name()))?;
        files.push(TableFile { table, path: format!("{}/{directory}/{}.parquet", table.name(), segment.name), bytes });
        Ok(())
    };
    for (directory, rows) in &places {
        let ids: BTreeSet<StackId> = rows.iter().map(|row| row.stack_id).collect();
        let stacks = stacks_of(segment, &ids);
        let frames: BTreeSet<i64> = stacks.iter().flat_map(|(_, frames)| frames.iter().copied()).collect();
        let mut frames: Vec<&FrameRow> = frames.iter().filter_map(|frame| segment.frames.get(frame)).collect();
        // Neighbouring rows share their file.
        frames.sort_by_key(|row| (&row.file, &row.function, row.line, row.frame_id));
        push(Table::Samples, directory, samples(rows)?, rows.len() >= 2 * ids.len())?;
        push(Table::Stacks, directory, self::stacks(&stacks)?, false)?;
        push(Table::Frames, directory, self::frames(&frames)?, false)?;
    }
    // Even without losses, because engines treat a table without files as an error.
    let directory = place::directory(segment.start_ms, NO_SERVICE);
    push(Table::Loss, &directory, loss(&segment.loss)?, true)?;
    Ok(files)
}

/// These stacks, ordered by their frames from the outermost one: neighbours share callers, which compresses well.
fn stacks_of(segment: &Segment, ids: &BTreeSet<StackId>) -> Vec<StackRow> {
    let mut stacks: Vec<StackRow> =
        ids.iter().filter_map(|id| Some((*id, Arc::clone(segment.stacks.get(id)?)))).collect();
    stacks.sort_by(|(_, a), (_, b)| a.iter().rev().cmp(b.iter().rev()));
    stacks
}

fn samples(rows: &[SampleRow]) -> anyhow::Result<RecordBatch> {
    let text =
        |get: fn(&SampleRow) -> Option<&str>| -> ArrayRef { Arc::new(rows.iter().map(get).collect::<StringArray>()) };
    let number =
        |get: fn(&SampleRow) -> i64| -> ArrayRef { Arc::new(Int64Array::from_iter_values(rows.iter().map(get))) };
    let pids = rows.iter().map(|row| row.labels.pid).collect::<Int32Array>();
    batch(vec![
        ("slice_start", times(rows.iter().map(|row| row.slice_start_ms)), false),
        ("host", text(|row| Some(&row.host)), false),
        ("service", text(|row| Some(&row.service)), false),
        ("version", text(|row| row.labels.version.as_deref()), true),
        ("python", text(|row| row.labels.python.as_deref()), true),
        ("script", text(|row| row.labels.script.as_deref()), true),
        ("comm", text(|row| row.labels.comm.as_deref()), true),
        ("container", text(|row| row.labels.container.as_deref()), true),
        ("pod", text(|row| row.labels.pod.as_deref()), true),
        ("pid", Arc::new(pids), true),
        ("labels", labels(rows)?, false),
        ("stack_id", ids(rows.iter().map(|row| row.stack_id))?, false),
        ("on_cpu_ns", number(|row| row.on_cpu_ns), false),
        ("waiting_ns", number(|row| row.waiting_ns), false),
        ("samples", number(|row| row.samples), false),
    ])
}

fn stacks(rows: &[StackRow]) -> anyhow::Result<RecordBatch> {
    let mut lists = ListBuilder::new(Int64Builder::new()).with_field(Field::new("element", DataType::Int64, false));
    for (_, frames) in rows {
        lists.values().append_slice(frames);
        lists.append(true);
    }
    let ids = ids(rows.iter().map(|(id, _)| *id))?;
    batch(vec![("stack_id", ids, false), ("frame_ids", Arc::new(lists.finish()), false)])
}

fn frames(rows: &[&FrameRow]) -> anyhow::Result<RecordBatch> {
    let text = |get: fn(&FrameRow) -> Option<&str>| -> ArrayRef {
        Arc::new(rows.iter().map(|row| get(row)).collect::<StringArray>())
    };
    batch(vec![
        ("frame_id", Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row.frame_id))), false),
        ("function", text(|row| Some(&row.function)), false),
        ("file", text(|row| Some(&row.file)), false),
        ("line", Arc::new(rows.iter().map(|row| row.line).collect::<Int32Array>()), true),
        ("type", text(|row| Some(&row.kind)), false),
        ("build_id", text(|row| row.build_id.as_deref()), true),
    ])
}

fn loss(rows: &[LossRow]) -> anyhow::Result<RecordBatch> {
    let text =
        |get: fn(&LossRow) -> &str| -> ArrayRef { Arc::new(StringArray::from_iter_values(rows.iter().map(get))) };
    batch(vec![
        ("slice_start", times(rows.iter().map(|row| row.slice_start_ms)), false),
        ("host", text(|row| &row.host), false),
        ("cause", text(|row| &row.cause), false),
        ("runs", Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row.runs))), false),
    ])
}

fn times(ms: impl Iterator<Item = i64>) -> ArrayRef {
    Arc::new(TimestampMillisecondArray::from_iter_values(ms).with_timezone("UTC"))
}

fn ids(ids: impl Iterator<Item = StackId>) -> anyhow::Result<ArrayRef> {
    Ok(Arc::new(FixedSizeBinaryArray::try_from_iter(ids)?))
}

fn labels(rows: &[SampleRow]) -> anyhow::Result<ArrayRef> {
    let names = MapFieldNames { entry: "key_value".to_owned(), key: "key".to_owned(), value: "value".to_owned() };
    let mut maps = MapBuilder::new(Some(names), StringBuilder::new(), StringBuilder::new())
        .with_values_field(Field::new("value", DataType::Utf8, false));
    for row in rows {
        for (name, value) in &row.labels.others {
            maps.keys().append_value(name);
            maps.values().append_value(value);
        }
        maps.append(true)?;
    }
    Ok(Arc::new(maps.finish()))
}

fn batch(columns: Vec<(&str, ArrayRef, bool)>) -> anyhow::Result<RecordBatch> {
    let field =
        |(name, array, nullable): &(&str, ArrayRef, bool)| Field::new(*name, array.data_type().clone(), *nullable);
    let schema = Schema::new(columns.iter().map(field).collect::<Vec<_>>());
    Ok(RecordBatch::try_new(Arc::new(schema), columns.into_iter().map(|(_, array, _)| array).collect())?)
}

/// `dictionary`: ids repeat. If they do not, a dictionary would only make it larger.
fn write(batch: &RecordBatch, dictionary: bool) -> anyhow::Result<Vec<u8>> {
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(ZSTD_LEVEL)?))
        // In pages of the first version, fixed-length columns have no dictionary, and engines read 16 bytes for each row.
        .set_writer_version(WriterVersion::PARQUET_2_0)
        .set_encoding(Encoding::PLAIN)
        // A file has one or a few pages per column: their index would cost more than it saves, as would minimum and maximum values
        // of columns that are never searched by range.
        .set_statistics_enabled(EnabledStatistics::None)
        .set_offset_index_disabled(true)
        .set_column_dictionary_enabled(ColumnPath::from("stack_id"), dictionary)
        .set_column_dictionary_enabled(ColumnPath::from("frame_id"), dictionary)
        // Neighbouring stacks share runs of ids, which zstd finds if they are whole bytes.
        .set_column_dictionary_enabled(
            ColumnPath::from(["frame_ids", "list", "element"].map(str::to_owned).to_vec()),
            false,
        )
        .set_column_statistics_enabled(ColumnPath::from("slice_start"), EnabledStatistics::Chunk)
        .set_column_statistics_enabled(ColumnPath::from("host"), EnabledStatistics::Chunk)
        .set_column_statistics_enabled(ColumnPath::from("service"), EnabledStatistics::Chunk)
        .build();
    let options = ArrowWriterOptions::new().with_properties(properties).with_skip_arrow_metadata(true);
    let mut writer = ArrowWriter::try_new_with_options(Vec::new(), batch.schema(), options)?;
    writer.write(batch)?;
    Ok(writer.into_inner()?)
}
