-- Top functions of the fleet, by service: CPU time of its own, and with what it called.
WITH stack_functions AS (
  SELECT p.stack_id AS stack_id, f.function AS function, f.file AS file, max(CASE WHEN p.place = 1 THEN 1 ELSE 0 END) AS is_leaf
  FROM stack_frames p
  JOIN frames f ON p.frame_id = f.frame_id
  GROUP BY p.stack_id, f.function, f.file
),
totals AS (
  SELECT t.service AS service, f.function AS function, f.file AS file,
    CAST(sum(CASE WHEN f.is_leaf = 1 THEN t.ns ELSE 0 END) AS BIGINT) AS self_ns, CAST(sum(t.ns) AS BIGINT) AS total_ns
  FROM stack_time t
  JOIN stack_functions f ON t.stack_id = f.stack_id
  WHERE t.ns > 0
  GROUP BY t.service, f.function, f.file
),
places AS (
  SELECT service, function, file, self_ns, total_ns,
    row_number() OVER (PARTITION BY service ORDER BY self_ns DESC, total_ns DESC, function, file) AS place
  FROM totals
)
SELECT service, function, file, self_ns, total_ns
FROM places
WHERE place <= {lines}
ORDER BY service, place;
