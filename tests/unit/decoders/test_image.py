"""What `Image` makes of pictures: formats, colours, orientation and sizes by its stated rules, and bad bytes."""

from __future__ import annotations

import builtins
import io
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import converter.decoders.image
from converter import Image, MissingDependencyError, make_parquet_converter

RNG = np.random.default_rng(1)
NOISE = RNG.integers(0, 256, (12, 17, 3), np.uint8)


def smooth(height: int, width: int) -> np.ndarray[Any, Any]:
    """A picture that survives JPEG almost unchanged."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([y * 255 // height, x * 255 // width, (x + y) * 255 // (height + width)], axis=2).astype(np.uint8)


def saved(picture: Any, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    (picture if isinstance(picture, PIL.Image.Image) else PIL.Image.fromarray(picture)).save(stream, kind, **options)
    return stream.getvalue()


def decode(image: Image, *rows: bytes) -> Any:
    return image.decode(pa.array(rows, pa.large_binary()))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "WEBP"])
def test_every_format_gives_its_pixels(kind: str) -> None:
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    [picture] = decode(Image(), saved(NOISE, kind, **options))
    np.testing.assert_array_equal(picture, NOISE)
    np.testing.assert_array_equal(decode(Image(size=(12, 17)), saved(NOISE, kind, **options))[0], NOISE)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("is_progressive", [False, True])
def test_a_jpeg_gives_the_pixels_that_pillow_gives(subsampling: int, is_progressive: bool) -> None:
    data = saved(smooth(40, 50), "JPEG", quality=95, subsampling=subsampling, progressive=is_progressive)
    expected = np.asarray(PIL.Image.open(io.BytesIO(data)))
    for picture in (decode(Image(), data)[0], decode(Image(size=(40, 50)), data)[0]):
        # Both are libjpeg-turbo; builds differ in the rounding of colours.
        assert np.abs(picture.astype(int) - expected).max() <= 2


@pytest.mark.parametrize("size", [(40, 50), (30, 30), None])
def test_what_stood_before_a_jpeg_does_not_matter(size: tuple[int, int] | None) -> None:
    """Headers are compared with the one before, and only what differs is read."""
    turned, exif = PIL.Image.fromarray(smooth(50, 40)), PIL.Image.Exif()
    exif[0x0112] = 6
    profile = {"icc_profile": bytes(5000)}
    rows = [
        saved(smooth(40, 50), "JPEG"), saved(smooth(40, 50)[::-1], "JPEG"), saved(smooth(50, 40), "JPEG"),
        saved(turned, "JPEG", exif=exif), saved(turned, "JPEG"), saved(smooth(40, 50), "JPEG", **profile),
        saved(smooth(50, 40), "JPEG", **profile), saved(smooth(40, 50), "PNG"), saved(smooth(40, 50), "JPEG"),
    ]  # fmt: skip
    image = Image(size=size)
    for found, row in zip(decode(image, *rows), rows, strict=True):
        np.testing.assert_array_equal(found, decode(image, row)[0])


def test_channels_stand_first_if_asked() -> None:
    data = saved(NOISE, "PNG")
    np.testing.assert_array_equal(decode(Image(layout="CHW"), data)[0], NOISE.transpose(2, 0, 1))
    rows = decode(Image(size=(12, 17), layout="CHW"), data, data)
    assert rows.shape == (2, 3, 12, 17)
    assert rows.flags.c_contiguous
    np.testing.assert_array_equal(rows[1], NOISE.transpose(2, 0, 1))


GREY = NOISE[:, :, 0]
ALPHA = np.dstack([NOISE, 255 - NOISE[:, :, 0]])
DEEP = RNG.integers(0, 1 << 16, (12, 17), np.uint16)


@pytest.mark.parametrize(
    ("picture", "mode", "expected"),
    [
        (GREY, "RGB", np.dstack([GREY] * 3)),
        (GREY, "RGBA", np.dstack([GREY] * 3 + [np.full_like(GREY, 255)])),
        (GREY, "L", GREY[:, :, None]),
        (GREY, "I;16", GREY[:, :, None].astype(np.uint16) * 257),
        (NOISE, "RGBA", np.dstack([NOISE, np.full_like(GREY, 255)])),
        (NOISE, "L", np.asarray(PIL.Image.fromarray(NOISE).convert("L"))[:, :, None]),
        (ALPHA, "RGB", NOISE),
        (ALPHA, "RGBA", ALPHA),
        (DEEP, "I;16", DEEP[:, :, None]),
        (DEEP, "L", (DEEP >> 8).astype(np.uint8)[:, :, None]),
        (DEEP, "RGB", np.dstack([(DEEP >> 8).astype(np.uint8)] * 3)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.dtype}{value.shape}",
)
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_whatever_the_file_has_becomes_the_mode(picture: Any, mode: Any, expected: Any, kind: str) -> None:
    [decoded] = decode(Image(mode=mode), saved(picture, kind))
    assert decoded.dtype == expected.dtype
    np.testing.assert_array_equal(decoded, expected)


@pytest.mark.parametrize("mode", ["RGB", "L", "I;16"])
@pytest.mark.parametrize("numbers", [np.int32([[0, 70_000]]), np.int32([[-5, 9]]), np.float32([[0.0, 0.5]])])
def test_numbers_of_32_bits_are_refused_unless_they_fit_into_16(numbers: Any, mode: Any) -> None:
    with pytest.raises(ValueError, match="a picture of 32 bits; only 8 and 16 are decoded"):
        decode(Image(mode=mode), saved(PIL.Image.fromarray(numbers), "TIFF"))
    fits = saved(PIL.Image.fromarray(np.int32([[0, 65_535]])), "TIFF")
    assert decode(Image(mode=mode), fits)[0].max() == (65_535 if mode == "I;16" else 255)


def test_palettes_become_colours_also_with_a_transparent_one() -> None:
    palette = PIL.Image.fromarray(NOISE).quantize(16)
    expected = np.asarray(palette.convert("RGB"))
    np.testing.assert_array_equal(decode(Image(), saved(palette, "PNG"))[0], expected)
    np.testing.assert_array_equal(decode(Image(), saved(palette, "PNG", transparency=3))[0], expected)
    alpha = decode(Image(mode="RGBA"), saved(palette, "PNG", transparency=3))[0][:, :, 3]
    np.testing.assert_array_equal(alpha == 0, np.asarray(palette) == 3)


@pytest.mark.parametrize("mode", ["CMYK", "L"])
def test_a_jpeg_of_another_colour_space_becomes_rgb(mode: str) -> None:
    data = saved(PIL.Image.fromarray(smooth(16, 24)).convert(mode), "JPEG", quality=95)
    expected = np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.abs(decode(Image(), data)[0].astype(int) - expected).max() <= 2
    assert decode(Image(size=(8, 12)), data).shape == (1, 8, 12, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_upright(kind: str, orientation: int) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    picture = smooth(16, 24)
    data = saved(picture, kind, exif=exif, **({"quality": 100, "subsampling": 0} if kind == "JPEG" else {}))
    turned = {
        1: picture, 2: picture[:, ::-1], 3: picture[::-1, ::-1], 4: picture[::-1], 5: picture.transpose(1, 0, 2),
        6: np.rot90(picture, -1), 7: np.rot90(picture, 2).transpose(1, 0, 2), 8: np.rot90(picture, 1),
    }[orientation]  # fmt: skip
    assert np.abs(decode(Image(), data)[0].astype(int) - turned).max() <= 8
    assert np.abs(decode(Image(size=turned.shape[:2]), data)[0].astype(int) - turned).max() <= 8


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_the_shorter_side_is_resized_and_the_centre_cut_out(kind: str) -> None:
    wide = np.zeros((40, 120, 3), np.uint8)
    wide[:, 40:80] = 255
    data = saved(wide, kind, **({"quality": 100, "subsampling": 0} if kind == "JPEG" else {}))
    # The centre is white, but for the blend at its edges; stretched, the black sides stay.
    assert decode(Image(size=(20, 20)), data)[0][:, 1:-1].min() >= 250
    stretched = decode(Image(size=(20, 20), fit="stretch"), data)[0]
    assert stretched[:, :5].max() <= 5
    assert stretched[:, 8:12].min() >= 250


@pytest.mark.parametrize("size", [(10, 10), (100, 50), (7, 300), (1, 1)])
@pytest.mark.parametrize("shape", [(40, 120), (200, 30), (1, 1), (512, 512)])
@pytest.mark.parametrize("fit", ["crop", "stretch"])
def test_every_size_is_reached_from_every_size(size: tuple[int, int], shape: tuple[int, int], fit: Any) -> None:
    for kind in ("JPEG", "PNG"):
        data = saved(smooth(*shape), kind)
        assert decode(Image(size=size, fit=fit), data).shape == (1, *size, 3)


@pytest.mark.parametrize("size", [(60, 60), (100, 110), (30, 200)])
def test_a_large_jpeg_is_about_the_same_as_resized_from_its_full_size(size: tuple[int, int]) -> None:
    data = saved(smooth(400, 600), "JPEG", quality=95)
    full = PIL.Image.open(io.BytesIO(data)).convert("RGB")
    factor = max(size[0] / 400, size[1] / 600)
    top, left = (400 - size[0] / factor) / 2, (600 - size[1] / factor) / 2
    box = (left, top, 600 - left, 400 - top)
    expected = np.asarray(full.resize(size[::-1], PIL.Image.Resampling.BILINEAR, box=box))
    assert np.abs(decode(Image(size=size), data)[0].astype(int) - expected).max() <= 6


def test_16_bits_are_resized_with_all_of_them() -> None:
    deep = np.full((30, 30), 40_000, np.uint16)
    resized = decode(Image(mode="I;16", size=(10, 10)), saved(deep, "PNG"))
    assert resized.dtype == np.uint16
    assert set(resized.reshape(-1).tolist()) == {40_000}


def test_the_second_picture_behind_a_photograph_is_ignored() -> None:
    # As some cameras write it.
    first, second = (PIL.Image.fromarray(smooth(16, size)) for size in (24, 32))
    data = saved(first, "MPO", save_all=True, append_images=[second])
    assert decode(Image(), data)[0].shape == (16, 24, 3)


def bomb(width: int, height: int) -> bytes:
    """The beginning of a PNG that promises many pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def jpeg_bomb() -> bytes:
    data = bytearray(saved(smooth(16, 16), "JPEG"))
    place = data.index(b"\xff\xc0")
    data[place + 5 : place + 9] = struct.pack(">HH", 60_000, 60_000)
    return bytes(data)


