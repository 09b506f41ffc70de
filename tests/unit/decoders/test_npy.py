"""What `NumPy` makes of `.npy` and `.npz` bytes, settled by the first row or declared, and bad bytes."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import Image, NumPy, ReadError, SourceError, make_parquet_converter


def npy(array: np.ndarray[Any, Any], **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def decode(decoder: NumPy, *rows: bytes) -> Any:
    return decoder.decode(pa.array(rows, pa.large_binary()))


NUMBERS = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "int64", "float16", "float32", "float64"])
def test_every_dtype_arrives(dtype: str) -> None:
    rows = [(NUMBERS * factor).astype(dtype) for factor in range(3)]
    np.testing.assert_array_equal(decode(NumPy(dtype, (2, 3, 4)), *map(npy, rows)), np.stack(rows))


@pytest.mark.parametrize(
    "arrays",
    [
        [NUMBERS, NUMBERS + 1],
        [np.asfortranarray(NUMBERS), np.asfortranarray(NUMBERS + 1)],
        [NUMBERS.astype(">f4"), (NUMBERS + 1).astype(">f4")],
        [np.asfortranarray(NUMBERS.astype(">f4")), NUMBERS + 1],
        [NUMBERS, np.asfortranarray(NUMBERS + 1), (NUMBERS + 2).astype(">f4")],
    ],
    ids=["C", "Fortran", "big-endian", "both and neither", "mixed"],
)
def test_order_and_byte_order_do_not_matter(arrays: list[Any]) -> None:
    decoded = decode(NumPy("float32", (2, 3, 4)), *map(npy, arrays))
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, np.stack([array.astype(np.float32) for array in arrays]))


def test_a_slice_of_a_column_is_decoded_from_its_own_bytes() -> None:
    column = pa.array([npy(NUMBERS + number) for number in range(10)], pa.large_binary())
    decoded = NumPy("float32", (2, 3, 4)).decode(column[3:6])
    np.testing.assert_array_equal(decoded, np.stack([NUMBERS + number for number in (3, 4, 5)]))


def test_rows_without_a_shape_and_rows_without_numbers() -> None:
    np.testing.assert_array_equal(decode(NumPy("int64", ()), npy(np.int64(4)), npy(np.int64(5))), [4, 5])
    rows = decode(NumPy("float32", None, ndim=2), npy(np.zeros((0, 3), np.float32)), npy(np.ones((2, 1), np.float32)))
    assert [row.shape for row in rows] == [(0, 3), (2, 1)]


def test_an_array_of_an_npz_is_found_by_its_name() -> None:
    rows = [npz(x=NUMBERS + number, y=np.arange(2)) for number in range(3)]
    decoded = decode(NumPy("float32", (2, 3, 4), key="x"), *rows)
    np.testing.assert_array_equal(decoded[2], NUMBERS + 2)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([npy(NUMBERS), npy(NUMBERS.astype(np.float64))], "an array of float64, expected float32"),
        ([npy(NUMBERS), npy(NUMBERS[:1])], r"an array of shape \(1, 3, 4\), expected \(2, 3, 4\)"),
        ([npy(NUMBERS[:1]), npy(NUMBERS[:1])], r"an array of shape \(1, 3, 4\), expected \(2, 3, 4\)"),
        ([npy(np.array([{}], object))], "an array of Python objects, which would have to be unpickled"),
        ([npy(NUMBERS)[:-8]], "."),
        ([npy(NUMBERS) + b"more"], r"100 bytes follow the header, and an array of float32 \(2, 3, 4\) was promised"),
        ([b"\x93NUMPY\x01\x00"], "."),
        ([b"text"], "no .npy file"),
        ([b""], "no .npy file"),
        ([npz(x=NUMBERS)], "no .npy file"),
    ],
)
def test_bad_bytes_say_what_they_are(rows: list[bytes], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        decode(NumPy("float32", (2, 3, 4)), *rows)


def promising(shape: str) -> bytes:
    """The header of an array of float32 without its numbers."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def test_every_version_of_the_format_is_read() -> None:
    for version in ((1, 0), (2, 0), (3, 0)):
        stream = io.BytesIO()
        np.lib.format.write_array(stream, NUMBERS, version)
        np.testing.assert_array_equal(decode(NumPy("float32", (2, 3, 4)), stream.getvalue())[0], NUMBERS)
    with pytest.raises(ValueError, match=r"version 9\.1, which NumPy does not know"):
        decode(NumPy("float32", (2, 3, 4)), b"\x93NUMPY\x09\x01" + stream.getvalue()[8:])


