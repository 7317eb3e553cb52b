# Runs a script of SQL with the Python module of an engine; the rows of each query are lines of JSON.
import atexit
import json
import os
import re
import sys

module = sys.argv[1]
try:
    if module == "duckdb":
        import duckdb

        # What it draws of a query that takes longer would be between the rows.
        connection = duckdb.connect()
        connection.execute("SET enable_progress_bar = false")

        def rows(statement):
            result = connection.execute(statement)
            if result.description is None:
                return []
            names = [column[0] for column in result.description]
            return [dict(zip(names, row)) for row in result.fetchall()]

    elif module == "pyspark":
        from pyspark.sql import SparkSession

        # A cluster of one's own by SPARK_MASTER; times are UTC everywhere.
        builder = SparkSession.builder.appName("tachyon-fleet").master(os.environ.get("SPARK_MASTER", "local[*]"))
        builder = builder.config("spark.sql.session.timeZone", "UTC").config("spark.ui.enabled", "false")
        spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        # Otherwise it says of a cluster of its own that the application failed.
        atexit.register(spark.stop)

        def rows(statement):
            return [row.asDict() for row in spark.sql(statement).collect()]

    else:
        from chdb import session

        connection = session.Session()

        def rows(statement):
            return [json.loads(line) for line in str(connection.query(statement, "JSONEachRow")).splitlines()]

except ImportError:
    sys.exit(3)

script = "".join(line for line in sys.stdin if not line.startswith("--"))
# No text in it ends a line with a semicolon: paths with line breaks are refused.
for statement in re.split(r";\n", script):
    if statement.strip().startswith("CREATE"):
        rows(statement)
    elif statement.strip():
        print(json.dumps(rows(statement), indent=1))
