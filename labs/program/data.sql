-- The database that every instance of the benchmark's program holds: rows whose text follows from their number, so that
-- it is the same whenever it is made. @rows tells how many. The index is there because real databases have one.
PRAGMA page_size = 4096;
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
CREATE TABLE data (key INTEGER PRIMARY KEY, name TEXT, reading REAL, note TEXT);
WITH RECURSIVE rows(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM rows WHERE i < @rows)
INSERT INTO data
SELECT i,
       printf('station-%07d', (i * 7919) % 1000003),
       (i * 104729 % 1000000) / 997.0,
       printf('%016x %016x %016x: nothing unusual was seen in this interval', i * 2654435761, i * 40503, i * i)
FROM rows;
CREATE INDEX by_name ON data (name);
