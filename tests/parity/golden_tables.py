"""What the golden tables are: Delta tables that the real Delta makes, one for each feature or mixture of features.

`golden_statements.py` says what a table is made from, `golden_making.py` makes the tables, and `golden_files.py` keeps
them in the repository.
"""

from __future__ import annotations

import datetime as dt

from tests.parity.golden_statements import (
    FAR_TIMES,
    Table,
    age_the_log,
    create,
    create_with_builder,
    every_type,
    identity,
    insert,
    numbers,
    old_types,
    parquet_with_odd_names,
    set_properties,
    shuffle_the_ages,
    write,
)

PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"

CONF = {
    "spark.jars.packages": PACKAGE,
    # They are among pyspark's jars.
    "spark.jars.excludes": ",".join(
        f"{group}:*"
        for group in ("com.fasterxml.jackson.core", "com.fasterxml.jackson.datatype", "com.github.luben",
                      "com.google.code.findbugs", "commons-pool", "io.airlift", "javax.annotation", "org.apache.hadoop",
                      "org.apache.logging.log4j", "org.apache.parquet", "org.locationtech.jts", "org.roaringbitmap",
                      "org.slf4j", "org.xerial.snappy")
    ),
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.session.timeZone": "America/New_York",
    "spark.sql.shuffle.partitions": "1",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.databricks.delta.retentionDurationCheck.enabled": "false",
    # Old versions are read however old their commits are.
    "spark.databricks.delta.vacuum.enforceTimeTravelWithinDeletedFileRetentionDuration": "false",
    "spark.databricks.delta.vacuum.enforceDeletedFileAndLogRetentionDurationCompatibility": "false",
    "spark.databricks.delta.vacuum.parallelDelete.enabled": "false",
    # Else VACUUM, RESTORE and CONVERT look for a handful of files in 10,000 tasks.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
    # So few rows are read sooner than code for them is compiled.
    "spark.driver.memory": "2g",
    "spark.sql.ui.explainMode": "simple",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # What fails is told by Python; lost versions fail on purpose.
    "spark.log.level": "FATAL",
}  # fmt: skip

_DELETION_VECTORS = "delta.enableDeletionVectors = true"
_BY_NAME = "delta.columnMapping.mode = 'name'"
_BY_ID = "delta.columnMapping.mode = 'id'"
_WIDENING = "delta.enableTypeWidening = true, delta.feature.timestampNtz = 'supported'"
_NO_VECTORS = "delta.enableDeletionVectors = false"
_SMALL_ROW_GROUPS = {"parquet.block.row.count.limit": "10"}

_ODD_STRINGS = (
    "plain", "with space", "a=b", "50%", "%20", "%2F", "a/b", "žluťoučký 🐟", "it''s", 'double"quote', "a:b", "#hash",
    "a?b", "a+b", "a&b", "back\\\\slash", "\\ttab", "line\\nbreak", "*", "{x}", "[y]", "x ", " y", "..", "", "~",
    "1", "01", "null", "__HIVE_DEFAULT_PARTITION__", "🐟" * 20,
)  # fmt: skip
_ODD_VALUES = ", ".join(f"({index}, '{text}')" for index, text in enumerate(_ODD_STRINGS))

