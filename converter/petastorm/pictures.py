"""Pictures as OpenCV reads and writes them: grey or RGB, of 8 or 16 bits as the file is, never turned or resized.

JPEG is simplejpeg's business. A PNG is unpacked here where its rows have the simple filters that OpenCV and `encode`
write, which takes a third of Pillow's time; Pillow does the others.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from converter.errors import MissingDependencyError
from converter.petastorm.columns import to_objects

Array = npt.NDArray[Any]

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_FORMATS = {"bmp": "BMP", "tif": "TIFF", "tiff": "TIFF", "webp": "WEBP"}
_HEADER = struct.Struct(">IIBBBBB")
_GREY, _RGB = 0, 2
_SUB, _UP, _AVERAGE = 1, 2, 3
# OpenCV's limit.
_MAX_PIXELS = 1 << 30


def encode(picture: Array, image_codec: str, quality: int) -> bytes:
    """The file of a picture `(height, width)` or `(height, width, 3)`.

    Raises:
        ValueError: the picture has another shape or dtype, or the format is unknown.
        ImportError: the extra `images` is not installed.
    """
    if not (picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] == 3)):
        raise ValueError(
            f"Unexpected image dimensions. Supported dimensions are (H, W) or (H, W, 3). Got {picture.shape}"
        )
    if not picture.size:
        raise ValueError(f"a picture of {picture.shape[1]} × {picture.shape[0]} pixels cannot be stored")
    name = image_codec.lower()
    allowed = ("uint8", "uint16") if name in ("png", "tif", "tiff") else ("uint8",)
    if picture.dtype.name not in allowed:
        raise ValueError(f"a picture of {picture.dtype} cannot be stored as {image_codec}, only {' or '.join(allowed)}")
    if name == "png":
        return _encode_png(picture)
    if name in ("jpeg", "jpg", "jpe"):
        return _encode_jpeg(picture, quality)
    if name in _FORMATS:
        return _encode_with_pillow(picture, _FORMATS[name])
    raise ValueError(f"image_codec={image_codec!r} is unknown; it can be 'png' or 'jpeg', also {', '.join(_FORMATS)}")


def decode(raw: Any, out: Array | None = None) -> Array:
    """The picture in a file's bytes; in `out` if it has its shape and dtype, else in an array of its own.

    Raises:
        ValueError, OSError: the bytes are no picture, or one with transparency.
        ImportError: the extra `images` is not installed.
    """
    data = memoryview(raw).cast("B")
    if data[:3] == _JPEG:
        return _placed(_decode_jpeg(data, out), out)
    return _placed(_decode_png(data) if data[:8] == _PNG else _decode_with_pillow(data), out)


def decode_column(rows: Sequence[Any]) -> Array:
    """Pictures as one array if all have one shape and dtype and none is None; else as an array of objects.

    Raises:
        ValueError, OSError, ImportError: as `decode`.
    """
    if not rows or any(raw is None for raw in rows):
        return to_objects(None if raw is None else decode(raw) for raw in rows)
    first = decode(rows[0])
    block = np.empty((len(rows), *first.shape), first.dtype)
    block[0] = first
    places = list(block)
    pictures = [places[0], *(decode(raw, place) for raw, place in zip(rows[1:], places[1:], strict=True))]
    # Each was decoded where it belongs, unless it is of another kind than the first.
    is_block = all(picture is place for picture, place in zip(pictures, places, strict=True))
    return block if is_block else to_objects(pictures)


def _check_pixels(height: int, width: int) -> None:
    if height * width > _MAX_PIXELS:
        raise ValueError(f"a picture of {width:,} × {height:,} pixels, more than {_MAX_PIXELS:,}")


def _placed(picture: Array, out: Array | None) -> Array:
    if out is None or out is picture or out.shape != picture.shape or out.dtype != picture.dtype:
        return picture
    out[...] = picture
    return out


# JPEG


def _encode_jpeg(picture: Array, quality: int) -> bytes:
    stream = io.BytesIO()
    # Pillow, not simplejpeg: it uses the exact transform below a quality of 96, too, as OpenCV does.
    _pillow().fromarray(picture).save(stream, "JPEG", quality=min(max(quality, 1), 100))
    return stream.getvalue()


def _decode_jpeg(data: memoryview, out: Array | None) -> Array:
    simplejpeg = _simplejpeg()
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except KeyError as error:
        # It finds no name for the colours that it did not read.
        raise ValueError("a JPEG whose header was cut") from error
    _check_pixels(height, width)
    if colorspace in ("CMYK", "YCCK"):
        return _rgb_of_cmyk(simplejpeg.decode_jpeg(data, "CMYK", strict=False))
    if colorspace == "Gray":
        grey: Array = simplejpeg.decode_jpeg(data, "GRAY", strict=False)
        return grey[:, :, 0]
    # Not strict: OpenCV also shows what there is of a file that was cut.
    if out is None or out.shape != (height, width, 3) or out.dtype != np.uint8 or not out.flags.c_contiguous:
        pixels: Array = simplejpeg.decode_jpeg(data, "RGB", strict=False)
        return pixels
    simplejpeg.decode_jpeg(data, "RGB", buffer=out, strict=False)
    return out


def _rgb_of_cmyk(inks: Array) -> Array:
    """The colours of four inks as OpenCV computes them."""
    amounts = inks.astype(np.int32)
    black = amounts[:, :, 3:]
    rgb: Array = (black - ((255 - amounts[:, :, :3]) * black >> 8)).astype(np.uint8)
    return rgb


# PNG


class _Header(NamedTuple):
    """What the first chunk of a PNG says."""

    width: int
    height: int
    bits: int
    kind: int
    compression: int
    filtering: int
    interlacing: int

    @property
    def pixel_bytes(self) -> int:
        return (3 if self.kind == _RGB else 1) * self.bits // 8

    @property
    def row_bytes(self) -> int:
        return self.width * self.pixel_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.height, self.width, 3) if self.kind == _RGB else (self.height, self.width)


def _encode_png(picture: Array) -> bytes:
    """A PNG in which each row holds the differences of neighbouring pixels, as OpenCV writes it."""
    height, width = picture.shape[:2]
    kind = _RGB if picture.ndim == 3 else _GREY
    header = _Header(width, height, 8 * picture.itemsize, kind, 0, 0, 0)
    pixels = np.ascontiguousarray(picture, picture.dtype.newbyteorder(">")).view(np.uint8).reshape(height, -1)
    rows = np.empty((height, 1 + header.row_bytes), np.uint8)
    rows[:, 0] = _SUB
    rows[:, 1:] = pixels
    rows[:, 1 + header.pixel_bytes :] -= pixels[:, : -header.pixel_bytes]
    # OpenCV's settings: after the differences little is left that a search for longer repetitions could find.
    packing = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    packed = packing.compress(rows.data) + packing.flush()
    chunks = ((b"IHDR", _HEADER.pack(*header)), (b"IDAT", packed), (b"IEND", b""))
    return _PNG + b"".join(_chunk(name, content) for name, content in chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(content, zlib.crc32(name)))


def _decode_png(data: memoryview) -> Array:
    header, parts, is_transparent = _read_chunks(data)
    _check_pixels(header.height, header.width)
    is_deep = header.bits == 16 and header.kind == _RGB and not is_transparent
    is_whole = header.bits in (8, 16) and header.kind in (_GREY, _RGB) and not any(header[4:])
    if is_whole and not is_transparent and header.height * header.width and parts:
        rows = _unpack(parts, header)
        pixels = _unfiltered(rows[:, 0], rows[:, 1:], header)
        if pixels is not None:
            numbers = pixels if header.bits == 8 else pixels.view(">u2").astype(np.uint16)
            return numbers.reshape(header.shape)
    return _decode_deep_png(data, header) if is_deep else _decode_with_pillow(data)


def _read_chunks(data: memoryview) -> tuple[_Header, list[memoryview], bool]:
    """The header, the packed pixels, and whether a colour is transparent."""
    parts, is_transparent, header = [], False, None
    place = len(_PNG)
    while place + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, place)
        content = data[place + 8 : place + 8 + length]
        if name == b"IHDR" and length == len(content) == _HEADER.size:
            header = _Header(*_HEADER.unpack(content))
        elif name == b"IDAT":
            parts.append(content)
        elif name == b"tRNS":
            is_transparent = True
        place += 12 + length
    if header is None:
        raise ValueError("a PNG without a header")
    return header, parts, is_transparent


def _unpack(parts: Sequence[memoryview], header: _Header) -> Array:
    """The filtered rows, each with its filter's number before it."""
    size = header.height * (1 + header.row_bytes)
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(b"".join(parts) if len(parts) > 1 else parts[0], size + 1)
    except zlib.error as error:
        raise ValueError(f"a PNG whose pixels cannot be unpacked: {error}") from error
    if len(raw) != size or not unpacking.eof:
        raise ValueError(f"a PNG of {header.width} × {header.height} pixels with {len(raw):,} bytes, expected {size:,}")
    return np.frombuffer(raw, np.uint8).reshape(header.height, -1)


