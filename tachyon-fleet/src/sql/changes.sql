-- What changed between the two versions of each service that were first seen last: shares of its CPU time, in millionths.
WITH seen AS (
  SELECT service, version, CAST(sum(on_cpu_ns) AS BIGINT) AS ns,
    row_number() OVER (PARTITION BY service ORDER BY min(slice_start) DESC, version DESC) AS age
  FROM samples
  WHERE version IS NOT NULL
  GROUP BY service, version
  HAVING sum(on_cpu_ns) > 0
),
pairs AS (
  SELECT a.service AS service, b.version AS old_version, a.version AS new_version, b.ns AS old_ns, a.ns AS new_ns
  FROM seen a
  JOIN seen b ON a.service = b.service
  WHERE a.age = 1 AND b.age = 2
),
version_time AS (
  SELECT s.service AS service, s.stack_id AS stack_id,
    CAST(sum(CASE WHEN s.version = p.old_version THEN s.on_cpu_ns ELSE 0 END) AS BIGINT) AS old_ns,
    CAST(sum(CASE WHEN s.version = p.new_version THEN s.on_cpu_ns ELSE 0 END) AS BIGINT) AS new_ns
  FROM samples s
  JOIN pairs p ON s.service = p.service
  WHERE s.version = p.old_version OR s.version = p.new_version
  GROUP BY s.service, s.stack_id
),
stack_functions AS (
  SELECT p.stack_id AS stack_id, f.function AS function, f.file AS file
  FROM stack_frames p
  JOIN frames f ON p.frame_id = f.frame_id
  GROUP BY p.stack_id, f.function, f.file
),
totals AS (
  SELECT t.service AS service, f.function AS function, f.file AS file,
    CAST(sum(t.old_ns) AS DOUBLE) AS old_ns, CAST(sum(t.new_ns) AS DOUBLE) AS new_ns
  FROM version_time t
  JOIN stack_functions f ON t.stack_id = f.stack_id
  GROUP BY t.service, f.function, f.file
),
shares AS (
  SELECT t.service AS service, p.old_version AS old_version, p.new_version AS new_version, t.function AS function, t.file AS file,
    CAST(floor(t.old_ns * CAST(1000000 AS DOUBLE) / CAST(p.old_ns AS DOUBLE) + CAST(0.5 AS DOUBLE)) AS BIGINT) AS old_ppm,
    CAST(floor(t.new_ns * CAST(1000000 AS DOUBLE) / CAST(p.new_ns AS DOUBLE) + CAST(0.5 AS DOUBLE)) AS BIGINT) AS new_ppm
  FROM totals t
  JOIN pairs p ON t.service = p.service
),
places AS (
  SELECT service, old_version, new_version, function, file, old_ppm, new_ppm, new_ppm - old_ppm AS change_ppm,
    row_number() OVER (PARTITION BY service ORDER BY abs(new_ppm - old_ppm) DESC, function, file) AS place
  FROM shares
  WHERE new_ppm <> old_ppm
)
SELECT service, old_version, new_version, function, file, old_ppm, new_ppm, change_ppm
FROM places
WHERE place <= {lines}
ORDER BY service, place;
