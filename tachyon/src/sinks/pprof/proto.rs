//! The messages of pprof's `profile.proto` (github.com/google/pprof, `proto/profile.proto`), as far as this sink writes
//! them; the field numbers are the format.

/// A whole profile.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Profile {
    /// What the values of a sample are.
    #[prost(message, repeated, tag = "1")]
    pub sample_type: Vec<ValueType>,
    /// Samples, equal ones summed up.
    #[prost(message, repeated, tag = "2")]
    pub sample: Vec<Sample>,
    /// Objects; the first is the main program.
    #[prost(message, repeated, tag = "3")]
    pub mapping: Vec<Mapping>,
    /// Places.
    #[prost(message, repeated, tag = "4")]
    pub location: Vec<Location>,
    /// Functions.
    #[prost(message, repeated, tag = "5")]
    pub function: Vec<Function>,
    /// Strings; the first is empty.
    #[prost(string, repeated, tag = "6")]
    pub string_table: Vec<String>,
    /// Start, nanoseconds since 1970, UTC.
    #[prost(int64, tag = "9")]
    pub time_nanos: i64,
    /// Length of the recording, nanoseconds.
    #[prost(int64, tag = "10")]
    pub duration_nanos: i64,
    /// What is counted between samples.
    #[prost(message, optional, tag = "11")]
    pub period_type: Option<ValueType>,
    /// How much of it.
    #[prost(int64, tag = "12")]
    pub period: i64,
    /// Free text: string indices.
    #[prost(int64, repeated, tag = "13")]
    pub comment: Vec<i64>,
    /// The value to show first: a string index.
    #[prost(int64, tag = "14")]
    pub default_sample_type: i64,
}

/// What a value means, as string indices.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct ValueType {
    /// What, e.g. `cpu`.
    #[prost(int64, tag = "1")]
    pub r#type: i64,
    /// In what, e.g. `nanoseconds`.
    #[prost(int64, tag = "2")]
    pub unit: i64,
}

/// Equal samples.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Sample {
    /// Ids of locations, leaf first.
    #[prost(uint64, repeated, tag = "1")]
    pub location_id: Vec<u64>,
    /// In the order of [`Profile::sample_type`].
    #[prost(int64, repeated, tag = "2")]
    pub value: Vec<i64>,
    /// What else is known.
    #[prost(message, repeated, tag = "3")]
    pub label: Vec<Label>,
}

/// A name with a text or a number.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Label {
    /// String index.
    #[prost(int64, tag = "1")]
    pub key: i64,
    /// String index; 0 for a number.
    #[prost(int64, tag = "2")]
    pub str: i64,
    /// The number.
    #[prost(int64, tag = "3")]
    pub num: i64,
}

/// An object.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Mapping {
    /// From 1.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// First address.
    #[prost(uint64, tag = "2")]
    pub memory_start: u64,
    /// Address past the end.
    #[prost(uint64, tag = "3")]
    pub memory_limit: u64,
    /// Where in the file the first address is, in bytes.
    #[prost(uint64, tag = "4")]
    pub file_offset: u64,
    /// String index.
    #[prost(int64, tag = "5")]
    pub filename: i64,
    /// String index.
    #[prost(int64, tag = "6")]
    pub build_id: i64,
    /// Names are there.
    #[prost(bool, tag = "7")]
    pub has_functions: bool,
    /// Files are there.
    #[prost(bool, tag = "8")]
    pub has_filenames: bool,
    /// Lines are there.
    #[prost(bool, tag = "9")]
    pub has_line_numbers: bool,
    /// Inlined functions are there.
    #[prost(bool, tag = "10")]
    pub has_inline_frames: bool,
}

/// A place.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Location {
    /// From 1.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// Id of a mapping; 0: none.
    #[prost(uint64, tag = "2")]
    pub mapping_id: u64,
    /// Address of the instruction; 0: none.
    #[prost(uint64, tag = "3")]
    pub address: u64,
    /// The function and those that are inlined into it here, innermost first.
    #[prost(message, repeated, tag = "4")]
    pub line: Vec<Line>,
}

/// A line of a function.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Line {
    /// Id of a function.
    #[prost(uint64, tag = "1")]
    pub function_id: u64,
    /// Line number.
    #[prost(int64, tag = "2")]
    pub line: i64,
}

/// A function.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Function {
    /// From 1.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// Name for people: string index.
    #[prost(int64, tag = "2")]
    pub name: i64,
    /// Name for linkers: string index.
    #[prost(int64, tag = "3")]
    pub system_name: i64,
    /// File: string index.
    #[prost(int64, tag = "4")]
    pub filename: i64,
}
