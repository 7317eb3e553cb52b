//! Rows as pprof profiles, within the limits that a server sets.

use crate::net::push::Reason;
use crate::rows::{FrameRow, SampleRow};
use crate::segment::Segment;
use prost::Message as _;
use std::collections::HashMap;
use std::sync::Arc;
use tachyon::sinks::pprof::proto;

/// The name of the mapping for code without an object.
const PYTHON: &str = "[python]";
/// Stands for a stack without frames.
const NO_FRAMES: &str = "<no frames>";

/// The limits of a profile.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Samples.
    pub samples: usize,
    /// Bytes, not compressed.
    pub bytes: usize,
    /// Frames of a stack.
    pub depth: usize,
}

/// A type of values.
pub struct ValueType<'a> {
    /// Name and unit.
    pub name: &'a str,
    /// Unit.
    pub unit: &'a str,
    /// The value of a row; 0: the row has none.
    pub value: &'a dyn Fn(&SampleRow) -> i64,
}

/// A profile, not compressed.
#[derive(Clone, Debug, PartialEq)]
pub struct Encoded {
    /// Content.
    pub bytes: Vec<u8>,
    /// Samples that it stands for.
    pub samples: u64,
}

/// Profiles of the rows of one slice; more than one if one would be too large. What does not fit into any is counted with the reason.
/// `counted` says how many samples of a row count as shipped with it, since a sample may be in profiles of two types.
#[must_use]
pub fn profiles(
    segment: &Segment,
    rows: &[&SampleRow],
    types: &[ValueType<'_>],
    counted: &dyn Fn(&SampleRow) -> u64,
    limits: Limits,
) -> (Vec<Encoded>, HashMap<Reason, u64>) {
    let (mut encoded, mut refused) = (Vec::new(), HashMap::new());
    let start_ms = rows.first().map_or(segment.start_ms, |row| row.slice_start_ms);
    // Rows of several processes with one stack are one sample.
    let mut stacks: Vec<(crate::hash::StackId, Vec<i64>, u64)> = Vec::new();
    let mut rows: Vec<&&SampleRow> = rows.iter().collect();
    rows.sort_by_key(|row| row.stack_id);
    for row in rows {
        let values = types.iter().map(|of| (of.value)(row));
        match stacks.last_mut() {
            Some((stack, sums, samples)) if *stack == row.stack_id => {
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum = sum.saturating_add(value));
                *samples += counted(row);
            }
            _ => stacks.push((row.stack_id, values.collect(), counted(row))),
        }
    }
    stacks.retain(|(_, values, _)| values.iter().any(|value| *value != 0));
    let mut builder = Builder::new(segment, types, start_ms);
    for (stack, values, samples) in stacks {
        let frames = segment.stacks.get(&stack).cloned().unwrap_or_default();
        let cost = builder.cost(&frames, limits.depth);
        let is_full = builder.message.sample.len() >= limits.samples || builder.bytes + cost > limits.bytes;
        if is_full && !builder.message.sample.is_empty() {
            encoded.push(std::mem::replace(&mut builder, Builder::new(segment, types, start_ms)).finish());
        }
        if builder.bytes + builder.cost(&frames, limits.depth) > limits.bytes {
            *refused.entry(Reason::TooLarge).or_default() += samples;
            continue;
        }
        builder.add(&frames, limits.depth, values, samples);
    }
    if !builder.message.sample.is_empty() {
        encoded.push(builder.finish());
    }
    (encoded, refused)
}

struct Builder<'a> {
    segment: &'a Segment,
    message: proto::Profile,
    strings: HashMap<String, i64>,
    functions: HashMap<(i64, i64), u64>,
    mappings: HashMap<i64, u64>,
    locations: HashMap<i64, u64>,
    bytes: usize,
    samples: u64,
}

