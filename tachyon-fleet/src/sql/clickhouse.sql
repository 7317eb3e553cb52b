CREATE OR REPLACE VIEW samples AS
SELECT * FROM file('{root}/samples/*/*/*/*.parquet', Parquet){where}
SETTINGS use_hive_partitioning = 0;

CREATE OR REPLACE VIEW stack_time AS
SELECT service, stack_id, CAST(sum(on_cpu_ns) AS BIGINT) AS ns FROM samples GROUP BY service, stack_id;

CREATE OR REPLACE VIEW stacks AS
SELECT stack_id, any(frame_ids) AS frame_ids
FROM file('{root}/stacks/*/*/*/*.parquet', Parquet)
GROUP BY stack_id
SETTINGS use_hive_partitioning = 0;

CREATE OR REPLACE VIEW frames AS
SELECT frame_id, any(function) AS function, any(file) AS file, any(line) AS line, any(type) AS type
FROM file('{root}/frames/*/*/*/*.parquet', Parquet)
GROUP BY frame_id
SETTINGS use_hive_partitioning = 0;

CREATE OR REPLACE VIEW loss AS
SELECT * FROM file('{root}/loss/*/*/*/*.parquet', Parquet){where}
SETTINGS use_hive_partitioning = 0;

CREATE OR REPLACE VIEW stack_frames AS
SELECT stack_id, frame_id, place
FROM stacks ARRAY JOIN frame_ids AS frame_id, arrayEnumerate(frame_ids) AS place;
