-- The history of a host, version 2 (PRAGMA user_version). Times are Unix times in milliseconds, amounts bytes, CPU times
-- seconds. Values that could not be read are NULL.

-- A run of the daemon. CPU times of its samples are counted from its start.
CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    host TEXT NOT NULL,
    version TEXT NOT NULL,
    started_ms INTEGER NOT NULL
) STRICT;

-- The state of the host.
CREATE TABLE sample (
    time_ms INTEGER PRIMARY KEY,
    run_id INTEGER NOT NULL,
    saved_gross INTEGER,
    saved_net INTEGER,
    total INTEGER,
    available INTEGER,
    keep_available INTEGER,
    ksmd_seconds REAL,
    pagefold_seconds REAL,
    bound_percent REAL NOT NULL,
    tracked_processes INTEGER NOT NULL
) STRICT;

-- Passes: a census, and a merge if it is profitable. The columns are the fields of
-- `record::HistoryPass`.
CREATE TABLE pass (
    run_id INTEGER NOT NULL,
    number INTEGER NOT NULL,
    time_ms INTEGER NOT NULL,
    seconds REAL NOT NULL,
    cpu_seconds REAL NOT NULL,
    processes INTEGER NOT NULL,
    predicted INTEGER NOT NULL,
    measured INTEGER,
    arrival_wait_seconds REAL,
    seconds_to_90 REAL,
    seconds_to_99 REAL,
    PRIMARY KEY (run_id, number)
) STRICT;
CREATE INDEX pass_time ON pass (time_ms);

-- The daemon's decisions.
CREATE TABLE decision (
    id INTEGER PRIMARY KEY,
    time_ms INTEGER NOT NULL,
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    reason TEXT NOT NULL,
    explanation TEXT NOT NULL,
    predicted INTEGER,
    carried_out INTEGER NOT NULL
) STRICT;
CREATE INDEX decision_time ON decision (time_ms);

-- Footprints of the largest tracked processes.
CREATE TABLE footprint (
    id INTEGER PRIMARY KEY,
    time_ms INTEGER NOT NULL,
    label TEXT NOT NULL,
    kind TEXT NOT NULL,
    domain TEXT NOT NULL,
    pid INTEGER NOT NULL,
    resident INTEGER,
    footprint INTEGER,
    saved INTEGER
) STRICT;
CREATE INDEX footprint_time ON footprint (time_ms);