def _unfiltered(filters: Array, rows: Array, header: _Header) -> Array | None:
    """The bytes of the pixels; None if a row's filter is one that needs both neighbours."""
    if filters.max() >= _AVERAGE:
        return None
    pixels = np.empty(rows.shape, np.uint8)
    by_pixel = (header.height, header.width, header.pixel_bytes)
    if (filters == _SUB).all():
        np.add.accumulate(rows.reshape(by_pixel), axis=1, dtype=np.uint8, out=pixels.reshape(by_pixel))
        return pixels
    above = np.zeros(header.row_bytes, np.uint8)
    for kind, row, place in zip(filters.tolist(), rows, pixels, strict=True):
        if kind == _SUB:
            np.add.accumulate(row.reshape(by_pixel[1:]), axis=0, dtype=np.uint8, out=place.reshape(by_pixel[1:]))
        elif kind == _UP:
            np.add(row, above, out=place)
        else:
            place[...] = row
        above = place
    return pixels


# Everything else


def _encode_with_pillow(picture: Array, file_format: str) -> bytes:
    if picture.dtype == np.uint16 and picture.ndim == 3:
        raise ValueError(f"a picture of three colours of 16 bits cannot be stored as {file_format}, only as png")
    stream = io.BytesIO()
    options = {"lossless": True} if file_format == "WEBP" else {}
    _pillow().fromarray(picture).save(stream, file_format, **options)
    return stream.getvalue()


