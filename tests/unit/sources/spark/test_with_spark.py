"""What the driver reads of files that Spark wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from converter.errors import CacheError
from converter.sources.spark import with_spark
from converter.storage.opening import open_storage
from tests.encrypted import write_encrypted


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_columns_that_spark_encrypted_are_refused_by_name(tmp_path: Path, plaintext_footer: bool) -> None:
    file = tmp_path / "part-00000-2f1c-c000.zstd.parquet"
    write_encrypted(file, {"c0": [1, 2], "c1": [3, 4]}, plaintext_footer=plaintext_footer)
    with pytest.raises(CacheError, match=rf"Spark .*{file.name}.* encrypt") as caught:
        with_spark._reports(open_storage(str(tmp_path)), {})
    assert caught.value.path == f"file://{file}"
