//! Opening a file: header, footer, tables.

use super::bytes::Bytes;
use super::checkpoint::checksum;
use super::header::{FOOTER_SIZE, HEADER_SIZE};
use super::samples::Source;
use super::{
    Base, Compression, FOOTER_LEN, HEADER_LEN, Header, MAX_SAMPLE_BYTES, Options, ReadError, Samples, Section,
    Statistics, Tables, statistics,
};
use std::io::{self, Read, Seek, SeekFrom, Take};

/// A profile file, opened.
///
/// Reads both layouts, both byte orders and both compressions. The tables are in memory, samples are streamed with
/// [`Reader::samples`], as often as wanted.
///
/// Nothing in a file is trusted: each kind of damage has its own [`ReadError`], and everything before it can be read.
///
/// ```
/// use std::collections::BTreeMap;
/// use std::fs::File;
/// use std::io::BufReader;
/// use tachyon::tach::Reader;
///
/// // A file that CPython 3.15's own writer made.
/// let file = File::open("../tests/golden/tach/v03_record_types.tach")?;
/// let mut reader = Reader::new(BufReader::new(file))?;
/// assert_eq!(reader.header().python_version[..2], [3, 15]);
///
/// let mut leaves = BTreeMap::new();
/// let mut samples = reader.samples()?;
/// while let Some(sample) = samples.next_sample()? {
///     // Innermost first. The reader has checked the index, and those of the names.
///     if let Some(&leaf) = sample.frames.first() {
///         *leaves.entry(leaf).or_insert(0) += 1;
///     }
/// }
/// let tables = samples.tables();
/// for (leaf, count) in leaves {
///     let frame = tables.frame(leaf).expect("checked");
///     println!("{count:6} {}", tables.string(frame.function).expect("checked"));
/// }
/// assert_eq!(samples.records().samples(), reader.header().sample_count);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Reader<R> {
    pub(super) source: R,
    pub(super) header: Header,
    pub(super) statistics: Option<Statistics>,
    pub(super) tables: Tables,
    /// Replaces the end of the samples from there on.
    pub(super) end: Option<(u64, Vec<u8>)>,
}

impl<R: Read + Seek> Reader<R> {
    /// Reads all but the samples.
    ///
    /// # Errors
    /// When the bytes cannot be read or are not a readable profile.
    pub fn new(mut source: R) -> Result<Self, ReadError> {
        let file_size = source.seek(SeekFrom::End(0)).map_err(ReadError::Io)?;
        if file_size < HEADER_LEN + FOOTER_LEN {
            return Err(without_footer(&mut source, file_size));
        }
        let header: [u8; HEADER_SIZE] = read_array(&mut source, 0)?;
        let footer: [u8; FOOTER_SIZE] = read_array(&mut source, file_size - FOOTER_LEN)?;
        let header = Header::decode(&header, &footer, file_size)?;
        let statistics = read_statistics(&mut source, &header)?;

        let mut tables = Tables::default();
        let (mut bytes, available) = section(&mut source, Section::Strings, header.string_table_offset, file_size)?;
        tables.read_strings(&mut bytes, header.string_count, available)?;
        let (mut bytes, available) = section(&mut source, Section::Frames, header.frame_table_offset, file_size)?;
        tables.read_frames(&mut bytes, header.frame_count, available)?;
        Ok(Self { source, header, statistics, tables, end: None })
    }