TABLES: dict[str, Table] = {
    # What there is without any feature.
    "plain": Table(
        steps=(
            create(every_type(0, 20, files=2), properties=_NO_VECTORS),
            insert(every_type(20, 30)),
            set_properties("whatever = 'a commit without rows'"),
            "DELETE FROM $table WHERE id IN (3, 21)",
            "UPDATE $table SET string = 'changed', pair = array(1F, 2F) WHERE id % 4 = 1",
            "DELETE FROM $table WHERE id < 10",
        ),
        versions=6,
        filters=(("int", ">", -2147483640),),
    ),
    "small row groups": Table(
        steps=(
            create(every_type(0, 100, files=3)),
            "DELETE FROM $table WHERE id % 10 = 7",
        ),
        versions=2,
        conf=_SMALL_ROW_GROUPS,
        filters=(("long", "<", 50 - 9223372036854775807), ("boolean", "==", True)),
    ),
    "empty": Table(
        steps=(
            "CREATE TABLE $table (id BIGINT, x INT, p STRING) USING delta PARTITIONED BY (p)",
            "INSERT INTO $table VALUES (1, 2, 'a'), (3, NULL, NULL)",
            "DELETE FROM $table",
            "INSERT INTO $table VALUES (5, 6, 'b')",
        ),
        versions=4,
        filters=(("id", ">=", 3),),
    ),
    "empty files": Table(
        steps=(
            create(numbers(0, 5)),
            "INSERT INTO $table SELECT * FROM $table WHERE id < 0",
            set_properties("k = 'v'"),
            insert(numbers(5, 8)),
        ),
        versions=3,
    ),
    "times of two kinds": Table(
        # The first file has 96 bits for a time, the second 64.
        steps=(
            create("SELECT id, timestamp_micros(id * 987654321987 - 5) AS t FROM range(0, 9, 1, 1)"),
            "SET spark.sql.parquet.outputTimestampType=TIMESTAMP_MICROS",
            "INSERT INTO $table SELECT id, timestamp_micros(id * 987654321987 - 5) AS t FROM range(9, 12, 1, 1)",
            "INSERT INTO $table VALUES (12, '0001-01-01T00:00:00Z'), (13, '9999-12-31T23:59:59.999999Z'), (14, NULL)",
            "SET spark.sql.parquet.outputTimestampType=INT96",
            "INSERT INTO $table VALUES (15, '0001-01-01T00:00:00Z'), (16, '9999-12-31T23:59:59.999999Z')",
        ),
        versions=4,
        filters=(("id", ">", 5),),
    ),
    "odd folder": Table(
        steps=(
            create(numbers(0, 10), partitioned="s", properties=_DELETION_VECTORS),
            "DELETE FROM $table WHERE id IN (2, 3)",
        ),
        versions=2,
        folder="odd %20 folder, žluť=🐟 + 50%",
        # deltalake undoes the encoding of a path twice.
        unreadable=dict.fromkeys(range(2), "takes for an encoded sign"),
        filters=(("s", "==", "row 7"),),
    ),
    "converted from parquet": Table(
        steps=(
            parquet_with_odd_names,
            "CONVERT TO DELTA parquet.`$path` PARTITIONED BY (p INT)",
            set_properties(_DELETION_VECTORS),
            "DELETE FROM $table WHERE id % 5 = 1",
        ),
        versions=3,
        filters=(("p", "==", 1),),
    ),
    "without statistics": Table(
        steps=(
            create(numbers(0, 20, files=2), properties=_DELETION_VECTORS),
            "DELETE FROM $table WHERE id IN (1, 15)",
            set_properties("delta.dataSkippingNumIndexedCols = 0"),
            "SET spark.databricks.delta.stats.collect=true",
            insert(numbers(20, 25)),
        ),
        versions=4,
        conf={"spark.databricks.delta.stats.collect": "false"},
        filters=(("x", ">", 120),),
    ),
    "bounds that are not exact": Table(
        # Long strings are cut and times rounded in the statistics; NaN is the largest number.
        steps=(
            create(
                "SELECT id, concat(repeat('a', 40), id) AS s, timestamp_micros(1700000000000000 + id * 100 + 1) AS t, "
                "IF(id % 4 = 0, double('NaN'), double(id)) AS d, concat(repeat('🐟', 33), id) AS fish "
                "FROM range(0, 40, 1, 4)"
            ),
        ),
        versions=1,
        filters=(("s", ">", "a" * 40 + "5"), ("d", ">", 3.0)),
    ),
    # Partitions.
    "partitioned": Table(
        steps=(
            create(
                "SELECT id, IF(id % 4 = 3, NULL, CAST(id % 4 AS INT)) AS p, CAST(id AS DOUBLE) AS x, "
                "IF(id % 3 = 2, NULL, date_add(DATE'2024-02-28', CAST(id % 3 AS INT))) AS day, "
                "concat('row ', id) AS s FROM range(0, 24, 1, 2)",
                partitioned="day, p",
            ),
            "DELETE FROM $table WHERE p = 1",
            "INSERT INTO $table VALUES (100, 7, 0.5D, DATE'0001-01-01', 'x'), (101, NULL, 1.5D, NULL, NULL)",
            "DELETE FROM $table WHERE id = 2",
            "UPDATE $table SET p = 9 WHERE p IS NULL",
        ),
        versions=5,
        filters=(("p", ">=", 1), ("id", ">", 5)),
    ),
    "partitioned by odd strings": Table(
        steps=(
            create(f"SELECT CAST(i AS BIGINT) AS id, s AS part FROM VALUES {_ODD_VALUES}, (99, NULL) AS v(i, s)",
                    partitioned="part"),
            "DELETE FROM $table WHERE id = 4",
        ),
        versions=2,
        conf={"spark.sql.parser.escapedStringLiterals": "false"},
        filters=(("part", ">", "a"),),
        evidence=(r"__HIVE_DEFAULT_PARTITION__",),
    ),
    "partitioned by every type": Table(
        steps=(
            create(
                "SELECT id, "
                + ", ".join(
                    f"CAST(element_at(array({values}), CAST(id + 1 AS INT)) AS {kind}) AS {name}"
                    for name, kind, values in (
                        ("boolean", "BOOLEAN", "true, false, NULL"),
                        ("byte", "TINYINT", "-128, 127, NULL"),
                        ("short", "SMALLINT", "-32768, 32767, NULL"),
                        ("int", "INT", "-2147483648, 2147483647, NULL"),
                        ("long", "BIGINT", "'-9223372036854775808', '9223372036854775807', NULL"),
                        ("float", "FLOAT", "'1.1', 'NaN', NULL"),
                        ("double", "DOUBLE", "'1.0E-300', '-Infinity', NULL"),
                        ("decimal", "DECIMAL(20, 3)", "'-12345678901234567.125', '0.001', NULL"),
                        ("date", "DATE", "'0001-01-01', '9999-12-31', NULL"),
                        ("timestamp", "TIMESTAMP", "'2026-11-01T05:30:00.000001Z', '1582-01-01T00:00:00Z', NULL"),
                        ("timestamp_ntz", "TIMESTAMP_NTZ", "'2026-03-08 02:30:00.123456', '1900-01-01 00:00:00', NULL"),
                        ("string", "STRING", "'a', '', NULL"),
                        ("binary", "BINARY", "'a', 'žluť', NULL"),
                    )
                )
                + " FROM range(0, 3, 1, 1)",
                partitioned="boolean, byte, short, int, long, float, double, decimal, date, timestamp, timestamp_ntz, "
                "string, binary",
            ),
        ),
        versions=1,
        filters=(("short", "<", 0),),
    ),
    "partitioned by a time of the session": Table(
        # As it was written before Delta 3.3: without a zone, here in that of the session.
        steps=(
            create("SELECT id, timestamp_seconds(id * 1000) AS t FROM range(0, 4, 1, 1)", partitioned="t"),
            "SET spark.databricks.delta.write.utcTimestampPartitionValues=true",
            "INSERT INTO $table SELECT id, timestamp_seconds(id * 1000) AS t FROM range(4, 6, 1, 1)",
        ),
        versions=2,
        conf={
            "spark.databricks.delta.write.utcTimestampPartitionValues": "false",
            "spark.sql.session.timeZone": "UTC",
        },
        filters=(("id", ">", 1),),
        evidence=(r'"t":"1970-01-01 00:16:40"',),
    ),
    "partitions overwritten": Table(
        steps=(
            create("SELECT id, CAST(id % 3 AS INT) AS p FROM range(0, 12, 1, 1)", partitioned="p"),
            write("SELECT id, CAST(1 AS INT) AS p FROM range(100, 103)", "overwrite", replaceWhere="p = 1"),
            write("SELECT id, CAST(2 AS INT) AS p FROM range(200, 202)", "overwrite",
                   partitionOverwriteMode="dynamic"),
            write("SELECT id, CAST(0 AS INT) AS p FROM range(3)", "overwrite", replaceWhere="id < 4 AND p = 0"),
            write("SELECT id, CAST(5 AS INT) AS p FROM range(4)", "overwrite"),
            write("SELECT p, id AS n FROM (SELECT id, CAST(id % 2 AS STRING) AS p FROM range(6))", "overwrite",
                   overwriteSchema="true", partition_by=("n",)),
            write("SELECT id AS n, 'x' AS p FROM range(2)", "append", txnAppId="loader", txnVersion="1"),
            write("SELECT id AS n, CAST(0 AS DOUBLE) AS y FROM range(7)", "overwrite", overwriteSchema="true"),
        ),
        versions=8,
        filters=(("p", "==", 1),),
    ),
    # Deletion vectors.
    "vectors": Table(
        steps=(
            create(every_type(0, 60, files=2), properties=_DELETION_VECTORS),
            "DELETE FROM $table WHERE id IN (0, 41)",
            "DELETE FROM $table WHERE id % 7 = 3",
            "UPDATE $table SET string = 'changed', struct = NULL WHERE id % 9 = 1",
            "DELETE FROM $table WHERE id BETWEEN 30 AND 44",
            "DELETE FROM $table WHERE id >= 30 AND string <> 'changed'",
            insert(every_type(100, 110)),
            "DELETE FROM $table WHERE id >= 100",
            "DELETE FROM $table WHERE id % 2 = 0",
        ),
        versions=9,
        conf=_SMALL_ROW_GROUPS,
        filters=(("short", ">", -32750),),
        evidence=(r'"deletionVector":{"storageType":"u"', r"deletion_vector_.*\.bin", r'tightBounds\\":false'),
    ),
    "vectors by merge": Table(
        steps=(
            create(numbers(0, 40, files=2), properties=_DELETION_VECTORS),
            "MERGE INTO $table t USING (" + numbers(30, 45, columns="-id AS x, 'merged' AS s") + ") n ON t.id = n.id "
            "WHEN MATCHED AND n.id % 3 = 0 THEN DELETE WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT * "
            "WHEN NOT MATCHED BY SOURCE AND t.id < 3 THEN DELETE",
            set_properties(_NO_VECTORS),
            "DELETE FROM $table WHERE id = 20",
            "OPTIMIZE $table",
        ),
        versions=5,
        filters=(("s", "==", "merged"),),
        evidence=(r'"deletionVector"',),
    ),
    "vectors of many rows": Table(
        # Several containers of a bitmap: of single rows, of runs, and dense ones.
        steps=(
            create("SELECT id FROM range(0, 140000, 1, 1)", properties=_DELETION_VECTORS),
            "DELETE FROM $table WHERE id IN (5, 65535, 65536, 131072, 139999)",
            "DELETE FROM $table WHERE id BETWEEN 70000 AND 100000",
            "DELETE FROM $table WHERE id % 2 = 1",
        ),
        versions=4,
        conf={"parquet.block.row.count.limit": "30000"},
        filters=(("id", ">=", 65000), ("id", "<", 135000)),
    ),
    "vectors and partitions": Table(
        steps=(
            create("SELECT id, concat('a b', id % 3) AS p, id * 2 AS x FROM range(0, 30, 1, 2)", partitioned="p",
                    properties=_DELETION_VECTORS + ", delta.randomizeFilePrefixes = true"),
            "DELETE FROM $table WHERE id % 4 = 0",
            "DELETE FROM $table WHERE p = 'a b1'",
            "RESTORE TABLE $table TO VERSION AS OF 1",
            "RESTORE TABLE $table TO VERSION AS OF 0",
            "DELETE FROM $table WHERE id % 5 = 0",
            "REORG TABLE $table APPLY (PURGE)",
        ),
        versions=7,
        filters=(("p", "==", "a b2"),),
        evidence=(r'"deletionVector"',),
    ),
    "vectors in a checkpoint": Table(
        steps=(
            create(numbers(0, 20, files=2), properties=_DELETION_VECTORS + ", delta.checkpointInterval = 2"),
            "DELETE FROM $table WHERE id = 3",
            "DELETE FROM $table WHERE id = 13",
            "DELETE FROM $table WHERE id = 4",
            insert(numbers(20, 22)),
        ),
        versions=5,
        filters=(("x", "<", 100),),
        evidence=(r"00002\.checkpoint\.parquet",),
    ),
    # Column mapping.
    "mapped by name": Table(
        steps=(
            create(every_type(0, 20, files=2), properties=_BY_NAME),
            "ALTER TABLE $table RENAME COLUMN string TO `words, and; {more} = ()`",
            insert(every_type(20, 25)),
            "ALTER TABLE $table RENAME COLUMN struct.inner.text TO renamed",
            "ALTER TABLE $table DROP COLUMN int",
            "ALTER TABLE $table ADD COLUMN int DOUBLE",
            "ALTER TABLE $table DROP COLUMN struct.number",
            "INSERT INTO $table BY NAME SELECT id, CAST(id AS DOUBLE) AS int, id % 2 = 0 AS boolean FROM range(30, 34)",
            "DELETE FROM $table WHERE id IN (1, 21, 31)",
        ),
        versions=9,
        filters=(("short", ">", -32760),),
        evidence=(r'delta\.columnMapping\.physicalName\\*":\\*"col-',),
    ),
    "mapped by id": Table(
        steps=(
            create(every_type(0, 20, files=2), properties=_BY_ID),
            "ALTER TABLE $table RENAME COLUMN long TO wide",
            "ALTER TABLE $table DROP COLUMN double",
            "ALTER TABLE $table ADD COLUMNS (double INT AFTER id, extra STRING FIRST)",
            "INSERT INTO $table BY NAME SELECT id, id + 1 AS wide, 7 AS double, 'e' AS extra FROM range(30, 34)",
            "UPDATE $table SET double = 8, extra = NULL WHERE id % 3 = 0",
        ),
        versions=6,
        filters=(("wide", ">", 5),),
        evidence=(r'delta\.columnMapping\.mode":"id"',),
    ),
    "mapped later": Table(
        # Files of before have no ids, and their columns have the names of then.
        steps=(
            create(old_types(0, 12), properties=_NO_VECTORS),
            set_properties(_BY_NAME + ", delta.minReaderVersion = 2, delta.minWriterVersion = 5"),
            "ALTER TABLE $table RENAME COLUMN string TO words",
            "ALTER TABLE $table RENAME COLUMN short TO string",
            insert(old_types(20, 25)),
            "ALTER TABLE $table DROP COLUMN byte",
            "ALTER TABLE $table ADD COLUMN byte STRING",
            "INSERT INTO $table BY NAME SELECT id, 'b' AS byte, 'w' AS words FROM range(30, 33)",
            "ALTER TABLE $table RENAME COLUMN struct.inner.pair TO two",
            "DELETE FROM $table WHERE id IN (2, 22)",
        ),
        versions=10,
        filters=(("words", ">", "w"),),
        evidence=(r'"minReaderVersion":2,"minWriterVersion":5',),
    ),
    "mapped with the old protocol": Table(
        steps=(
            create(numbers(0, 10),
                    properties=_BY_NAME + ", delta.minReaderVersion = 2, delta.minWriterVersion = 5, " + _NO_VECTORS),
            "ALTER TABLE $table RENAME COLUMN x TO swap",
            "ALTER TABLE $table RENAME COLUMN id TO x",
            "ALTER TABLE $table RENAME COLUMN swap TO id",
            "INSERT INTO $table VALUES (1, 2, 'three')",
            "RESTORE TABLE $table TO VERSION AS OF 0",
        ),
        versions=6,
        filters=(("id", ">", 40),),
        evidence=(r'"minReaderVersion":2,"minWriterVersion":5',),
    ),
    "mapped partitions": Table(
        steps=(
            create("SELECT id, concat('a=b ', id % 3) AS p, DATE'2024-01-01' AS `day, of it` FROM range(0, 12, 1, 1)",
                    partitioned="p, `day, of it`", properties=f"{_BY_NAME}, {_DELETION_VECTORS}"),
            "ALTER TABLE $table RENAME COLUMN p TO q",
            "ALTER TABLE $table RENAME COLUMN `day, of it` TO p",
            "INSERT INTO $table VALUES (50, 'new', NULL), (51, NULL, DATE'2025-01-01')",
            "DELETE FROM $table WHERE id IN (4, 50)",
            "DELETE FROM $table WHERE q = 'a=b 2'",
        ),
        versions=6,
        filters=(("q", "==", "a=b 0"),),
        evidence=(r'"partitionValues":{"col-',),
    ),
    "mapped partitions later": Table(
        steps=(
            create("SELECT id, id % 3 AS p FROM range(0, 9, 1, 1)", partitioned="p"),
            set_properties(_BY_NAME),
            "ALTER TABLE $table RENAME COLUMN p TO part",
            "INSERT INTO $table VALUES (50, 1), (51, NULL)",
        ),
        versions=4,
        filters=(("part", ">", 0),),
    ),
    "mapped, checkpointed, with vectors": Table(
        steps=(
            create(every_type(0, 20, files=2),
                    properties=f"{_BY_ID}, {_DELETION_VECTORS}, delta.checkpointInterval = 3, "
                    "delta.checkpoint.writeStatsAsStruct = true, delta.checkpoint.writeStatsAsJson = false"),
            "ALTER TABLE $table RENAME COLUMN string TO words",
            "DELETE FROM $table WHERE id % 6 = 1",
            "ALTER TABLE $table DROP COLUMN pair",
            "UPDATE $table SET words = 'w' WHERE id > 15",
            "OPTIMIZE $table ZORDER BY (long)",
            "INSERT INTO $table BY NAME SELECT id, 'tail' AS words FROM range(90, 92)",
        ),
        versions=7,
        # It needs the count of a file's rows, which a checkpoint may hold in its newer form alone.
        unreadable=dict.fromkeys((3, 4), "deletion vectors.*Missing numRecords"),
        filters=(("words", ">=", "t"),),
        evidence=(r"00003\.checkpoint\.parquet", r'"deletionVector"'),
    ),
    "mapping taken away": Table(
        steps=(
            create(numbers(0, 6), properties=_BY_NAME),
            "ALTER TABLE $table RENAME COLUMN s TO words",
            set_properties("delta.columnMapping.mode = 'none'"),
            "INSERT INTO $table VALUES (8, 9, 'ten')",
        ),
        versions=4,
        conf={"spark.databricks.delta.columnMapping.allowRemoval": "true"},
    ),
    # Columns that come and change.
    "columns added": Table(
        steps=(
            create("SELECT id, named_struct('a', id) AS s, array(id, id) AS pair FROM range(0, 8, 1, 1)"),
            "ALTER TABLE $table ADD COLUMNS (first DOUBLE FIRST, s.b STRING FIRST, day DATE AFTER id, list ARRAY<INT>)",
            insert("SELECT 0.5D, id, DATE'2024-05-05', named_struct('b', 'new', 'a', id), array(id), array(1, 2) "
                    "FROM range(10, 13)"),
            write("SELECT id, true AS flag, named_struct('a', id, 'c', named_struct('d', 1.5F)) AS s "
                   "FROM range(20, 22)", "append", mergeSchema="true"),
            "ALTER TABLE $table ALTER COLUMN list FIRST",
            "DELETE FROM $table WHERE id = 3",
            write("SELECT id AS ID, CAST(9 AS DOUBLE) AS First FROM range(30, 32)", "append", mergeSchema="true"),
        ),
        versions=7,
        filters=(("id", ">", 5),),
    ),
    "default values": Table(
        steps=(
            ("CREATE TABLE $table (id BIGINT NOT NULL, x INT DEFAULT 7, s STRING DEFAULT 'none') USING delta "
            "TBLPROPERTIES (delta.feature.allowColumnDefaults = 'supported')"),
            "INSERT INTO $table (id) VALUES (1), (2)",
            "INSERT INTO $table VALUES (3, NULL, DEFAULT)",
            "ALTER TABLE $table ADD COLUMN y DOUBLE",
            "ALTER TABLE $table ALTER COLUMN y SET DEFAULT 2.5",
            "INSERT INTO $table (id, x) VALUES (4, 5)",
            "ALTER TABLE $table ALTER COLUMN id DROP NOT NULL",
            "INSERT INTO $table (x) VALUES (6)",
        ),
        versions=8,
        filters=(("x", "==", 7),),
        evidence=(r"CURRENT_DEFAULT",),
    ),
    "void column": Table(
        steps=(
            create("SELECT id, NULL AS nothing, id * 2 AS x FROM range(0, 5, 1, 1)"),
            "INSERT INTO $table (id, x) VALUES (7, 8)",
        ),
        versions=2,
        refused=("nothing",),
    ),
    "bounded strings": Table(
        steps=(
            "CREATE TABLE $table (id INT, c CHAR(5), v VARCHAR(5)) USING delta",
            "INSERT INTO $table VALUES (1, 'a', 'b'), (2, NULL, ''), (3, 'abcde', 'abcde')",
        ),
        versions=2,
        # Spark fills it up with blanks while it reads.
        refused=("c",),
        filters=(("v", "==", "b"),),
    ),
    # Type widening.
    "widened": Table(
        steps=(
            ("CREATE TABLE $table (id BIGINT, byte TINYINT, short SMALLINT, int INT, i2 TINYINT, i3 INT, i4 INT, "
            "float FLOAT, d1 DECIMAL(5, 2), d2 DECIMAL(10, 2), day DATE, list ARRAY<INT>, "
            f"s STRUCT<a: SMALLINT, b: STRUCT<c: FLOAT>>) USING delta TBLPROPERTIES ({_WIDENING})"),
            ("INSERT INTO $table SELECT id, id - 3, id * 1000, id * 1000000, id, id, id, id / 4, id / 8, id / 8, "
            "date_add(DATE'1582-10-01', CAST(id * 5 AS INT)), array(id, id), "
            "named_struct('a', id, 'b', named_struct('c', id / 2)) FROM range(0, 8, 1, 1)"),
            "INSERT INTO $table (id) VALUES (8)",
            "ALTER TABLE $table ALTER COLUMN byte TYPE SMALLINT, short TYPE INT, int TYPE BIGINT",
            "INSERT INTO $table (id, byte, short, int) VALUES (10, 300, 100000, 10000000000)",
            "ALTER TABLE $table ALTER COLUMN byte TYPE BIGINT, i2 TYPE DOUBLE, i3 TYPE DOUBLE, i4 TYPE DECIMAL(14, 3)",
            "ALTER TABLE $table ALTER COLUMN float TYPE DOUBLE, d1 TYPE DECIMAL(12, 4), d2 TYPE DECIMAL(30, 2)",
            "ALTER TABLE $table ALTER COLUMN day TYPE TIMESTAMP_NTZ, list.element TYPE BIGINT",
            "ALTER TABLE $table ALTER COLUMN s.a TYPE INT, s.b.c TYPE DOUBLE",
            ("INSERT INTO $table SELECT id, 10000000000, id, id, id + 0.25D, id + 0.5D, id + 0.125, 1e300D, "
            "12345678.1234, 1234567890123456789012345.25, TIMESTAMP_NTZ'2024-05-06 07:08:09.000001', "
            "array(10000000000, id), named_struct('a', 100000, 'b', named_struct('c', 1e-300D)) "
            "FROM range(20, 23, 1, 1)"),
            "UPDATE $table SET int = 1 WHERE id = 2",
        ),
        versions=11,
        filters=(("byte", "<", 2),),
        evidence=(r"delta\.typeChanges",),
    ),
    "widened, mapped, partitioned, with vectors": Table(
        steps=(
            create("SELECT id, CAST(id % 3 AS TINYINT) AS p, CAST(id AS SMALLINT) AS x, CAST(id AS FLOAT) AS f "
                    "FROM range(0, 15, 1, 1)",
                    partitioned="p",
                    properties=f"{_BY_NAME}, {_DELETION_VECTORS}, {_WIDENING}, delta.checkpointInterval = 4"),
            "ALTER TABLE $table ALTER COLUMN p TYPE INT",
            "ALTER TABLE $table ALTER COLUMN x TYPE DOUBLE",
            "ALTER TABLE $table RENAME COLUMN x TO y",
            "INSERT INTO $table VALUES (20, 100000, 0.1D, 1.5F), (21, NULL, NULL, NULL)",
            "DELETE FROM $table WHERE id IN (2, 3, 20)",
            "ALTER TABLE $table ALTER COLUMN f TYPE DOUBLE",
            "DELETE FROM $table WHERE y = 7",
        ),
        versions=8,
        # Before that Spark has counted none.
        unreadable=dict.fromkeys(range(5, 8), "deletion vectors.*TypeWidening"),
        filters=(("p", ">=", 1), ("id", "<", 12)),
        evidence=(r"delta\.typeChanges", r'"deletionVector"', r"00004\.checkpoint\.parquet"),
    ),
    "widened dates in partitions": Table(
        steps=(
            create("SELECT id, date_add(DATE'2024-01-01', CAST(id % 2 AS INT)) AS day, CAST(id AS INT) AS n "
                    "FROM range(0, 4, 1, 1)", partitioned="day, n", properties=_WIDENING),
            "ALTER TABLE $table ALTER COLUMN day TYPE TIMESTAMP_NTZ",
            "ALTER TABLE $table ALTER COLUMN n TYPE DECIMAL(20, 5)",
            "INSERT INTO $table VALUES (9, TIMESTAMP_NTZ'2024-05-05 01:02:03.5', 1.25), (10, NULL, NULL)",
        ),
        versions=4,
        # A date of before is no time to it.
        unreadable=dict.fromkeys((1, 2, 3), "cannot be opened.*timestamp_ntz"),
        filters=(("id", ">", 2),),
    ),
    # The log.
    "checkpoints": Table(
        steps=(
            create(every_type(0, 10), properties="delta.checkpointInterval = 2"),
            *(insert(every_type(start, start + 2)) for start in (10, 12, 14)),
            "DELETE FROM $table WHERE id = 11",
            "OPTIMIZE $table",
        ),
        versions=6,
        evidence=(r"00002\.checkpoint\.parquet", r"00004\.checkpoint\.parquet"),
    ),
    "checkpoints in parts, log cleaned": Table(
        steps=(
            create("SELECT id, id % 5 AS p, id * 2 AS x FROM range(0, 20, 1, 2)", partitioned="p",
                    properties="delta.checkpointInterval = 3, delta.logRetentionDuration = 'interval 1 days'"),
            "INSERT INTO $table SELECT id, 7, id FROM range(20, 22)",
            "DELETE FROM $table WHERE p = 1",
            "INSERT INTO $table SELECT id, 8, id FROM range(22, 24)",
            "DELETE FROM $table WHERE p = 2",
            age_the_log,
            "INSERT INTO $table SELECT id, 9, id FROM range(24, 26)",
            "INSERT INTO $table SELECT id, 9, id FROM range(26, 28)",
            "INSERT INTO $table SELECT id, 9, id FROM range(28, 30)",
        ),
        versions=8,
        lost=range(3),
        conf={"spark.databricks.delta.checkpoint.partSize": "4"},
        filters=(("p", ">", 2),),
        evidence=(r"00003\.checkpoint\.0000000001\.00000000\d\d\.parquet",),
    ),
    "times beyond nanoseconds": Table(
        steps=(
            create(f"SELECT id, {FAR_TIMES} FROM range(0, 4, 1, 2)", properties="delta.checkpointInterval = 1"),
            f"INSERT INTO $table SELECT id, {FAR_TIMES} FROM range(4, 6)",
            f"INSERT INTO $table SELECT id, {FAR_TIMES} FROM range(6, 8)",
        ),
        versions=3,
        filters=(("valid_to", ">=", dt.datetime(2020, 6, 1, tzinfo=dt.timezone.utc)),),
        evidence=(r"00002\.checkpoint\.parquet",),
    ),
    "times beyond nanoseconds, checkpoints of the second kind": Table(
        steps=(
            create(f"SELECT id, {FAR_TIMES} FROM range(0, 4, 1, 2)",
                    properties="delta.checkpointInterval = 1, delta.checkpointPolicy = 'v2'"),
            f"INSERT INTO $table SELECT id, {FAR_TIMES} FROM range(4, 6)",
            "SET spark.databricks.delta.checkpointV2.topLevelFileFormat=parquet",
            f"INSERT INTO $table SELECT id, {FAR_TIMES} FROM range(6, 8)",
        ),
        versions=3,
        # The files' footers have bounds then, which the log's must not contradict.
        conf={
            "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
            "spark.databricks.delta.checkpointV2.topLevelFileFormat": "json",
        },
        filters=(("began", "<", dt.datetime(1600, 1, 1, tzinfo=dt.timezone.utc)),),
        evidence=(r"_sidecars/", r"00001\.checkpoint\..*\.json", r"00002\.checkpoint\..*\.parquet"),
    ),
    "checkpoints of the second kind": Table(
        steps=(
            create(every_type(0, 10, files=2),
                    properties=f"delta.checkpointInterval = 2, delta.checkpointPolicy = 'v2', {_DELETION_VECTORS}, "
                    "delta.logRetentionDuration = 'interval 1 days'"),
            "DELETE FROM $table WHERE id = 3",
            "DELETE FROM $table WHERE id = 8",
            insert(every_type(10, 12)),
            "SET spark.databricks.delta.checkpointV2.topLevelFileFormat=parquet",
            "DELETE FROM $table WHERE id = 4",
            age_the_log,
            insert(every_type(12, 14)),
            insert(every_type(14, 16)),
        ),
        versions=7,
        lost=range(4),
        conf={"spark.databricks.delta.checkpointV2.topLevelFileFormat": "json"},
        filters=(("short", ">", -32764),),
        evidence=(r"_sidecars/.*\.parquet", r"00006\.checkpoint\.[0-9a-f-]{36}\.parquet"),
    ),
    "checkpoints of the second kind, in JSON": Table(
        steps=(
            create("SELECT id, id % 3 AS p FROM range(0, 9, 1, 1)", partitioned="p",
                    properties="delta.checkpointInterval = 2, delta.checkpointPolicy = 'v2', "
                    f"{_BY_NAME}, {_DELETION_VECTORS}"),
            "DELETE FROM $table WHERE id IN (1, 5)",
            "ALTER TABLE $table RENAME COLUMN p TO q",
            "DELETE FROM $table WHERE id = 2",
            "INSERT INTO $table VALUES (20, 30)",
        ),
        versions=5,
        filters=(("q", ">=", 1),),
        conf={
            "spark.databricks.delta.checkpointV2.topLevelFileFormat": "json",
            "spark.databricks.delta.checkpoint.partSize": "2",
        },
        evidence=(r"_sidecars/.*\.parquet", r"00002\.checkpoint\.[0-9a-f-]{36}\.json"),
    ),
    "times within the commits": Table(
        steps=(
            create(numbers(0, 4), properties="delta.enableInCommitTimestamps = true"),
            insert(numbers(4, 6)),
            insert(numbers(6, 8)),
            insert(numbers(8, 9)),
            shuffle_the_ages,
        ),
        versions=4,
        evidence=(r'"inCommitTimestamp":\d+',),
    ),
    "times within later commits": Table(
        steps=(
            create(numbers(0, 4)),
            insert(numbers(4, 6)),
            age_the_log,
            set_properties("delta.enableInCommitTimestamps = true"),
            insert(numbers(8, 9)),
        ),
        versions=4,
        evidence=(r'"inCommitTimestamp":\d+', r"inCommitTimestampEnablementVersion"),
    ),
    # Features that a reader may overlook, but not stumble over.
    "generated columns": Table(
        steps=(
            create_with_builder(
                lambda builder: builder.addColumn("id", "BIGINT")
                .addColumn("t", "TIMESTAMP")
                .addColumn("day", "DATE", generatedAlwaysAs="CAST(t AS DATE)")
                .addColumn("double", "BIGINT", generatedAlwaysAs="id * 2")
                .partitionedBy("day")
            ),
            "INSERT INTO $table (id, t) VALUES (1, '2024-05-05T01:00:00Z'), (2, '2024-05-05T12:00:00Z'), (3, NULL)",
        ),
        versions=2,
        filters=(("double", ">", 2),),
        evidence=(r"delta\.generationExpression",),
    ),
    "identity columns": Table(
        steps=(
            create_with_builder(
                lambda builder: builder.addColumn("key", "BIGINT", generatedAlwaysAs=identity()).addColumn("x", "INT")
            ),
            "INSERT INTO $table (x) VALUES (1), (2), (3)",
            "INSERT INTO $table (x) VALUES (4)",
        ),
        versions=3,
        filters=(("x", ">", 2),),
        evidence=(r"delta\.identity\.start",),
    ),
    "row tracking": Table(
        steps=(
            create(numbers(0, 10, files=2), properties=f"delta.enableRowTracking = true, {_DELETION_VECTORS}"),
            "UPDATE $table SET x = -1 WHERE id = 3",
            "DELETE FROM $table WHERE id = 8",
            "OPTIMIZE $table",
        ),
        versions=4,
        filters=(("x", ">=", 0),),
        evidence=(r'"baseRowId":\d+', r"_row-id-col-"),
    ),
    "liquid clustering": Table(
        steps=(
            create(numbers(0, 30, files=3), clustered="x, s"),
            insert(numbers(30, 33)),
            "OPTIMIZE $table",
            "ALTER TABLE $table CLUSTER BY (id)",
            insert(numbers(33, 34)),
        ),
        versions=5,
        filters=(("x", ">", 150),),
        evidence=(r"delta\.clustering",),
    ),
    "constraints": Table(
        steps=(
            "CREATE TABLE $table (id BIGINT NOT NULL, x BIGINT) USING delta TBLPROPERTIES (delta.appendOnly = true)",
            "ALTER TABLE $table ADD CONSTRAINT positive CHECK (x > 0)",
            "INSERT INTO $table VALUES (1, 2), (3, 4)",
        ),
        versions=3,
        filters=(("x", ">", 2),),
        evidence=(r"delta\.constraints\.positive", r'"delta\.appendOnly":"true"'),
    ),
    "change data feed": Table(
        steps=(
            create(numbers(0, 10, files=2), properties=f"delta.enableChangeDataFeed = true, {_NO_VECTORS}"),
            "UPDATE $table SET x = -1 WHERE id = 3",
            "DELETE FROM $table WHERE id = 8",
            set_properties(_DELETION_VECTORS),
            "UPDATE $table SET x = -2 WHERE id = 4",
        ),
        versions=5,
        filters=(("x", ">=", 0),),
        evidence=(r"_change_data/", r'"cdc":'),
    ),
    "optimized": Table(
        steps=(
            create(numbers(0, 12, files=3)),
            insert(numbers(12, 15)),
            "OPTIMIZE $table",
            insert(numbers(15, 18)),
            "OPTIMIZE $table ZORDER BY (id, s)",
        ),
        versions=5,
        filters=(("id", ">", 3),),
    ),
    "replaced and restored": Table(
        steps=(
            create(numbers(0, 6)),
            "INSERT OVERWRITE $table " + numbers(6, 9),
            "INSERT INTO $table REPLACE WHERE id = 7 SELECT 7L, 0L, 'replaced'",
            ("CREATE OR REPLACE TABLE $table USING delta PARTITIONED BY (s) AS SELECT concat('k', id % 2) AS s, "
            "CAST(id AS FLOAT) AS x FROM range(0, 4, 1, 1)"),
            "RESTORE TABLE $table TO VERSION AS OF 1",
            "TRUNCATE TABLE $table",
            "RESTORE TABLE $table TO VERSION AS OF 3",
        ),
        versions=7,
        filters=(("x", ">", 1),),
    ),
    "vacuumed": Table(
        steps=(
            create(numbers(0, 10, files=2), properties=f"{_DELETION_VECTORS}, delta.deletedFileRetentionDuration = "
                    "'interval 0 seconds'"),
            "DELETE FROM $table WHERE id = 3",
            "DELETE FROM $table WHERE id IN (4, 8)",
            "OPTIMIZE $table",
            "DELETE FROM $table WHERE id = 5",
            set_properties(_NO_VECTORS),
            "DELETE FROM $table WHERE id = 6",
            "VACUUM $table RETAIN 0 HOURS",
        ),
        versions=9,
        lost=range(6),
        filters=(("x", ">", 10),),
    ),
    "shallow clone": Table(
        steps=(
            ("CREATE TABLE delta.`$path of origin` USING delta PARTITIONED BY (p) "
            f"TBLPROPERTIES ({_DELETION_VECTORS}) AS SELECT id, concat('a b%', id % 2) AS p FROM range(0, 10, 1, 1)"),
            "DELETE FROM delta.`$path of origin` WHERE id = 2",
            "CREATE TABLE $table SHALLOW CLONE delta.`$path of origin`",
            "INSERT INTO $table VALUES (20, 'a b%0'), (21, NULL)",
            "DELETE FROM $table WHERE id IN (3, 4, 20)",
        ),
        versions=3,
        filters=(("p", "==", "a b%0"),),
        evidence=(r'"path":"file:', r'"storageType":"p"'),
    ),
    "compatible with Iceberg": Table(
        steps=(
            create("SELECT id, CAST(id % 2 AS INT) AS p, array(id) AS list FROM range(0, 6, 1, 1)", partitioned="p",
                    properties="delta.enableIcebergCompatV2 = true, " + _BY_NAME),
            "ALTER TABLE $table RENAME COLUMN list TO alone",
            "INSERT INTO $table VALUES (7, NULL, array(1L))",
        ),
        versions=3,
        filters=(("p", "==", 1),),
        evidence=(r"icebergCompatV2",),
    ),
    # Types without a tensor form.
    "variant": Table(
        steps=(
            create("SELECT id, parse_json(concat('[', id, ']')) AS v, id * 2 AS x FROM range(0, 5, 1, 1)",
                    properties=_DELETION_VECTORS),
            "DELETE FROM $table WHERE id = 2",
        ),
        versions=2,
        refused=("v",),
        filters=(("x", ">", 2),),
        evidence=(r"variantType",),
    ),
    "maps": Table(
        steps=(
            create("SELECT id, map('k', id) AS m, array(named_struct('a', id)) AS people, id * 2 AS x "
                    "FROM range(0, 5, 1, 1)"),
        ),
        versions=1,
        refused=("m", "people"),
        filters=(("x", ">", 2),),
    ),
}  # fmt: skip
