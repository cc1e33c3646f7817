//! All samples as rows of a Parquet file, for data frames; null for unknown values.

use super::record::HistorySpan;
use super::series::{self, SeriesPoint};
use pagefold_census::parquet::column;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::errors::Result;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

const SAMPLES_SCHEMA: &str = "message history {
    required binary side (UTF8);
    required binary host (UTF8);
    required double time;
    optional int64 saved_gross;
    optional int64 saved_net;
    optional int64 total;
    optional int64 available;
    optional int64 keep_available;
    optional double ksmd_percent;
    optional double pagefold_percent;
    required double bound_percent;
    required int64 tracked_processes;
}";

/// Write all samples of all sides.
///
/// # Panics
/// Never: the schema is a constant that parses.
pub fn write_samples(sides: &[(String, HistorySpan)], path: &Path) -> Result<()> {
    let schema = Arc::new(parse_message_type(SAMPLES_SCHEMA).expect("the schema parses"));
    let properties = Arc::new(WriterProperties::builder().set_compression(Compression::SNAPPY).build());
    let mut file = SerializedFileWriter::new(File::create(path)?, schema, properties)?;
    let rows: Vec<(&str, &str, SeriesPoint)> = sides
        .iter()
        .flat_map(|(name, span)| {
            series::points_from_samples(&span.samples)
                .into_iter()
                .map(|point| (name.as_str(), span.host.as_str(), point))
        })
        .collect();
    let mut group = file.next_row_group()?;
    let text = |field: &dyn Fn(&(&str, &str, SeriesPoint)) -> String| {
        rows.iter().map(|row| ByteArray::from(field(row).into_bytes())).collect::<Vec<_>>()
    };
    column::<ByteArrayType>(&mut group, &text(&|row| row.0.to_owned()))?;
    column::<ByteArrayType>(&mut group, &text(&|row| row.1.to_owned()))?;
    let points = || rows.iter().map(|(_, _, point)| point);
    column::<DoubleType>(&mut group, &points().map(|point| point.time).collect::<Vec<_>>())?;
    write_optional_column::<Int64Type>(&mut group, points().map(|point| point.saved_gross.map(u64::cast_signed)))?;
    write_optional_column::<Int64Type>(&mut group, points().map(|point| point.saved_net))?;
    write_optional_column::<Int64Type>(&mut group, points().map(|point| point.total.map(u64::cast_signed)))?;
    write_optional_column::<Int64Type>(&mut group, points().map(|point| point.available.map(u64::cast_signed)))?;
    write_optional_column::<Int64Type>(&mut group, points().map(|point| point.keep_available.map(u64::cast_signed)))?;
    write_optional_column::<DoubleType>(&mut group, points().map(|point| point.ksmd_percent))?;
    write_optional_column::<DoubleType>(&mut group, points().map(|point| point.pagefold_percent))?;
    column::<DoubleType>(&mut group, &points().map(|point| point.bound_percent).collect::<Vec<_>>())?;
    column::<Int64Type>(&mut group, &points().map(|point| point.tracked_processes.cast_signed()).collect::<Vec<_>>())?;
    group.close()?;
    file.close()?;
    Ok(())
}

fn write_optional_column<T: DataType>(
    rows: &mut SerializedRowGroupWriter<'_, File>,
    values: impl Iterator<Item = Option<T::T>>,
) -> Result<()> {
    let values: Vec<Option<T::T>> = values.collect();
    let levels: Vec<i16> = values.iter().map(|value| i16::from(value.is_some())).collect();
    let present: Vec<T::T> = values.into_iter().flatten().collect();
    let mut column = rows.next_column()?.expect("the schema has a column for each write");
    column.typed::<T>().write_batch(&present, Some(&levels), None)?;
    column.close()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::HistorySample;
    use parquet::file::reader::SerializedFileReader;

    #[test]
    fn every_sample_is_read_back() {
        let known = HistorySample {
            time: 2.0,
            run_id: 1,
            saved_net: Some(-7),
            total: Some(u64::from(u32::MAX)),
            ..HistorySample::default()
        };
        let span = HistorySpan {
            host: "h".to_owned(),
            samples: vec![HistorySample::default(), known],
            ..HistorySpan::default()
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("history.parquet");
        write_samples(&[("s".to_owned(), span)], &path).unwrap();
        let rows: Vec<String> = SerializedFileReader::try_from(path.as_path())
            .unwrap()
            .into_iter()
            .map(|row| row.unwrap().to_string())
            .collect();
        assert_eq!(rows.len(), 2);
        assert!(rows[0].contains("saved_net: null") && rows[0].contains("ksmd_percent: null"), "{}", rows[0]);
        assert!(rows[1].contains("saved_net: -7, total: 4294967295"), "{}", rows[1]);
    }
}