@pytest.mark.parametrize("shape", ["(100000000000000,)", "(-1,)", "(-2, -2)"])
@pytest.mark.parametrize("decoder", [NumPy("float32", (2,)), NumPy("float32", None)], ids=["fixed", "ragged"])
def test_a_header_that_promises_too_much_takes_no_memory(decoder: NumPy, shape: str) -> None:
    with pytest.raises(ValueError, match="0 bytes follow the header, and an array of float32"):
        decode(decoder, promising(shape))


def test_a_small_npz_of_many_zeros_is_not_unpacked() -> None:
    stream = io.BytesIO()
    np.savez_compressed(stream, x=np.zeros(10_000_000, np.float32))
    with pytest.raises(ValueError, match="an array of 40,000,128 bytes, expected 8"):
        decode(NumPy("float32", (2,), key="x"), stream.getvalue())


@pytest.mark.parametrize(
    ("rows", "said"), [([npy(NUMBERS)], "no .npz file"), ([npz(y=NUMBERS)], "no .npz file with an array 'x'")]
)
def test_an_npz_without_the_array_says_so(rows: list[bytes], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        decode(NumPy("float32", (2, 3, 4), key="x"), *rows)


def write(folder: Path, rows: list[bytes | None]) -> Path:
    pq.write_table(pa.table({"x": pa.array(rows, pa.binary())}), folder / "part.parquet", row_group_size=2)
    return folder


def test_the_first_row_settles_what_is_not_declared(tmp_path: Path) -> None:
    folder = write(tmp_path, [None, None, None, npy(NUMBERS.astype(">f8")), npy(NUMBERS.astype(np.float64))])
    field = make_parquet_converter(folder, decode={"x": NumPy()}).schema["x"]
    assert (field.dtype, field.shape) == ("float64", (2, 3, 4))
    field = make_parquet_converter(folder, decode={"x": NumPy(shape=None)}).schema["x"]
    assert (field.dtype, field.shape, field.ndim) == ("float64", None, 3)
    field = make_parquet_converter(folder, decode={"x": NumPy(shape=(1, 3, 4))}).schema["x"]
    assert (field.dtype, field.shape) == ("float64", (1, 3, 4))


def test_a_first_row_that_is_none_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, [None, b"text", npy(NUMBERS)])
    with pytest.raises(ReadError, match=r"'x' cannot be decoded in row 1 \(row 1 of .*part\.parquet\)"):
        make_parquet_converter(folder, decode={"x": NumPy()})
    assert make_parquet_converter(folder, decode={"x": NumPy(on_error="skip")}).schema["x"].shape == (2, 3, 4)


@pytest.mark.parametrize("decoder", [
    NumPy("float32", on_error="skip"), NumPy(None, None, 2, on_error="skip"), NumPy("float32", None, 2, on_error="skip")
])  # fmt: skip
def test_a_row_that_is_not_as_declared_settles_nothing(tmp_path: Path, decoder: NumPy) -> None:
    rows = [npy(np.zeros(9)), *[npy(np.full((2, 2), row, np.float32)) for row in range(3)]]
    pq.write_table(pa.table({"x": pa.array(rows, pa.binary())}), tmp_path / "x.parquet")
    with make_parquet_converter(tmp_path, decode={"x": decoder}) as converter:
        assert len(converter) == 3
    with pytest.raises(ReadError, match=r"row 0 .*: an array of (float64, expected float32|1 dimensions, expected 2)"):
        make_parquet_converter(tmp_path, decode={"x": replace(decoder, on_error="raise")}).head(4)


def test_nulls_alone_settle_nothing(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"all rows of column 'x' are null.*Pass NumPy\(dtype, shape\)"):
        make_parquet_converter(write(tmp_path, [None, None]), decode={"x": NumPy()})


def test_a_dtype_that_no_tensor_has_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, [npy(np.array(["a", "b"]))])
    with pytest.raises(ValueError, match=r"column 'x' has the dtype 'str\d*'; it can be bool, uint8"):
        make_parquet_converter(folder, decode={"x": NumPy()})


def test_rows_of_another_shape_than_the_first_are_named(tmp_path: Path) -> None:
    converter = make_parquet_converter(
        write(tmp_path, [npy(NUMBERS), npy(NUMBERS), npy(NUMBERS[:1])]), decode={"x": NumPy()}
    )
    with pytest.raises(ReadError, match=r"in row 2 .*shape \(1, 3, 4\), expected \(2, 3, 4\)"):
        converter.head()


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float32"), np.dtype(">f4"), "<f4", "float32"])
def test_a_dtype_is_kept_by_its_name(dtype: Any) -> None:
    assert NumPy(dtype, (2,)) == NumPy("float32", (2,))
    assert NumPy(dtype, (2,)).dtype == "float32"