    /// Opens a file whose writer was stopped: what its header and tables would have said comes from elsewhere.
    /// `samples_end` is the offset where the samples end, if that is known; otherwise the whole file is taken for samples.
    ///
    /// The samples then end with an error that says where the file was cut.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn cut(mut source: R, options: &Options, tables: Tables, samples_end: Option<u64>) -> Result<Self, ReadError> {
        let file_size = source.seek(SeekFrom::End(0)).map_err(ReadError::Io)?;
        let end = samples_end.map_or(file_size, |end| end.min(file_size)).max(HEADER_LEN);
        let header = Header {
            sample_count: u64::MAX,
            thread_count: u32::MAX,
            string_table_offset: end,
            frame_table_offset: end,
            declared_size: file_size,
            file_size,
            ..options.header()
        };
        Ok(Self { source, header, statistics: None, tables, end: None })
    }

    /// Has the samples of a file that was cut go on from `base` with these records, which
    /// [`Writer::checkpoint`](super::Writer::checkpoint) gave; what the file has after the base is left out. Returns
    /// false, and changes nothing, if they belong to another file or this one ends before its base.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn continue_with(&mut self, base: &Base, records: Vec<u8>) -> Result<bool, ReadError> {
        if self.header.compression == Compression::Zstd && base.len > MAX_SAMPLE_BYTES {
            return Ok(false);
        }
        self.source.seek(SeekFrom::Start(HEADER_LEN)).map_err(ReadError::Io)?;
        let mut hasher = checksum(&Options::from(&self.header));
        let mut before = match Source::new(&mut self.source, &self.header, Some((base.len, &[]))) {
            Err(ReadError::EmptyZstd) => return Ok(false),
            other => other?,
        };
        let (mut buffer, mut len) = (vec![0; 64 * 1024], 0);
        loop {
            match before.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => {
                    hasher.update(&buffer[..count]);
                    len += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.raw_os_error().is_some() => return Err(ReadError::Io(error)),
                Err(_) => break,
            }
        }
        let fits = (len, hasher.finalize()) == (base.len, base.crc32);
        if fits {
            self.end = Some((base.len, records));
        }
        Ok(fits)
    }

    /// What header and footer say.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The statistics block, if the file has one.
    #[must_use]
    pub fn statistics(&self) -> Option<&Statistics> {
        self.statistics.as_ref()
    }

    /// Strings and frames.
    #[must_use]
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// The samples, from the first one.
    ///
    /// # Errors
    /// When the file cannot be read, or its compressed part is empty.
    pub fn samples(&mut self) -> Result<Samples<'_, R>, ReadError> {
        self.source.seek(SeekFrom::Start(HEADER_LEN)).map_err(ReadError::Io)?;
        let end = self.end.as_ref().map(|(len, records)| (*len, records.as_slice()));
        let source = Source::new(&mut self.source, &self.header, end)?;
        Ok(Samples::new(source, &self.header, &self.tables))
    }
}

/// What is wrong with a file that has no room for header and footer: one that is being recorded may have only its header.
fn without_footer(source: &mut (impl Read + Seek), file_size: u64) -> ReadError {
    if file_size < HEADER_LEN {
        return ReadError::TooSmall(file_size);
    }
    match read_array(source, 0).and_then(|header| Header::decode(&header, &[0; FOOTER_SIZE], file_size)) {
        Err(error @ (ReadError::Unfinished | ReadError::Io(_))) => error,
        Ok(_) | Err(_) => ReadError::TooSmall(file_size),
    }
}

/// The bytes from `offset` to the end, and how many they are.
fn section<R: Read + Seek>(
    source: &mut R,
    section: Section,
    offset: u64,
    file_size: u64,
) -> Result<(Bytes<Take<&mut R>>, u64), ReadError> {
    source.seek(SeekFrom::Start(offset)).map_err(ReadError::Io)?;
    let available = file_size.saturating_sub(offset);
    Ok((Bytes::new(source.take(available), section, ReadError::Io, u64::MAX), available))
}

fn read_statistics<R: Read + Seek>(source: &mut R, header: &Header) -> Result<Option<Statistics>, ReadError> {
    let trailer_len = statistics::TRAILER_SIZE as u64;
    let Some(offset) = header.file_size.checked_sub(FOOTER_LEN + trailer_len) else { return Ok(None) };
    let trailer = read_array(source, offset)?;
    let Some((start, len)) = Statistics::locate(&trailer, header.byte_order, header.file_size)? else {
        return Ok(None);
    };
    // The older form is shorter, but the footer follows it: reading 56 bytes stays within the file.
    let block: [u8; statistics::SIZE] = read_array(source, start)?;
    Statistics::decode(block.get(..len).unwrap_or(&block), header.byte_order).map(Some)
}

fn read_array<const N: usize>(source: &mut (impl Read + Seek), offset: u64) -> Result<[u8; N], ReadError> {
    let mut bytes = [0; N];
    source.seek(SeekFrom::Start(offset)).map_err(ReadError::Io)?;
    source.read_exact(&mut bytes).map_err(ReadError::Io)?;
    Ok(bytes)
}
