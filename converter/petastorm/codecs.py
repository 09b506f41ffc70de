"""How a field's values are stored: as numbers and texts, as bytes of NumPy's formats, or as pictures."""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from converter.petastorm import arrays, pictures
from converter.petastorm.columns import buffers_of, convert_column, convert_scalar, stored_values, to_column

Array = npt.NDArray[Any]

_INTEGERS = frozenset({"ByteType", "ShortType", "IntegerType", "LongType"})
_FLOATS = frozenset({"FloatType", "DoubleType"})
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "ArrayType": ("elementType", "containsNull"),
    "BinaryType": (),
    "BooleanType": (),
    "ByteType": (),
    "CharType": ("length",),
    "DateType": (),
    "DecimalType": ("precision", "scale"),
    "DoubleType": (),
    "FloatType": (),
    "IntegerType": (),
    "LongType": (),
    "NullType": (),
    "ShortType": (),
    "StringType": (),
    "TimestampNTZType": (),
    "TimestampType": (),
    "VarcharType": ("length",),
}
"""Spark's types of columns that have no fields of their own, and the attributes that their classes are called with."""


@dataclass(frozen=True, slots=True)
class NamedSparkType:
    """A type of Spark's by its name, so that schemas are read also where PySpark is not installed.

    >>> ScalarCodec(NamedSparkType("LongType")).spark_type.name
    'LongType'

    Raises:
        ValueError: Spark has no such type, or another number of arguments.
    """

    name: str
    """The name of its class in `pyspark.sql.types`."""

    arguments: tuple[Any, ...] = ()
    """What the class is called with: precision and scale of a decimal, the length of a text, what an array holds."""

    def __post_init__(self) -> None:
        if self.name not in _ARGUMENTS:
            raise ValueError(f"{self.name!r} is no type of a column; known are {', '.join(_ARGUMENTS)}.")
        expected = _ARGUMENTS[self.name]
        if len(self.arguments) > len(expected):
            raise ValueError(f"{self.name} takes {len(expected)} arguments, got {self.arguments}.")

    @classmethod
    def of(cls, spark_type: Any) -> NamedSparkType:
        """The name of a type that PySpark made.

        Raises:
            ValueError: it is none, or one with fields of its own.
        """
        if isinstance(spark_type, NamedSparkType):
            return spark_type
        name = next((name for name in _class_names(spark_type) if name in _ARGUMENTS), None)
        if name is None:
            raise ValueError(f"{spark_type!r} is no type of a column; known are {', '.join(_ARGUMENTS)}.")
        arguments = [getattr(spark_type, attribute) for attribute in _ARGUMENTS[name]]
        if name == "ArrayType":
            arguments[0] = cls.of(arguments[0])
        return cls(name, tuple(arguments))

    def to_spark(self) -> Any:
        """The type as PySpark has it.

        Raises:
            ImportError: PySpark is not installed.
        """
        import pyspark.sql.types as sql_types

        arguments = [each.to_spark() if isinstance(each, NamedSparkType) else each for each in self.arguments]
        return getattr(sql_types, self.name)(*arguments)


class DataframeColumnCodec:
    """What a codec is: derive from it to store values in a form of your own."""

    @abstractmethod
    def encode(self, unischema_field: Any, value: Any) -> Any:
        """A value as it is stored."""
        raise RuntimeError("Abstract method was called")

    @abstractmethod
    def decode(self, unischema_field: Any, value: Any) -> Any:
        """A stored value as it was."""
        raise RuntimeError("Abstract method was called")

    def decode_column(self, unischema_field: Any, values: pa.Array) -> Array:
        """All stored values of a column: one array `(rows, *shape)` if all have one shape, else an array of objects."""
        rows = stored_values(values)
        return to_column([None if row is None else self.decode(unischema_field, row) for row in rows])

    @abstractmethod
    def spark_dtype(self) -> Any:
        """Spark's type of the stored values."""
        raise RuntimeError("Abstract method was called")

    @abstractmethod
    def __str__(self) -> str:
        raise RuntimeError("Abstract method was called")


