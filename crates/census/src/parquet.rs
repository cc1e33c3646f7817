//! Writes every extent of mergeable pages as a row of a Parquet file, for use in data frames.

use crate::results::Census;
use pagefold_base::PageSize;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::errors::Result;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Addresses are 64-bit values in signed columns because Parquet has no unsigned ones; `density` is the mergeable
/// share.
const EXTENTS_SCHEMA: &str = "message extents {
    required int64 pid;
    required int64 start_time;
    required binary comm (UTF8);
    required binary domain (UTF8);
    required int64 start;
    required int64 end;
    required int64 pages;
    required int64 zero;
    required int64 duplicate;
    required int64 redundant;
    required double density;
}";

/// Writes all extents of a census, in the order of trust domains, processes and addresses.
///
/// # Panics
/// Never: the constant schema is valid.
pub fn write_extents(census: &Census, page_size: PageSize, path: &Path) -> Result<()> {
    let schema = Arc::new(parse_message_type(EXTENTS_SCHEMA).expect("the extent schema is valid"));
    let properties = Arc::new(WriterProperties::builder().set_compression(Compression::SNAPPY).build());
    let mut file = SerializedFileWriter::new(File::create(path)?, schema, properties)?;
    let extents = &census.extents;
    let integers = |value: &dyn Fn(usize) -> u64| (0..extents.len()).map(|i| value(i) as i64).collect::<Vec<_>>();
    let subject = |i: usize| &census.subjects[extents[i].subject];
    let mut rows = file.next_row_group()?;
    column::<Int64Type>(&mut rows, &integers(&|i| u64::from(subject(i).process.id.pid.0)))?;
    column::<Int64Type>(&mut rows, &integers(&|i| subject(i).process.id.start_time))?;
    let texts = |value: &dyn Fn(usize) -> String| {
        (0..extents.len()).map(|i| ByteArray::from(value(i).into_bytes())).collect::<Vec<_>>()
    };
    column::<ByteArrayType>(&mut rows, &texts(&|i| subject(i).process.comm.clone()))?;
    column::<ByteArrayType>(&mut rows, &texts(&|i| subject(i).domain.to_string()))?;
    column::<Int64Type>(&mut rows, &integers(&|i| extents[i].range.start))?;
    column::<Int64Type>(&mut rows, &integers(&|i| extents[i].range.end))?;
    column::<Int64Type>(&mut rows, &integers(&|i| page_size.pages_in(extents[i].range.bytes()).0))?;
    column::<Int64Type>(&mut rows, &integers(&|i| extents[i].zero.0))?;
    column::<Int64Type>(&mut rows, &integers(&|i| extents[i].duplicate.0))?;
    column::<Int64Type>(&mut rows, &integers(&|i| extents[i].redundant.0))?;
    let densities: Vec<f64> = extents.iter().map(|extent| extent.density(page_size)).collect();
    column::<DoubleType>(&mut rows, &densities)?;
    rows.close()?;
    file.close()?;
    Ok(())
}

/// Writes the next column of a row group.
pub fn column<T: DataType>(rows: &mut SerializedRowGroupWriter<'_, File>, values: &[T::T]) -> Result<()> {
    let mut column = rows.next_column()?.expect("the schema has a column for each column written");
    column.typed::<T>().write_batch(values, None, None)?;
    column.close()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{Extent, SubjectCensus};
    use pagefold_base::domain::TrustDomain;
    use pagefold_base::process::Process;
    use pagefold_base::{Absent, AddressRange, PageCounts, Pages, Pid, ProcessId};
    use parquet::file::reader::SerializedFileReader;

    #[test]
    fn every_extent_is_read_back() {
        let id = ProcessId { pid: Pid(7), start_time: 99 };
        let process = Process { comm: "lab".to_owned(), ..Process::absent(id, &Absent::Denied) };
        let subject = SubjectCensus {
            process,
            domain: TrustDomain::User(1000),
            is_foreign: false,
            scanned_ranges: Vec::new(),
            counts: PageCounts::default(),
            regions: Vec::new(),
        };
        let extent = |start: u64| Extent {
            subject: 0,
            range: AddressRange { start, end: start + 8 * 4096 },
            duplicate: Pages(4),
            zero: Pages(2),
            redundant: Pages(3),
        };
        let census = Census {
            subjects: vec![subject],
            extents: vec![extent(0x7fff_0000_0000), extent(0xffff_8000_0000_0000)],
            ..Census::default()
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("extents.parquet");
        write_extents(&census, PageSize::new(4096).unwrap(), &path).unwrap();
        let rows: Vec<String> = SerializedFileReader::try_from(path.as_path())
            .unwrap()
            .into_iter()
            .map(|row| row.unwrap().to_string())
            .collect();
        assert_eq!(rows.len(), 2);
        assert_eq!(
            rows[0],
            "{pid: 7, start_time: 99, comm: \"lab\", domain: \"user 1000\", start: 140733193388032, \
             end: 140733193420800, pages: 8, zero: 2, duplicate: 4, redundant: 3, density: 0.75}"
        );
    }
}
