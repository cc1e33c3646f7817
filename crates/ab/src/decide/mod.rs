//! Pure decisions of experiments: their design, and the statistics of their samples.
