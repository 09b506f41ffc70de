"""All decoders keep one contract: those of the package, with rows of one shape and of many, and a user's own."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pytest

from converter import Image, NumPy, ReadError
from converter.decoders.decoder import Decoder
from tests.contracts.decoders import DecoderContract


def noise(number: int, height: int, width: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)


def png(array: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    PIL.Image.fromarray(array).save(stream, "PNG")
    return stream.getvalue()


def npy(array: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


class TestImagesOfOneSize(DecoderContract):
    skips = Image(size=(6, 5), on_error="skip")

    def decoder(self) -> Decoder:
        return Image(size=(6, 5))

    def row(self, number: int) -> bytes:
        return png(noise(number, 6, 5))

    def expected(self, number: int) -> np.ndarray[Any, Any]:
        return noise(number, 6, 5)


class TestImagesOfManySizes(DecoderContract):
    skips = Image(layout="CHW", on_error="skip")

    def decoder(self) -> Decoder:
        return Image(layout="CHW")

    def row(self, number: int) -> bytes:
        return png(noise(number, 2 + number % 3, 3 + number % 2))

    def expected(self, number: int) -> np.ndarray[Any, Any]:
        return noise(number, 2 + number % 3, 3 + number % 2).transpose(2, 0, 1)


class TestArraysOfOneShape(DecoderContract):
    skips = NumPy(on_error="skip")

    def decoder(self) -> Decoder:
        return NumPy("float32", (3, 2))

    def row(self, number: int) -> bytes:
        return npy(self.expected(number))

    def expected(self, number: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng(number).random((3, 2), np.float32)


class TestArraysOfManyShapes(DecoderContract):
    skips = NumPy("int64", None, on_error="skip")

    def decoder(self) -> Decoder:
        return NumPy("int64", None)

    def row(self, number: int) -> bytes:
        return npy(self.expected(number))

    def expected(self, number: int) -> np.ndarray[Any, Any]:
        return np.arange(number % 4) + number


class TestSingleNumbers(DecoderContract):
    skips = NumPy(on_error="skip")

    def decoder(self) -> Decoder:
        return NumPy("float64", ())

    def row(self, number: int) -> bytes:
        return npy(np.float64(number / 7))

    def expected(self, number: int) -> np.ndarray[Any, Any]:
        return np.float64(number / 7)


class Doubled:
    """A decoder as a user writes one: two bytes become two numbers."""

    dtype, shape = "int32", (2,)

    def decode(self, values: pa.LargeBinaryArray) -> np.ndarray[Any, Any]:
        return np.stack([np.frombuffer(value.as_buffer(), np.uint8).astype(np.int32) * 2 for value in values])


class TestUsersOwn(DecoderContract):
    bad = b"three"

    def decoder(self) -> Decoder:
        return Doubled()

    def row(self, number: int) -> bytes:
        return bytes([number, 2 * number])

    def expected(self, number: int) -> np.ndarray[Any, Any]:
        return np.array([2 * number, 4 * number], np.int32)


OWN = TestUsersOwn()


class Few(Doubled):
    def decode(self, values: pa.LargeBinaryArray) -> np.ndarray[Any, Any]:
        return super().decode(values)[1:]


class Wide(Doubled):
    def decode(self, values: pa.LargeBinaryArray) -> np.ndarray[Any, Any]:
        return super().decode(values).astype(np.int64)


class Raising(Doubled):
    def decode(self, values: pa.LargeBinaryArray) -> np.ndarray[Any, Any]:
        raise KeyError("no such key")


class Nothing(Doubled):
    def decode(self, values: pa.LargeBinaryArray) -> Any:
        return None


class Ragged(Doubled):
    shape = None  # type: ignore[assignment]

    def decode(self, values: pa.LargeBinaryArray) -> Any:
        return [row.astype(np.float32) for row in super().decode(values)]


class TestBadDecoders:
    """What a user's decoder may do wrong is an error that names the column, the row and what was expected."""

    @pytest.mark.parametrize(
        ("decoder", "said"),
        [
            (Few(), r"decode\(\) returned \d rows, expected \d rows"),
            (Wide(), r"decode\(\) returned int64 of shape \(\d, 2\), expected int32 of shape \(\d, 2\)"),
            (Nothing(), r"decode\(\) returned NoneType, expected \d rows"),
            (Ragged(), r"decode\(\) returned a row of float32 with 1 dimensions, expected int32 with 1"),
        ],
    )
    def test_it_is_told(self, tmp_path: Any, decoder: Decoder, said: str) -> None:
        converter = OWN.convert(OWN.write(tmp_path), decoder)
        with pytest.raises(TypeError, match=rf"decode: .* of column 'x' is no decoder: {said}"):
            OWN.read(converter)

    def test_one_that_raises_for_every_row_is_told_with_the_first(self, tmp_path: Any) -> None:
        converter = OWN.convert(OWN.write(tmp_path), Raising())
        with pytest.raises(ReadError, match=r"'x' cannot be decoded in row 0 .*part-0\.parquet\): KeyError: 'no such"):
            OWN.read(converter)

    def test_rows_are_not_left_out_for_it(self, tmp_path: Any) -> None:
        class Skipping(Wide):
            on_error = "skip"

        with pytest.raises(TypeError, match=r"decode: .* of column 'x' is no decoder: decode\(\) returned int64"):
            OWN.convert(OWN.write(tmp_path), Skipping())
