"""Metadata as Petastorm under Python 2 wrote it: strings of two kinds, other names, and a pickle of the first protocol.

No Spark that Python 2 runs with runs here, so the Parquet files are those that the same Petastorm wrote under Python 3.
Its own `materialize_dataset` and `build_rowgroup_index` write the metadata anew, with a stand-in for Spark that calls
functions in this process. After `petastorm_making.py` has written and read the stores of 0.4.1:

    PYTHON2 tests/parity/petastorm_python2.py FOLDER/0.4.1 FOLDER/0.4.1-python2
"""

# ruff: noqa: A003, N802, N815, NPY201, UP004, UP010
# Python 2 asks for most of these; the names of the stand-in are Spark's.

from __future__ import absolute_import, division, print_function

import decimal
import json
import os
import shutil
import sys

import numpy as np

STORES = {
    "old": [("narrow", "SingleFieldIndexer", "narrow"), ("not null", "FieldNotNullIndexer", "some_array")],
    "old sequences": [("labels", "SingleFieldIndexer", "label"), ("not null", "FieldNotNullIndexer", "spots")],
}
DTYPES = {"bool": np.bool_, "Decimal": decimal.Decimal, "str": np.unicode_ if sys.version_info[0] == 2 else np.str_}


class Spark(object):
    """What Petastorm asks of a session, of its context and of a data set spread over executors."""

    def __init__(self, items=()):
        self.items = items
        self.sparkContext = self._jsc = self

    def hadoopConfiguration(self):
        return self

    def get(self, name, default=None):
        return default

    def set(self, name, value):
        pass

    setBoolean = setInt = set

    def unset(self, name):
        pass

    def parallelize(self, items, num_slices):
        return Spark(items)

    def map(self, function):
        return Spark([function(item) for item in self.items])

    def collect(self):
        return self.items

    def reduce(self, function):
        # Each executor has indexers of its own; here all pieces fill the same ones.
        return self.items[-1]


def schema_of(path):
    """The schema that was read of the same store."""
    import pyspark.sql.types
    from petastorm import codecs
    from petastorm.unischema import Unischema, UnischemaField

    known = dict(vars(pyspark.sql.types), **vars(codecs))
    fields = []
    with open(path) as file:
        stored = json.load(file)["schema"]
    for name, dtype, shape, codec, nullable in stored:
        # The text of a codec says no digits.
        made = eval(codec.replace("DecimalType()", "DecimalType(10, 3)"), known)
        kind = DTYPES.get(dtype) or getattr(np, dtype)
        fields.append(UnischemaField(str(name), kind, tuple(shape), made, nullable))
    return Unischema("StoreSchema", fields)


def main(source, target):
    """Write the metadata of copies of the stores."""
    from petastorm.etl import rowgroup_indexers
    from petastorm.etl.dataset_metadata import materialize_dataset
    from petastorm.etl.rowgroup_indexing import build_rowgroup_index

    for name, indexed in STORES.items():
        folder = os.path.join(target, name)
        shutil.copytree(os.path.join(source, name), folder, ignore=shutil.ignore_patterns("_common*", "*.crc"))
        url = "file://" + folder
        with materialize_dataset(Spark(), url, schema_of(os.path.join(source, name + ".json"))):
            pass
        indexers = [getattr(rowgroup_indexers, kind)(index, field) for index, kind, field in indexed]
        build_rowgroup_index(url, Spark(), indexers)


if __name__ == "__main__":
    main(*map(os.path.abspath, sys.argv[1:]))