class ScalarCodec(DataframeColumnCodec):
    """Stores one number, text or time in each row, as a type of Spark's.

    Args:
        spark_type: an object of a class in `pyspark.sql.types`, such as `IntegerType()`; or its `NamedSparkType`.
    """

    def __init__(self, spark_type: Any) -> None:
        self._spark_type = spark_type

    @property
    def spark_type(self) -> NamedSparkType:
        """The type's name, which can be stored.

        Raises:
            ValueError: what was given is no type of a column.
        """
        return NamedSparkType.of(self._spark_type)

    def encode(self, unischema_field: Any, value: Any) -> Any:
        """The value as Python has it.

        Raises:
            TypeError: the value is a list or an array.
            ValueError: the field has a shape, or its value is no text though its type is one.
        """
        is_scalar = not hasattr(value, "__len__") or isinstance(value, str)
        if not is_scalar and not (isinstance(value, np.ndarray) and value.shape == ()):
            raise TypeError(
                f"Expected a scalar as a value for field '{unischema_field.name}'. Got a non-numpy type'{type(value)}'"
            )
        if unischema_field.shape:
            raise ValueError(
                f"The shape field of unischema_field '{unischema_field.name}' must be an empty tuple (i.e. '()' to "
                f"indicate a scalar. However, the actual shape is {unischema_field.shape}"
            )
        names = _class_names(self._spark_type)
        if _INTEGERS.intersection(names):
            return int(value)
        if _FLOATS.intersection(names):
            return float(value)
        if "BooleanType" in names:
            return bool(value)
        if "StringType" in names:
            if not isinstance(value, str):
                raise ValueError(f"Expected a string value for field {unischema_field.name}. Got type {type(value)}")
            # NumPy's own conversion leaves out zeros at the end.
            return value[:] if isinstance(value, np.str_) else str(value)
        return value

    def decode(self, unischema_field: Any, value: Any) -> Any:
        """The value as the field's dtype has it."""
        return convert_scalar(unischema_field.numpy_dtype, value)

    def decode_column(self, unischema_field: Any, values: pa.Array) -> Array:
        """All values as the field's dtype has them; see `columns.convert_column`."""
        if type(self).decode is not ScalarCodec.decode:
            return super().decode_column(unischema_field, values)
        return convert_column(unischema_field.numpy_dtype, values)

    def spark_dtype(self) -> Any:
        """The type that was given."""
        return self._spark_type.to_spark() if isinstance(self._spark_type, NamedSparkType) else self._spark_type

    def __str__(self) -> str:
        kind = self._spark_type
        return f"{type(self).__name__}({kind.name if isinstance(kind, NamedSparkType) else type(kind).__name__}())"


class _BinaryCodec(DataframeColumnCodec):
    """Stores bytes."""

    def spark_dtype(self) -> Any:
        """Spark's `BinaryType`."""
        import pyspark.sql.types as sql_types

        return sql_types.BinaryType()


class NdarrayCodec(_BinaryCodec):
    """Stores an array as `numpy.save` writes it."""

    def encode(self, unischema_field: Any, value: Any) -> bytearray:
        """The array's `.npy` bytes.

        Raises:
            ValueError: the value is no array, or has another dtype or shape than the field.
        """
        _check_array(unischema_field, value)
        stream = io.BytesIO()
        np.save(stream, value)
        return bytearray(stream.getvalue())

    def decode(self, unischema_field: Any, value: Any) -> Array:  # noqa: ARG002 (the bytes say dtype and shape)
        """The array in `.npy` bytes."""
        return arrays.load_npy(value)

    def decode_column(self, unischema_field: Any, values: pa.Array) -> Array:
        """All arrays of a column."""
        if type(self).decode is not NdarrayCodec.decode:
            return super().decode_column(unischema_field, values)
        return arrays.npy_column(values)

    def __str__(self) -> str:
        return f"{type(self).__name__}()"


class CompressedNdarrayCodec(_BinaryCodec):
    """Stores an array as `numpy.savez_compressed` writes it."""

    def encode(self, unischema_field: Any, value: Any) -> bytearray:
        """The array's `.npz` bytes.

        Raises:
            ValueError: the value is no array, or has another dtype or shape than the field.
        """
        _check_array(unischema_field, value)
        stream = io.BytesIO()
        np.savez_compressed(stream, arr=value)
        return bytearray(stream.getvalue())

    def decode(self, unischema_field: Any, value: Any) -> Array:  # noqa: ARG002 (the bytes say dtype and shape)
        """The array in `.npz` bytes."""
        return arrays.load_npz(value)

    def decode_column(self, unischema_field: Any, values: pa.Array) -> Array:
        """All arrays of a column."""
        if type(self).decode is not CompressedNdarrayCodec.decode:
            return super().decode_column(unischema_field, values)
        return arrays.npz_column(values)

    def __str__(self) -> str:
        return f"{type(self).__name__}()"