def flat_jpeg() -> bytes:
    """A JPEG whose header says a height of 0."""
    data = bytearray(saved(NOISE, "JPEG"))
    place = data.index(b"\xff\xc0")
    data[place + 5 : place + 7] = bytes(2)
    return bytes(data)


GIF = saved(PIL.Image.fromarray(NOISE), "GIF", save_all=True, append_images=[PIL.Image.fromarray(NOISE[::-1])])
PAGES = saved(PIL.Image.fromarray(NOISE), "TIFF", save_all=True, append_images=[PIL.Image.fromarray(NOISE[::-1])])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (saved(smooth(40, 50), "JPEG")[:-200], "Premature end of JPEG"),
        (saved(smooth(40, 50), "JPEG")[:300], "."),
        (saved(NOISE, "PNG")[:-200], "truncated|incomplete|broken|Truncated"),
        (b"a text that is called photo.jpg", "no JPEG, PNG, WebP, TIFF or BMP"),
        (b"\xff\xd8\xff and no more", "."),
        (b"", "no JPEG, PNG, WebP, TIFF or BMP"),
        (GIF, "no JPEG, PNG, WebP, TIFF or BMP"),
        (PAGES, "a TIFF of 2 frames; only single pictures"),
        (bomb(60_000, 60_000), "60,000 × 60,000|too many pixels, more than max_pixels=89,000,000"),
        (flat_jpeg(), "a picture of 17 × 0 pixels"),
        (jpeg_bomb(), "60,000 × 60,000 pixels, more than max_pixels=89,000,000"),
    ],
    ids=[
        "cut JPEG",
        "beginning of a JPEG",
        "cut PNG",
        "text",
        "JPEG's mark",
        "empty",
        "GIF",
        "pages",
        "PNG bomb",
        "flat JPEG",
        "bomb",
    ],
)
def test_bytes_that_are_no_picture_are_an_error_that_says_why(data: bytes, said: str) -> None:
    for image in (Image(), Image(size=(8, 8))):
        with pytest.raises((ValueError, OSError, SyntaxError), match=said):
            decode(image, data)


