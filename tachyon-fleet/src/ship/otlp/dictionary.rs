//! The dictionary of a message: each string, function, location and stack once, referred to by index.
//!
//! The first entry of each table is empty. The dictionary counts its bytes, so that a message can end in time; samples and profiles belong
//! to the message.

use crate::hash::StackId;
use crate::rows::FrameRow;
use crate::segment::Segment;
use opentelemetry_proto::tonic::common::v1::AnyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::profiles::v1development as proto;
use prost::Message as _;
use std::collections::HashMap;
use tachyon::profile::address_of_name;

/// Stands for a stack without frames: stack 0 means "none".
const NO_FRAMES: &str = "<no frames>";

/// The tables, and the positions of their entries.
pub(super) struct Dictionary<'a> {
    segment: &'a Segment,
    tables: proto::ProfilesDictionary,
    strings: HashMap<String, i32>,
    /// By name and file.
    functions: HashMap<(i32, i32), i32>,
    /// By key and value.
    attributes: HashMap<(String, String), i32>,
    /// By file and build id.
    mappings: HashMap<(i32, String), i32>,
    /// By frame id.
    locations: HashMap<i64, i32>,
    no_frames: Option<i32>,
    stacks: HashMap<StackId, i32>,
    bytes: usize,
}

impl<'a> Dictionary<'a> {
    /// For the frames and stacks of a segment.
    pub(super) fn new(segment: &'a Segment) -> Self {
        // The first entry of each table is empty.
        let tables = proto::ProfilesDictionary {
            mapping_table: vec![proto::Mapping::default()],
            location_table: vec![proto::Location::default()],
            function_table: vec![proto::Function::default()],
            link_table: vec![proto::Link::default()],
            string_table: vec![String::new()],
            attribute_table: vec![proto::KeyValueAndUnit::default()],
            stack_table: vec![proto::Stack::default()],
        };
        Self {
            segment,
            tables,
            strings: HashMap::from([(String::new(), 0)]),
            functions: HashMap::new(),
            attributes: HashMap::new(),
            mappings: HashMap::new(),
            locations: HashMap::new(),
            no_frames: None,
            stacks: HashMap::new(),
            bytes: 0,
        }
    }

    /// How large it is, roughly.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The most that a stack would add, roughly.
    pub(super) fn cost(&self, id: StackId) -> usize {
        if self.stacks.contains_key(&id) {
            return 0;
        }
        let frames = self.segment.stacks.get(&id).into_iter().flat_map(|frames| frames.iter());
        let stack: usize = frames
            .map(|id| match self.segment.frames.get(id) {
                Some(frame) if !self.locations.contains_key(id) => frame.function.len() + frame.file.len() + 64,
                _ => 5,
            })
            .sum();
        stack + 8
    }