@pytest.mark.parametrize("key", [None, "x"])
def test_a_header_is_read_again_if_another_thread_disturbed_it(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPython 3.11 may raise SystemError in threads that evaluate literals at the same time."""
    reads, disturbed = np.lib.format.read_array_header_1_0, []

    def read(stream: Any) -> Any:
        if len(disturbed) < 3:
            disturbed.append(1)
            raise SystemError("AST constructor recursion depth mismatch (before=57, after=53)")
        return reads(stream)

    monkeypatch.setattr("numpy.lib.format.read_array_header_1_0", read)
    monkeypatch.setattr("converter.decoders.npy._known", {})
    row = np.arange(6, dtype=np.int16).reshape(2, 3)
    np.testing.assert_array_equal(
        decode(NumPy("int16", (2, 3), key=key), npy(row) if key is None else npz(x=row))[0], row
    )
    assert len(disturbed) == 3


@pytest.mark.parametrize(("rows", "key"), [
    ([npy(np.float64(row)) for row in range(3)], None),
    ([npy(np.float64(0)), npy(np.array(1, ">f8")), npy(np.float64(2))], None),
    ([npz(x=np.float64(row)) for row in range(3)], "x"),
])  # fmt: skip
def test_arrays_without_dimensions_are_numbers(tmp_path: Path, rows: list[bytes], key: str | None) -> None:
    pq.write_table(pa.table({"x": pa.array(rows, pa.binary())}), tmp_path / "x.parquet")
    decoder = NumPy(key=key, on_error="skip")
    with (
        make_parquet_converter(tmp_path, decode={"x": decoder}) as converter,
        converter.make_batch_reader(batch_size=3) as reader,
    ):
        assert [batch["x"].tolist() for batch in reader] == [[0.0, 1.0, 2.0]]


class Disturbed:
    """A decoder that evaluates what it reads, and is disturbed at its first call."""

    dtype, shape = "int64", (1,)

    def __init__(self) -> None:
        self.num_calls = 0

    def decode(self, values: pa.LargeBinaryArray) -> Any:
        self.num_calls += 1
        if self.num_calls == 1:
            raise SystemError("AST constructor recursion depth mismatch (before=57, after=53)")
        return np.array([[int(value.as_py())] for value in values])


def test_a_decoder_that_another_thread_disturbed_is_called_again(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([b"7", b"8"], pa.binary())}), tmp_path / "x.parquet")
    decoder = Disturbed()
    with (
        make_parquet_converter(tmp_path, decode={"x": decoder}) as converter,
        converter.make_batch_reader(batch_size=2) as reader,
    ):
        assert [batch["x"].tolist() for batch in reader] == [[[7], [8]]]
    assert decoder.num_calls == 2


@pytest.mark.parametrize("base", [NumPy, Image])
def test_a_decoder_that_is_derived_is_pickled_and_copied_with_what_it_adds(base: Any) -> None:
    found = pickle.loads(pickle.dumps(DERIVED[base]()))
    assert found.added == copy.deepcopy(DERIVED[base]()).added == "more"
    assert (found.shape, found.on_error) == (DERIVED[base]().shape, "skip")


class DerivedNumPy(NumPy):
    def __init__(self) -> None:
        super().__init__("float32", (3,), on_error="skip")
        object.__setattr__(self, "added", "more")


class DerivedImage(Image):
    def __init__(self) -> None:
        super().__init__(size=(2, 3), on_error="skip")
        object.__setattr__(self, "added", "more")


DERIVED: dict[Any, Any] = {NumPy: DerivedNumPy, Image: DerivedImage}


def test_a_decode_of_ones_own_is_asked_though_the_base_decodes_into_memory(tmp_path: Path) -> None:
    class Doubled(NumPy):
        def decode(self, values: pa.LargeBinaryArray) -> Any:
            return 2 * np.asarray(super().decode(values))

    pq.write_table(pa.table({"x": [npy(np.array([1, 2], "f4")), npy(np.array([3, 4], "f4"))]}), tmp_path / "a.parquet")
    converter = make_parquet_converter(tmp_path, decode={"x": Doubled("float32", (2,))})
    assert converter.head(2)["x"].tolist() == [[2, 4], [6, 8]]