def test_max_pixels_is_the_users(recwarn: pytest.WarningsRecorder) -> None:
    data = saved(NOISE, "PNG")
    with pytest.raises(ValueError, match="17 × 12 pixels, more than max_pixels=100"):
        decode(Image(max_pixels=100), data)
    assert decode(Image(max_pixels=12 * 17), data)[0].shape == (12, 17, 3)
    with pytest.raises(ValueError, match="too many pixels, more than 178,956,970, which Pillow refuses"):
        decode(Image(max_pixels=10**11), bomb(60_000, 60_000))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "YUV"}, "mode must be one of RGB, RGBA, L, I;16, got 'YUV'"),
        ({"fit": "zoom"}, "fit must be one of crop, stretch"),
        ({"layout": "NCHW"}, "layout must be one of HWC, CHW"),
        ({"size": 224}, r"size must be \(height, width\)"),
        ({"size": (224, 0)}, r"size must be \(height, width\)"),
        ({"size": (224.0, 224)}, r"size must be \(height, width\)"),
        ({"max_pixels": 0}, "max_pixels must be a whole number of at least 1"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Image(**options)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_missing_library_is_named_with_its_extra(
    on_error: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"x": [saved(NOISE, "PNG")]}), tmp_path / "part.parquet")
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "simplejpeg":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependencyError, match=r"spark-tensor-converter\[images\]"):
        make_parquet_converter(tmp_path, decode={"x": Image(on_error=on_error)}).head()


def test_it_travels_by_value() -> None:
    """As to executors, which need not have this package: nothing of the module may refuse to be pickled."""
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(converter.decoders.image)
    try:
        assert pickle.loads(cloudpickle.dumps(Image(size=(2, 3)))).shape == (2, 3, 3)
    finally:
        cloudpickle.unregister_pickle_by_value(converter.decoders.image)