impl<'a> Builder<'a> {
    fn new(segment: &'a Segment, types: &[ValueType<'_>], start_ms: i64) -> Self {
        let mut builder = Self {
            segment,
            message: proto::Profile::default(),
            strings: HashMap::new(),
            functions: HashMap::new(),
            mappings: HashMap::new(),
            locations: HashMap::new(),
            bytes: 128,
            samples: 0,
        };
        builder.string("");
        let types: Vec<proto::ValueType> = types
            .iter()
            .map(|of| proto::ValueType { r#type: builder.string(of.name), unit: builder.string(of.unit) })
            .collect();
        let period_type = proto::ValueType { r#type: builder.string("cpu"), unit: builder.string("nanoseconds") };
        builder.message.sample_type = types;
        builder.message.period_type = Some(period_type);
        builder.message.period = segment.interval_ns;
        builder.message.time_nanos = start_ms.saturating_mul(1_000_000);
        builder.message.duration_nanos = segment.slice_ms.saturating_mul(1_000_000);
        builder
    }

    /// The most that a stack adds.
    fn cost(&self, frames: &[i64], depth: usize) -> usize {
        let new = frames.iter().filter(|frame| !self.locations.contains_key(frame));
        let new: usize = new
            .filter_map(|frame| self.segment.frames.get(frame))
            .map(|frame| frame.function.len() + frame.file.len() + 96)
            .sum();
        // Location numbers usually take three bytes.
        new + frames.len().min(depth) * 4 + 96
    }

    fn add(&mut self, frames: &Arc<[i64]>, depth: usize, values: Vec<i64>, samples: u64) {
        let mut location_id = if frames.len() > depth {
            // Keeps both ends: what ran, and its outermost callers. The server would leave out what ran.
            let (inner, outer) = ((depth - 1) / 2, depth / 2);
            let mut ids = self.locations_of(&frames[..inner]);
            ids.push(self.special(&format!("<{} frames omitted>", frames.len() - inner - outer)));
            ids.extend(self.locations_of(&frames[frames.len() - outer..]));
            ids
        } else {
            self.locations_of(frames)
        };
        if location_id.is_empty() {
            location_id.push(self.special(NO_FRAMES));
        }
        let sample = proto::Sample { location_id, value: values, label: Vec::new() };
        self.bytes += sample.encoded_len() + 4;
        self.message.sample.push(sample);
        self.samples += samples;
    }

    fn locations_of(&mut self, frames: &[i64]) -> Vec<u64> {
        let segment = self.segment;
        frames.iter().filter_map(|frame| segment.frames.get(frame)).map(|frame| self.location(frame)).collect()
    }

    fn string(&mut self, text: &str) -> i64 {
        if let Some(&index) = self.strings.get(text) {
            return index;
        }
        let index = i64::try_from(self.message.string_table.len()).expect("strings fit in memory");
        self.bytes += text.len() + 4;
        self.message.string_table.push(text.to_owned());
        self.strings.insert(text.to_owned(), index);
        index
    }

    fn location(&mut self, frame: &FrameRow) -> u64 {
        if let Some(&id) = self.locations.get(&frame.frame_id) {
            return id;
        }
        let is_object = matches!(&*frame.kind, "native" | "kernel") && !frame.file.is_empty();
        let (mapping, file) = if is_object { (&*frame.file, "") } else { (PYTHON, &*frame.file) };
        let id = self.push(mapping, &frame.function, file, frame.line.map_or(0, i64::from));
        self.locations.insert(frame.frame_id, id);
        id
    }

    fn special(&mut self, name: &str) -> u64 {
        // There are few, and they all differ.
        self.push(PYTHON, name, "", 0)
    }

    fn push(&mut self, mapping: &str, function: &str, file: &str, line: i64) -> u64 {
        let (mapping_id, function_id) = (self.mapping(mapping), self.function(function, file));
        let id = self.message.location.len() as u64 + 1;
        let line = vec![proto::Line { function_id, line }];
        let location = proto::Location { id, mapping_id, address: 0, line };
        self.bytes += location.encoded_len() + 4;
        self.message.location.push(location);
        id
    }

    fn function(&mut self, name: &str, file: &str) -> u64 {
        let key = (self.string(name), self.string(file));
        let next = self.functions.len() as u64 + 1;
        let id = *self.functions.entry(key).or_insert(next);
        if id == next {
            let function = proto::Function { id, name: key.0, system_name: 0, filename: key.1 };
            self.bytes += function.encoded_len() + 4;
            self.message.function.push(function);
        }
        id
    }

    fn mapping(&mut self, name: &str) -> u64 {
        let filename = self.string(name);
        let next = self.mappings.len() as u64 + 1;
        let id = *self.mappings.entry(filename).or_insert(next);
        if id == next {
            // pprof treats all mappings without a range of their own as the same: these ranges are where Linux never puts
            // code.
            let start = (1 << 56) + (next << 32);
            let mapping = proto::Mapping {
                id,
                memory_start: start,
                memory_limit: start + (1 << 32),
                filename,
                has_functions: true,
                has_filenames: true,
                has_line_numbers: true,
                has_inline_frames: true,
                ..proto::Mapping::default()
            };
            self.bytes += mapping.encoded_len() + 4;
            self.message.mapping.push(mapping);
        }
        id
    }

    fn finish(self) -> Encoded {
        Encoded { bytes: self.message.encode_to_vec(), samples: self.samples }
    }
}