    pub(super) fn value_type(&mut self, r#type: &str, unit: &str) -> proto::ValueType {
        proto::ValueType { type_strindex: self.string(r#type), unit_strindex: self.string(unit) }
    }

    fn string(&mut self, text: &str) -> i32 {
        if let Some(&index) = self.strings.get(text) {
            return index;
        }
        let index = index_of(&self.tables.string_table);
        self.bytes += text.len() + 4;
        self.tables.string_table.push(text.to_owned());
        self.strings.insert(text.to_owned(), index);
        index
    }

    fn attribute(&mut self, key: &str, value: &str) -> i32 {
        if let Some(&index) = self.attributes.get(&(key.to_owned(), value.to_owned())) {
            return index;
        }
        let key_strindex = self.string(key);
        let index = index_of(&self.tables.attribute_table);
        let value_of = AnyValue { value: Some(Value::StringValue(value.to_owned())) };
        let attribute = proto::KeyValueAndUnit { key_strindex, value: Some(value_of), unit_strindex: 0 };
        self.bytes += attribute.encoded_len() + 3;
        self.tables.attribute_table.push(attribute);
        self.attributes.insert((key.to_owned(), value.to_owned()), index);
        index
    }

    /// Its index; adds the stack, with everything it needs, to the tables if necessary.
    pub(super) fn stack(&mut self, id: StackId) -> i32 {
        if let Some(&index) = self.stacks.get(&id) {
            return index;
        }
        let segment = self.segment;
        let frames = segment.stacks.get(&id).into_iter().flat_map(|frames| frames.iter());
        let mut location_indices: Vec<i32> =
            frames.filter_map(|frame| segment.frames.get(frame)).map(|frame| self.location(frame)).collect();
        if location_indices.is_empty() {
            location_indices.push(self.no_frames());
        }
        let index = index_of(&self.tables.stack_table);
        let stack = proto::Stack { location_indices };
        self.bytes += stack.encoded_len() + 4;
        self.tables.stack_table.push(stack);
        self.stacks.insert(id, index);
        index
    }

    fn no_frames(&mut self) -> i32 {
        if let Some(index) = self.no_frames {
            return index;
        }
        let function_index = self.function(NO_FRAMES, "");
        let line = proto::Line { function_index, ..proto::Line::default() };
        let index = self.push_location(proto::Location { lines: vec![line], ..proto::Location::default() });
        self.no_frames = Some(index);
        index
    }

    fn location(&mut self, frame: &FrameRow) -> i32 {
        if let Some(&index) = self.locations.get(&frame.frame_id) {
            return index;
        }
        // A mapping is only useful with a build id: backends look up names by it.
        let mapping_index = frame.build_id.as_ref().map_or(0, |build_id| self.mapping(&frame.file, build_id));
        let whole = format!("{}!{}", frame.file, frame.function);
        let address = address_of_name(&whole).filter(|_| mapping_index != 0).map_or(0, |(_, address)| address);
        let file = if mapping_index == 0 { &*frame.file } else { "" };
        let line = proto::Line {
            function_index: self.function(&frame.function, file),
            line: frame.line.map_or(0, i64::from).max(0),
            column: 0,
        };
        // opentelemetry.io/docs/specs/semconv/registry/attributes/profile: any other kind has no value.
        let kind = match &*frame.kind {
            "python" => Some("cpython"),
            "native" => Some("native"),
            "kernel" => Some("kernel"),
            _ => None,
        };
        let attribute_indices = kind.map(|kind| self.attribute("profile.frame.type", kind)).into_iter().collect();
        let index =
            self.push_location(proto::Location { mapping_index, address, lines: vec![line], attribute_indices });
        self.locations.insert(frame.frame_id, index);
        index
    }

    fn push_location(&mut self, location: proto::Location) -> i32 {
        let index = index_of(&self.tables.location_table);
        self.bytes += location.encoded_len() + 3;
        self.tables.location_table.push(location);
        index
    }

    fn function(&mut self, name: &str, file: &str) -> i32 {
        let key = (self.string(name), self.string(file));
        if let Some(&index) = self.functions.get(&key) {
            return index;
        }
        let index = index_of(&self.tables.function_table);
        let (name_strindex, filename_strindex) = key;
        let function = proto::Function { name_strindex, filename_strindex, ..proto::Function::default() };
        self.bytes += function.encoded_len() + 2;
        self.tables.function_table.push(function);
        self.functions.insert(key, index);
        index
    }

    fn mapping(&mut self, file: &str, build_id: &str) -> i32 {
        let key = (self.string(file), build_id.to_owned());
        if let Some(&index) = self.mappings.get(&key) {
            return index;
        }
        let attribute = self.attribute("process.executable.build_id.gnu", build_id);
        let index = index_of(&self.tables.mapping_table);
        let mapping = proto::Mapping {
            filename_strindex: key.0,
            attribute_indices: vec![attribute],
            ..proto::Mapping::default()
        };
        self.bytes += mapping.encoded_len() + 2;
        self.tables.mapping_table.push(mapping);
        self.mappings.insert(key, index);
        index
    }

    pub(super) fn finish(self) -> proto::ProfilesDictionary {
        self.tables
    }
}

fn index_of<T>(table: &[T]) -> i32 {
    i32::try_from(table.len()).expect("a message of some megabytes has fewer than 2^31 things")
}
