-- For the Hive connector, in a schema of its own, with hive.recursive-directories=true.
CREATE TABLE IF NOT EXISTS samples_files (
  slice_start timestamp(3) with time zone, host varchar, service varchar, version varchar, python varchar, script varchar,
  comm varchar, container varchar, pod varchar, pid integer, labels map(varchar, varchar), stack_id varbinary,
  on_cpu_ns bigint, waiting_ns bigint, samples bigint
) WITH (format = 'PARQUET', external_location = '{root}/samples');

CREATE TABLE IF NOT EXISTS stacks_files (stack_id varbinary, frame_ids array(bigint))
WITH (format = 'PARQUET', external_location = '{root}/stacks');

CREATE TABLE IF NOT EXISTS frames_files (
  frame_id bigint, function varchar, file varchar, line integer, type varchar, build_id varchar
) WITH (format = 'PARQUET', external_location = '{root}/frames');

CREATE TABLE IF NOT EXISTS loss_files (slice_start timestamp(3) with time zone, host varchar, cause varchar, runs bigint)
WITH (format = 'PARQUET', external_location = '{root}/loss');

CREATE OR REPLACE VIEW samples AS SELECT * FROM samples_files{where};

CREATE OR REPLACE VIEW stack_time AS
SELECT service, stack_id, CAST(sum(on_cpu_ns) AS BIGINT) AS ns FROM samples GROUP BY service, stack_id;

CREATE OR REPLACE VIEW stacks AS
SELECT stack_id, any_value(frame_ids) AS frame_ids FROM stacks_files GROUP BY stack_id;

CREATE OR REPLACE VIEW frames AS
SELECT frame_id, any_value(function) AS function, any_value(file) AS file, any_value(line) AS line, any_value(type) AS type
FROM frames_files
GROUP BY frame_id;

CREATE OR REPLACE VIEW loss AS SELECT * FROM loss_files{where};

CREATE OR REPLACE VIEW stack_frames AS
SELECT stack_id, frame_id, place
FROM stacks CROSS JOIN UNNEST(frame_ids) WITH ORDINALITY AS unnested (frame_id, place);