class CompressedImageCodec(_BinaryCodec):
    """Stores a picture, an array `(height, width)` or `(height, width, 3)` in RGB, as PNG or JPEG.

    Args:
        image_codec: `"png"` (uint8 or uint16, exact) or `"jpeg"` (uint8).
        quality: of a JPEG, 0 to 100.
    """

    def __init__(self, image_codec: str = "png", quality: int = 80) -> None:
        # With a dot, as in the schemas that Petastorm stores.
        self._image_codec = "." + image_codec
        self._quality = quality

    @property
    def image_codec(self) -> str:
        """`"png"` or `"jpeg"`."""
        return self._image_codec[1:]

    @property
    def quality(self) -> int:
        """Of a JPEG, 0 to 100."""
        return self._quality

    def encode(self, unischema_field: Any, value: Any) -> bytearray:
        """The picture's file.

        Raises:
            ValueError: the value is no array, has another dtype or shape than the field, or one that has no file form.
            ImportError: Pillow is not installed, and the format is not PNG.
        """
        if not isinstance(value, np.ndarray):
            raise ValueError(f"Unexpected type of {unischema_field.name} feature, expected ndarray, got {type(value)}")
        if unischema_field.numpy_dtype != value.dtype:
            raise ValueError(
                f"Unexpected type of {unischema_field.name} feature, expected {unischema_field.numpy_dtype}, got "
                f"{value.dtype}"
            )
        if not _is_compliant_shape(value.shape, unischema_field.shape):
            raise ValueError(
                f"Unexpected dimensions of {unischema_field.name} feature, expected {unischema_field.shape}, got "
                f"{value.shape}"
            )
        return bytearray(pictures.encode(value, self.image_codec, self._quality))

    def decode(self, unischema_field: Any, value: Any) -> Array:  # noqa: ARG002 (the file says dtype and shape)
        """The picture in a file's bytes, as the file has it: grey or RGB, not turned by what a camera noted.

        Raises:
            ValueError, OSError: the bytes are no picture, or one with transparency.
            ImportError: Pillow or simplejpeg is not installed, and the file is no PNG of the usual kind.
        """
        return pictures.decode(value)

    def decode_column(self, unischema_field: Any, values: pa.Array) -> Array:
        """All pictures of a column."""
        if type(self).decode is not CompressedImageCodec.decode:
            return super().decode_column(unischema_field, values)
        return pictures.decode_column(buffers_of(values))

    def __str__(self) -> str:
        return f"{type(self).__name__}('{self.image_codec}', {self._quality})"


def _class_names(spark_type: Any) -> list[str]:
    """The names of a Spark type's classes, its own first: the type can be told without importing PySpark."""
    if isinstance(spark_type, NamedSparkType):
        return [spark_type.name]
    return [each.__name__ for each in type(spark_type).__mro__]


def _check_array(unischema_field: Any, value: Any) -> None:
    name, dtype, shape = unischema_field.name, unischema_field.numpy_dtype, unischema_field.shape
    if not isinstance(value, np.ndarray):
        raise ValueError(f"Unexpected type of {name} feature. Expected ndarray of {dtype}. Got {type(value)}")
    if value.dtype.hasobject:
        raise ValueError(f"Unexpected type of {name} feature: an array of Python objects has no form without pickle")
    if dtype != value.dtype.type:
        raise ValueError(f"Unexpected type of {name} feature. Expected {dtype}. Got {value.dtype}")
    if not _is_compliant_shape(value.shape, shape):
        raise ValueError(f"Unexpected dimensions of {name} feature. Expected {shape}. Got {value.shape}")


def _is_compliant_shape(a: tuple[int | None, ...], b: tuple[int | None, ...]) -> bool:
    """Whether two shapes are equal, where None and 0 equal any size."""
    return len(a) == len(b) and all(not left or not right or left == right for left, right in zip(a, b, strict=True))
