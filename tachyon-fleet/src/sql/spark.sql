CREATE OR REPLACE TEMPORARY VIEW samples AS
SELECT * FROM parquet.`{root}/samples/*/*/*`{where};

CREATE OR REPLACE TEMPORARY VIEW stack_time AS
SELECT service, stack_id, CAST(sum(on_cpu_ns) AS BIGINT) AS ns FROM samples GROUP BY service, stack_id;

CREATE OR REPLACE TEMPORARY VIEW stacks AS
SELECT stack_id, any_value(frame_ids) AS frame_ids
FROM parquet.`{root}/stacks/*/*/*`
GROUP BY stack_id;

CREATE OR REPLACE TEMPORARY VIEW frames AS
SELECT frame_id, any_value(function) AS function, any_value(file) AS file, any_value(line) AS line, any_value(type) AS type
FROM parquet.`{root}/frames/*/*/*`
GROUP BY frame_id;

CREATE OR REPLACE TEMPORARY VIEW loss AS
SELECT * FROM parquet.`{root}/loss/*/*/*`{where};

CREATE OR REPLACE TEMPORARY VIEW stack_frames AS
SELECT stack_id, frame_id, place + 1 AS place
FROM stacks LATERAL VIEW posexplode(frame_ids) AS place, frame_id;
