//! Writes each sample of a comparison as a row of a Parquet file, for use in data frames.

use crate::comparison::PolicyRuns;
use crate::decide::counters::PAGE_BYTES;
use crate::decide::samples::Sample;
use pagefold_census::parquet::column;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::errors::Result;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Fields of a sample. `saved_bytes` is less ksmd's metadata.
const SAMPLES_SCHEMA: &str = "message samples {
    required binary policy (UTF8);
    required int64 seed;
    required double seconds;
    required double ksmd_cpu_seconds;
    required double pagefold_cpu_seconds;
    required int64 machines;
    required int64 resident_bytes;
    required int64 saved_bytes;
    required int64 saved_pages;
    required int64 available_bytes;
    required int64 full_scans;
    required int64 pages_scanned;
    required int64 pages_skipped;
    required int64 cow_breaks;
    required int64 huge_pages_split;
    required int64 pages_to_scan;
}";

/// Columns of integers, in the order of the schema.
const INTEGERS: [fn(&Sample) -> i64; 11] = [
    |sample| sample.machines.cast_signed(),
    |sample| sample.resident_pages.cast_signed() * PAGE_BYTES,
    Sample::net_saved_bytes,
    |sample| sample.saved_pages.cast_signed(),
    |sample| sample.available_bytes,
    |sample| sample.full_scans.cast_signed(),
    |sample| sample.pages_scanned.cast_signed(),
    |sample| sample.pages_skipped.cast_signed(),
    |sample| sample.cow_breaks.cast_signed(),
    |sample| sample.huge_pages_split.cast_signed(),
    |sample| sample.pages_to_scan.cast_signed(),
];

/// Writes all samples, in the order of policies, seeds and times.
///
/// # Errors
/// If the file cannot be written.
///
/// # Panics
/// Never: the constant schema is valid.
pub fn write_samples(policies: &[PolicyRuns], seeds: &[u64], path: &Path) -> Result<()> {
    let schema = Arc::new(parse_message_type(SAMPLES_SCHEMA).expect("the schema of samples is valid"));
    let properties = Arc::new(WriterProperties::builder().set_compression(Compression::SNAPPY).build());
    let mut file = SerializedFileWriter::new(File::create(path)?, schema, properties)?;
    let mut rows: Vec<(ByteArray, i64, Sample)> = Vec::new();
    for policy in policies {
        let name = ByteArray::from(policy.policy.to_string().into_bytes());
        for (run, seed) in policy.runs.iter().zip(seeds) {
            rows.extend(run.samples.iter().map(|sample| (name.clone(), seed.cast_signed(), *sample)));
        }
    }
    let mut group = file.next_row_group()?;
    column::<ByteArrayType>(&mut group, &rows.iter().map(|row| row.0.clone()).collect::<Vec<_>>())?;
    column::<Int64Type>(&mut group, &rows.iter().map(|row| row.1).collect::<Vec<_>>())?;
    column::<DoubleType>(&mut group, &rows.iter().map(|row| row.2.time_ms as f64 / 1e3).collect::<Vec<_>>())?;
    for cpu_ns in [|sample: &Sample| sample.ksmd_cpu_ns, |sample: &Sample| sample.pagefold_cpu_ns] {
        column::<DoubleType>(&mut group, &rows.iter().map(|row| cpu_ns(&row.2) as f64 / 1e9).collect::<Vec<_>>())?;
    }
    for integer in INTEGERS {
        column::<Int64Type>(&mut group, &rows.iter().map(|row| integer(&row.2)).collect::<Vec<_>>())?;
    }
    group.close()?;
    file.close()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::policies::ComparedPolicy;
    use crate::decide::samples::SimulatedRun;
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use parquet::record::RowAccessor;

    #[test]
    fn every_sample_is_read_back() {
        let sample =
            |time_ms| Sample { time_ms, saved_pages: 3, rmap_items: 64, pages_to_scan: 7, ..Sample::default() };
        let run =
            SimulatedRun { samples: vec![sample(0), sample(1500)], duplicates: 3, huge_pages: 0, scan_wait: None };
        let runs = PolicyRuns { policy: ComparedPolicy::FlatOut, runs: vec![run.clone(), run] };
        let path = std::env::temp_dir().join(format!("pagefold-samples-{}.parquet", std::process::id()));
        write_samples(&[runs], &[4, 5], &path).unwrap();
        let reader = SerializedFileReader::new(File::open(&path).unwrap()).unwrap();
        std::fs::remove_file(path).unwrap();
        let rows: Vec<_> = reader.get_row_iter(None).unwrap().map(Result::unwrap).collect();
        assert_eq!(rows.len(), 4);
        let last = &rows[3];
        assert_eq!((last.get_string(0).unwrap().as_str(), last.get_long(1).unwrap()), ("flat-out", 5));
        assert_eq!((last.get_double(2).unwrap(), last.get_long(7).unwrap()), (1.5, 3 * 4096 - 64 * 64));
        assert_eq!(last.get_long(15).unwrap(), 7);
    }
}
