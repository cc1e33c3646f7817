-- A session that holds two sorted results in its memory: one that is equal in all sessions, and one of its own.
SELECT pg_backend_pid();
BEGIN;
DECLARE common NO SCROLL CURSOR FOR
    SELECT n, md5(n::text) AS name, md5((n::bigint * 7919)::text) AS note FROM generate_series(1, :rows) AS n ORDER BY name;
MOVE 1 FROM common;
DECLARE own NO SCROLL CURSOR FOR
    SELECT n, md5(n::text || pg_backend_pid()) AS name, md5((n::bigint * pg_backend_pid())::text) AS note
    FROM generate_series(1, :rows) AS n ORDER BY name;
MOVE 1 FROM own;
SELECT 'held';
