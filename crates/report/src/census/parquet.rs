//! Every extent of mergeable pages as a row of a Parquet file, for data frames.

use pagefold_model::PageSize;
use pagefold_model::census::Census;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::errors::Result;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Addresses are of 64 bits in signed columns, as Parquet has them everywhere; `density` is the mergeable share.
const SCHEMA: &str = "message extents {
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

/// Write all extents of a census, in the order of trust domains, processes and addresses.
///
/// # Panics
/// Never: the schema is a constant that parses.
pub fn write(census: &Census, page_size: PageSize, path: &Path) -> Result<()> {
    let schema = Arc::new(parse_message_type(SCHEMA).expect("the schema parses"));
    let properties = Arc::new(WriterProperties::builder().set_compression(Compression::SNAPPY).build());
    let mut file = SerializedFileWriter::new(File::create(path)?, schema, properties)?;
    let extents = &census.extents;
    let integers = |value: &dyn Fn(usize) -> u64| (0..extents.len()).map(|i| value(i) as i64).collect::<Vec<_>>();
    let of = |i: usize| &census.subjects[extents[i].subject];
    let mut rows = file.next_row_group()?;
    column::<Int64Type>(&mut rows, &integers(&|i| u64::from(of(i).process.id.pid.0)))?;
    column::<Int64Type>(&mut rows, &integers(&|i| of(i).process.id.start_time))?;
    let texts = |value: &dyn Fn(usize) -> String| {
        (0..extents.len()).map(|i| ByteArray::from(value(i).into_bytes())).collect::<Vec<_>>()
    };
    column::<ByteArrayType>(&mut rows, &texts(&|i| of(i).process.comm.clone()))?;
    column::<ByteArrayType>(&mut rows, &texts(&|i| of(i).domain.to_string()))?;
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

fn column<T: DataType>(rows: &mut SerializedRowGroupWriter<'_, File>, values: &[T::T]) -> Result<()> {
    let mut column = rows.next_column()?.expect("as many columns are written as the schema has");
    column.typed::<T>().write_batch(values, None, None)?;
    column.close()
}