def _decode_with_pillow(data: memoryview) -> Array:
    pillow = _pillow()
    try:
        # Only these plug-ins of Pillow's: others start programs.
        opened = pillow.open(io.BytesIO(data), formats=("PNG", "BMP", "TIFF", "WEBP"))
    except pillow.UnidentifiedImageError:
        raise ValueError("the bytes are no picture: neither JPEG, PNG, WebP, TIFF nor BMP") from None
    with opened as picture:
        if picture.mode in ("RGBA", "LA", "PA") or (picture.mode in ("P", "RGB") and "transparency" in picture.info):
            raise ValueError(
                "Unexpected image dimensions. Supported dimensions are (H, W) or (H, W, 3). Got "
                f"{(picture.height, picture.width, 4)}"
            )
        if picture.mode.startswith("I"):
            return np.asarray(picture).astype(np.uint16)
        return np.array(picture.convert("L" if picture.mode in ("1", "L") else "RGB"))


def _decode_deep_png(data: memoryview, header: _Header) -> Array:
    """A PNG of three colours of 16 bits: Pillow, which keeps 8 of them, reads the upper and then the lower halves."""
    upper, lower = (_half(data, order) for order in ("RGB;16B", "RGB;16L"))
    return (upper.astype(np.uint16) << 8 | lower).reshape(header.shape)


def _half(data: memoryview, order: str) -> Array:
    with _pillow().open(io.BytesIO(data), formats=("PNG",)) as picture:
        # The last part names the bytes to keep: a file's numbers begin with the upper one.
        picture.tile = [(*tile[:3], order) for tile in picture.tile]
        return np.asarray(picture)


def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError as error:
        raise _missing("simplejpeg", error) from error
    return simplejpeg


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError as error:
        raise _missing("Pillow", error) from error
    return PIL.Image


def _missing(name: str, error: ImportError) -> MissingDependencyError:
    return MissingDependencyError(
        f"CompressedImageCodec needs {name}: pip install 'spark-tensor-converter[images]' ({error})"
    )
