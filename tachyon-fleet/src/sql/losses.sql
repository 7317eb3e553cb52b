-- Which hosts lose samples: stored and lost ones, the share that is lost in millionths, and recovered segments, whose losses are
-- unknown.
WITH counted AS (
  SELECT s.host AS host, s.samples AS stored, CAST(0 AS BIGINT) AS lost, 0 AS recovered FROM samples s
  UNION ALL
  SELECT l.host AS host, CAST(0 AS BIGINT) AS stored, l.runs AS lost, CASE WHEN l.cause = 'cut' THEN 1 ELSE 0 END AS recovered
  FROM loss l
),
hosts AS (
  SELECT host, CAST(sum(stored) AS BIGINT) AS stored, CAST(sum(lost) AS BIGINT) AS lost, CAST(sum(recovered) AS BIGINT) AS recovered
  FROM counted
  GROUP BY host
),
shares AS (
  SELECT host, stored, lost, recovered,
    CASE WHEN lost = 0 THEN CAST(0 AS BIGINT) ELSE
      CAST(floor(CAST(lost AS DOUBLE) * CAST(1000000 AS DOUBLE) / CAST(stored + lost AS DOUBLE) + CAST(0.5 AS DOUBLE)) AS BIGINT)
    END AS lost_ppm
  FROM hosts
)
SELECT host, stored, lost, lost_ppm, recovered
FROM shares
ORDER BY lost_ppm DESC, recovered DESC, host;
