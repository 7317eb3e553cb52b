//! Columns of a batch by name, with their types checked, since anybody may have written the tables.

use crate::hash::StackId;
use anyhow::{Context as _, anyhow, ensure};
use arrow_array::cast::AsArray as _;
use arrow_array::types::{Int64Type, TimestampMillisecondType};
use arrow_array::{Array, FixedSizeBinaryArray, Int64Array, ListArray, MapArray, RecordBatch, StringArray};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A batch.
pub struct Columns<'a> {
    /// Its rows.
    pub batch: &'a RecordBatch,
}

impl<'a> Columns<'a> {
    /// A column of a type.
    ///
    /// # Errors
    /// When there is none, or one of another type.
    pub fn get<T: Array + 'static>(&self, name: &str) -> anyhow::Result<&'a T> {
        let column = self.batch.column_by_name(name).with_context(|| format!("it has no column {name}"))?;
        let wrong = || anyhow!("its column {name} is of the type {}", column.data_type());
        column.as_any().downcast_ref().with_context(wrong)
    }

    /// Texts.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn texts(&self, name: &str) -> anyhow::Result<&'a StringArray> {
        self.get(name)
    }

    /// Numbers.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn numbers(&self, name: &str) -> anyhow::Result<&'a Int64Array> {
        self.get(name)
    }

    /// Ids of 16 bytes.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn ids(&self, name: &str) -> anyhow::Result<&'a FixedSizeBinaryArray> {
        let ids: &FixedSizeBinaryArray = self.get(name)?;
        ensure!(ids.value_length() == 16, "an id has 16 bytes");
        Ok(ids)
    }

    /// Moments, milliseconds since 1970.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn times(&self, name: &str) -> anyhow::Result<&'a [i64]> {
        let column = self.batch.column_by_name(name).with_context(|| format!("it has no column {name}"))?;
        let wrong = || anyhow!("its column {name} is of the type {}", column.data_type());
        Ok(column.as_primitive_opt::<TimestampMillisecondType>().with_context(wrong)?.values())
    }
}

/// An id of [`Columns::ids`].
///
/// # Errors
/// When it has another length.
pub fn id(ids: &FixedSizeBinaryArray, row: usize) -> anyhow::Result<StackId> {
    ids.value(row).try_into().context("an id has 16 bytes")
}

/// A list of numbers.
///
/// # Errors
/// When they are not 64-bit numbers.
pub fn list(lists: &ListArray, row: usize) -> anyhow::Result<Arc<[i64]>> {
    let values = lists.value(row);
    Ok(values.as_primitive_opt::<Int64Type>().context("frame_ids are 64-bit numbers")?.values().as_ref().into())
}

/// A map of texts.
///
/// # Errors
/// When they are not texts.
pub fn map(maps: &MapArray, row: usize) -> anyhow::Result<BTreeMap<String, String>> {
    let entries = maps.value(row);
    let texts = |column| entries.column(column).as_string_opt::<i32>().context("labels are texts");
    let (names, values) = (texts(0)?, texts(1)?);
    Ok((0..entries.len()).map(|entry| (names.value(entry).to_owned(), values.value(entry).to_owned())).collect())
}
