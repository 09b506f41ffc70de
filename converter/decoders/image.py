"""Pictures as tensors: JPEG, PNG, WebP, TIFF and BMP.

JPEG is decoded by simplejpeg (libjpeg-turbo), everything else by Pillow. Both release the GIL. A JPEG of 224×224 takes
simplejpeg 198 µs of one processor, OpenCV 227, imagecodecs 237, torchvision 244, Pillow 419 (tests/bench/images.py).
"""

from __future__ import annotations

import io
import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]

_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP")
_CHANNELS = {"RGB": 3, "RGBA": 4, "L": 1, "I;16": 1}
_COLORSPACES = {"RGB": "RGB", "RGBA": "RGBA", "L": "GRAY"}
_JPEG = b"\xff\xd8\xff"
_EXIF = b"Exif\0\0"
_APP1, _START_OF_SCAN = 0xFFE1, 0xFFDA
_START_OF_FRAME = 0xFFC0
# Formats, not compiled ones: those cannot be pickled, and this module travels to executors.
_SEGMENT, _FRAME = ">HH", ">BHHB"
_COMPARED_BYTES = 2048


# Without slots: their state could not be set where Spark 3.5's cloudpickle has sent the class.
@dataclass(frozen=True)
class Image:
    """Decodes pictures: JPEG, PNG, WebP, TIFF and BMP of one frame.

    Whatever the file has becomes `mode`: grey, palette and CMYK pictures become RGB; an alpha channel is dropped unless
    the mode is RGBA; numbers of 16 bits become 8 bits by their upper half, and 8 bits become 16 by a factor of 257. A
    picture is turned upright as its EXIF orientation says.

    >>> image = Image(size=(224, 224), layout="CHW")
    >>> image.dtype, image.shape
    ('uint8', (3, 224, 224))

    Args:
        mode: `"RGB"`, `"RGBA"`, `"L"` (grey, 8 bits) or `"I;16"` (grey, 16 bits), as in Pillow.
        size: height and width. None keeps each picture's own size: rows differ in shape.
        fit: how `size` is reached. `"crop"`: the shorter side is resized, then the centre is cut out. `"stretch"`: both
            sides are resized. A large JPEG is decoded at half of its size or less.
        layout: `"HWC"` or `"CHW"`: where the channels stand in the shape.
        max_pixels: a picture of more pixels is an error, before memory is taken for it. Pillow warns above
            89 millions, too, and refuses more than 178 millions of any picture but a JPEG.
        on_error: `"skip"` leaves rows that cannot be decoded out of the dataset, at the cost of a pass when the
            converter is made.

    Raises:
        ValueError, TypeError: an option has a wrong value.
    """

    mode: Literal["RGB", "RGBA", "L", "I;16"] = "RGB"
    size: tuple[int, int] | None = None
    fit: Literal["crop", "stretch"] = "crop"
    layout: Literal["HWC", "CHW"] = "HWC"
    max_pixels: int = 89_000_000
    on_error: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        for name, allowed in (("mode", tuple(_CHANNELS)), ("fit", ("crop", "stretch")), ("layout", ("HWC", "CHW"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"Image: {name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r:.80}.")
        size: Any = self.size
        is_size = (
            isinstance(size, (tuple, list)) and len(size) == 2 and all(type(side) is int and side > 0 for side in size)
        )
        if size is not None and not is_size:
            raise ValueError(f"Image: size must be (height, width), e.g. (224, 224), or None, got {size!r:.80}.")
        if size is not None:
            object.__setattr__(self, "size", tuple(size))
        if type(self.max_pixels) is not int or self.max_pixels < 1:
            raise ValueError(f"Image: max_pixels must be a whole number of at least 1, got {self.max_pixels!r:.80}.")

    @property
    def dtype(self) -> str:
        """uint8, or uint16 for `"I;16"`."""
        return "uint16" if self.mode == "I;16" else "uint8"

    @property
    def shape(self) -> tuple[int, ...] | None:
        """`(height, width, channels)` or `(channels, height, width)`; None without a size."""
        if self.size is None:
            return None
        channels = _CHANNELS[self.mode]
        return (channels, *self.size) if self.layout == "CHW" else (*self.size, channels)

    @property
    def ndim(self) -> int:
        """Three, also for grey pictures, which have one channel."""
        return 3

    def decode(self, values: pa.LargeBinaryArray) -> Array | Sequence[Array]:
        """Pictures as one array `(len(values), *shape)`; without a size as a list of arrays.

        Raises:
            ImportError: Pillow or simplejpeg is not installed.
            ValueError, OSError: the bytes are no picture that `Image` decodes.
        """
        if self.shape is not None:
            out = np.empty((len(values), *self.shape), self.dtype)
            self.decode_into(values, out)
            return out
        _check_installed()
        frame_of = self._frames()
        pictures = [self._picture(raw, frame_of(raw)) for raw in _rows(values)]
        return [np.ascontiguousarray(_planes(picture)) for picture in pictures] if self.layout == "CHW" else pictures

    def decode_into(self, values: pa.LargeBinaryArray, out: Array) -> None:
        """Decode pictures of one size into an array `(len(values), *shape)`.

        Raises:
            ImportError, ValueError, OSError: as `decode`.
        """
        _check_installed()
        import simplejpeg

        assert self.size is not None
        is_right = self.layout == "HWC" and out.flags.c_contiguous and math.prod(self.size) <= self.max_pixels
        as_it_is = self.size if is_right else None
        frame_of = self._frames()
        for raw, row in zip(_rows(values), out, strict=True):
            frame = frame_of(raw)
            if frame is not None and frame == as_it_is:
                # Decoded where the batch will be: a copy of 150 kB takes 13 µs.
                found = simplejpeg.decode_jpeg(raw, _COLORSPACES[self.mode], buffer=row)
                if found.shape != row.shape:
                    raise ValueError(f"a JPEG whose header says {row.shape} has pixels of {found.shape}")
                continue
            picture = self._picture(raw, frame)
            row[...] = _planes(picture) if self.layout == "CHW" else picture

    def _frames(self) -> Callable[[memoryview], tuple[int, int] | None]:
        """Reads height and width of a JPEG that simplejpeg can decode; None for whatever Pillow must decode."""
        return _JpegFrames().read if self.mode in _COLORSPACES else _no_frame

    def _picture(self, raw: memoryview, frame: tuple[int, int] | None) -> Array:
        """One picture as `(height, width, channels)`."""
        if frame is None:
            return self._with_pillow(raw)
        import simplejpeg

        self._check_pixels(*frame)
        smallest = (0, 0) if self.size is None else self._reached(*frame)
        picture: Array = simplejpeg.decode_jpeg(
            raw, _COLORSPACES[self.mode], min_height=smallest[0], min_width=smallest[1], min_factor=2
        )
        return picture if self.size is None or picture.shape[:2] == self.size else self._resized(picture)

    def _with_pillow(self, raw: memoryview) -> Array:
        import PIL
        import PIL.Image
        import PIL.ImageOps

        try:
            # Only these plug-ins of Pillow's: others start programs.
            opened = PIL.Image.open(io.BytesIO(raw), formats=_FORMATS)
        except PIL.UnidentifiedImageError:
            raise ValueError("the bytes are no JPEG, PNG, WebP, TIFF or BMP") from None
        except PIL.Image.DecompressionBombError:
            # Pillow's own limit.
            most = 2 * (PIL.Image.MAX_IMAGE_PIXELS or 0)
            limit = f"max_pixels={self.max_pixels:,}" if self.max_pixels <= most else f"{most:,}, which Pillow refuses"
            raise ValueError(f"a picture of too many pixels, more than {limit}") from None
        with opened as picture:
            # Cameras put a second picture behind a JPEG (MPO); the first is the photograph.
            if picture.format != "MPO" and getattr(picture, "n_frames", 1) != 1:
                raise ValueError(f"a {picture.format} of {picture.n_frames} frames; only single pictures are decoded")
            self._check_pixels(picture.height, picture.width)
            if self.size is not None and picture.format in ("JPEG", "MPO"):
                height, width = self._reached(picture.height, picture.width)
                side = max(height, width)
                # Before it is turned upright its sides may be exchanged.
                picture.draft(None, (side, side))
            upright = PIL.ImageOps.exif_transpose(picture)
            array = np.asarray(_converted(upright, self.mode))
        array = array.reshape(*array.shape[:2], _CHANNELS[self.mode])
        return array if self.size is None or array.shape[:2] == self.size else self._resized(array)

    def _check_pixels(self, height: int, width: int) -> None:
        if not height * width:
            raise ValueError(f"a picture of {width:,} × {height:,} pixels")
        if height * width > self.max_pixels:
            raise ValueError(f"a picture of {width:,} × {height:,} pixels, more than max_pixels={self.max_pixels:,}")

    def _reached(self, height: int, width: int) -> tuple[int, int]:
        """The size that a picture must have, at least, before it is brought to `size`."""
        assert self.size is not None
        if self.fit == "stretch":
            return self.size
        factor = max(self.size[0] / height, self.size[1] / width)
        return max(1, round(height * factor)), max(1, round(width * factor))

    def _resized(self, picture: Array) -> Array:
        import PIL.Image

        assert self.size is not None
        height, width = picture.shape[:2]
        box: tuple[float, float, float, float] = (0, 0, width, height)
        if self.fit == "crop":
            factor = max(self.size[0] / height, self.size[1] / width)
            top, left = (height - self.size[0] / factor) / 2, (width - self.size[1] / factor) / 2
            box = (max(0, left), max(0, top), min(width, width - left), min(height, height - top))
        grey = picture.shape[2] == 1
        source = PIL.Image.fromarray(picture[:, :, 0] if grey else picture)
        if source.mode == "I;16":
            # Pillow resizes 16 bits only as 32.
            source = source.convert("I")
        resized: Array = np.asarray(source.resize(self.size[::-1], PIL.Image.Resampling.BILINEAR, box=box))
        return np.ascontiguousarray(resized, self.dtype).reshape(*self.size, picture.shape[2])


def _rows(values: pa.LargeBinaryArray) -> Iterator[memoryview]:
    """The bytes of each row, where they are."""
    if not len(values):
        return
    _, offsets, data = values.buffers()
    edges = np.frombuffer(offsets, np.int64, len(values) + 1, 8 * values.offset).tolist()
    raw = memoryview(data or b"").cast("B")
    for start, stop in itertools.pairwise(edges):
        yield raw[start:stop]


class _JpegFrames:
    """Reads the headers of JPEGs. Most are as the one before, which takes a tenth of the time to see."""

    def __init__(self) -> None:
        self._size = 0
        self._header = b""
        self._frame: tuple[int, int] | None = None

    def read(self, raw: memoryview) -> tuple[int, int] | None:
        """As `_jpeg_frame`."""
        header = raw[: self._size].tobytes()
        if header != self._header or not header:
            self._frame, size = _jpeg_frame(raw)
            # A colour profile may fill many segments, which take longer to compare than to skip.
            self._size = size if size <= _COMPARED_BYTES else 0
            self._header = raw[: self._size].tobytes()
        return self._frame


def _no_frame(raw: memoryview) -> None:  # noqa: ARG001
    return None


def _jpeg_frame(raw: memoryview) -> tuple[tuple[int, int] | None, int]:
    """Height and width by the segments before a JPEG's pixels, and how many bytes say so.

    None if the bytes are no JPEG, or one that must be turned upright or has not the numbers that simplejpeg decodes:
    one or three of 8 bits for each pixel. It takes 2 µs; simplejpeg's own look takes as long and does not know EXIF.
    """
    if raw[:3] != _JPEG:
        return None, 0
    place, last, frame = 2, len(raw) - 10, None
    while place <= last:
        marker, length = struct.unpack_from(_SEGMENT, raw, place)
        if marker == _START_OF_SCAN:
            return frame, place + 10
        if marker < _START_OF_FRAME:
            return None, 0
        if marker <= _START_OF_FRAME + 2:
            bits, height, width, numbers = struct.unpack_from(_FRAME, raw, place + 4)
            frame = (height, width) if bits == 8 and numbers in (1, 3) else None
        elif marker == _APP1 and raw[place + 4 : place + 10] == _EXIF:
            return None, 0
        place += 2 + length
    return None, 0


def _planes(picture: Array) -> Array:
    planes: Array = picture.transpose(2, 0, 1)
    return planes


def _converted(picture: Any, mode: str) -> Any:
    """A picture of Pillow's in a mode, as `Image` states the rules."""
    import PIL.Image

    is_deep = picture.mode.startswith("I")
    # Pillow has 16 bits as 32 now and then.
    least, most = picture.getextrema() if picture.mode == "I" else (0, 0)
    if picture.mode == "F" or least < 0 or most >= 1 << 16:
        raise ValueError("a picture of 32 bits; only 8 and 16 are decoded, and NumPy() reads arrays of numpy.save")
    if mode == "I;16":
        if is_deep:
            return np.asarray(picture).astype(np.uint16)
        return np.asarray(picture.convert("L")).astype(np.uint16) * 257
    if is_deep:
        # Pillow itself would cut off what is above 255.
        picture = PIL.Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if picture.mode == "P" and mode != "RGBA":
        picture = picture.convert("RGBA" if "transparency" in picture.info else "RGB")
    return picture if picture.mode == mode else picture.convert(mode)


def _check_installed() -> None:
    try:
        import PIL.Image  # noqa: F401
        import simplejpeg  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"Image() needs Pillow and simplejpeg: pip install 'spark-tensor-converter[images]' ({error})"
        ) from error
