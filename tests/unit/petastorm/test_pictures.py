"""Pictures are written and read as OpenCV does it, without OpenCV."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
import PIL.Image
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from converter.petastorm.pictures import decode, decode_column, encode

ROWS, COLUMNS = np.mgrid[:3, :4]
RGB = np.stack([COLUMNS * 60, ROWS * 90, COLUMNS * 20 + ROWS * 30], -1).astype(np.uint8)
DEEP = RGB.astype(np.uint16) << 8 | RGB[::-1, ::-1]
PICTURES = [RGB, RGB[:, :, 0], DEEP, DEEP[:, :, 1]]
# cv2.imencode(".png", …) of OpenCV 4.10.
WRITTEN_BY_OPENCV = [
    (
        (
            "iVBORw0KGgoAAAANSUhEUgAAAAQAAAADCAIAAAA7ljmRAAAAJUlEQVQIHQXBQQEAIACEMK4Db5OQxJwGdBsQhuG4JwzD8QrD8ANJswQ8xu9Q"
            "ZgAAAABJRU5ErkJggg=="
        ),
        RGB,
    ),
    (
        (
            "iVBORw0KGgoAAAANSUhEUgAAAAQAAAADEAIAAABrBuXSAAAAOklEQVQIHQXBQQHAQAwCwY0H3qcEJVFSYZGAHER0ZjiOzwHVAdUBdbjdtw6o"
            "DqgOqMMdtgOqA6oD6g9tbheklJgIeAAAAABJRU5ErkJggg=="
        ),
        DEEP,
    ),
    (
        (
            "iVBORw0KGgoAAAANSUhEUgAAAAQAAAADEAAAAADBDy1ZAAAAHklEQVQIHQXBAQEAAACCoPrl7CY4LGiGiM0QsRkiHpAtCyAdLlPUAAAAAElF"
            "TkSuQmCC"
        ),
        DEEP[:, :, 0],
    ),
]


def pillow_file(picture: Any, file_format: str, **options: Any) -> bytes:
    sink = io.BytesIO()
    image = picture if isinstance(picture, PIL.Image.Image) else PIL.Image.fromarray(picture)
    image.save(sink, file_format, **options)
    return sink.getvalue()


def noisy(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png_file(picture: np.ndarray[Any, Any], filters: list[int], interlacing: int = 0) -> bytes:
    """A PNG with these filters, made byte by byte as its definition says."""
    height, width = picture.shape[:2]
    rows = picture.astype(picture.dtype.newbyteorder(">")).view(np.uint8).reshape(height, -1).astype(int)
    step = rows.shape[1] // width
    filtered, above = b"", np.zeros(rows.shape[1], int)
    for number, row in enumerate(rows):
        kind = filters[number % len(filters)]
        left = np.concatenate((np.zeros(step, int), row[:-step]))
        corner = np.concatenate((np.zeros(step, int), above[:-step]))
        near = [abs(above - corner), abs(left - corner), abs(left + above - 2 * corner)]
        paeth = np.where((near[0] <= near[1]) & (near[0] <= near[2]), left, np.where(near[1] <= near[2], above, corner))
        predicted = [0 * row, left, above, (left + above) // 2, paeth][kind]
        filtered += bytes([kind]) + ((row - predicted) % 256).astype(np.uint8).tobytes()
        above = row
    packed = zlib.compress(filtered)
    header = struct.pack(">IIBBBBB", width, height, 8 * picture.itemsize, 2 * (picture.ndim == 3), 0, 0, interlacing)
    parts = [chunk(b"IHDR", header), chunk(b"tEXt", b"a\0b"), chunk(b"IDAT", packed[:5]), chunk(b"IDAT", packed[5:])]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


def assert_equal(decoded: Any, picture: Any) -> None:
    assert decoded.dtype == picture.dtype
    np.testing.assert_array_equal(decoded, picture)
    assert decoded.flags.c_contiguous
    assert decoded.flags.writeable


@given(
    picture=arrays_of.arrays(
        st.sampled_from(["uint8", "uint16"]), st.sampled_from([(1, 1), (3, 5), (1, 4, 3), (5, 1, 3), (6, 7, 3)])
    )
)
def test_a_png_is_exact(picture: Any) -> None:
    assert_equal(decode(encode(picture, "png", 80)), picture)
    assert_equal(decode(encode(picture[::-1], "png", 80)), picture[::-1])


@pytest.mark.parametrize("picture", [RGB, RGB[:, :, 0], DEEP[:, :, 1]])
def test_our_png_is_one_for_pillow_too(picture: Any) -> None:
    np.testing.assert_array_equal(np.asarray(PIL.Image.open(io.BytesIO(encode(picture, "png", 80)))), picture)


@pytest.mark.parametrize(("text", "picture"), WRITTEN_BY_OPENCV)
def test_what_opencv_wrote_is_read(text: str, picture: Any) -> None:
    assert_equal(decode(base64.b64decode(text)), picture)


@pytest.mark.parametrize("filters", [[0], [1], [2], [3], [4], [0, 1, 2], [2, 1, 0], [4, 3, 2, 1, 0]])
@pytest.mark.parametrize("picture", PICTURES)
def test_each_filter_of_a_png_is_undone(filters: list[int], picture: Any) -> None:
    assert_equal(decode(png_file(picture, filters)), picture)


@pytest.mark.parametrize("picture", PICTURES[:3])
@pytest.mark.parametrize("file_format", ["PNG", "BMP", "TIFF"])
def test_what_pillow_wrote_is_read(picture: Any, file_format: str) -> None:
    if picture is DEEP:
        picture = DEEP[:, :, 0]
        file_format = "PNG"
    assert_equal(decode(pillow_file(picture, file_format)), picture)


def test_palettes_become_rgb_and_two_tones_grey() -> None:
    palette = PIL.Image.fromarray(RGB).quantize(16)
    assert_equal(decode(pillow_file(palette, "PNG")), np.asarray(palette.convert("RGB")))
    tones = PIL.Image.fromarray(RGB[:, :, 0]).convert("1")
    assert_equal(decode(pillow_file(tones, "PNG")), np.asarray(tones).astype(np.uint8) * 255)


@pytest.mark.parametrize(
    ("image", "options"),
    [
        (PIL.Image.fromarray(RGB).convert("RGBA"), {}),
        (PIL.Image.fromarray(RGB[:, :, 0]).convert("LA"), {}),
        (PIL.Image.fromarray(RGB), {"transparency": (1, 2, 3)}),
        (PIL.Image.fromarray(RGB).quantize(16), {"transparency": 3}),
    ],
)
def test_a_picture_with_transparency_is_refused(image: Any, options: Any) -> None:
    with pytest.raises(ValueError, match=r"Unexpected image dimensions.*\(3, 4, 4\)"):
        decode(pillow_file(image, "PNG", **options))


@pytest.mark.parametrize("file_format", ["PNG", "JPEG"])
def test_no_picture_is_turned(file_format: str) -> None:
    exif = PIL.Image.Exif()
    exif[0x112] = 6
    assert decode(pillow_file(RGB, file_format, exif=exif)).shape == RGB.shape


@pytest.mark.parametrize("shape", [(48, 64), (48, 64, 3)])
def test_a_jpeg_of_more_quality_is_nearer_to_the_picture(shape: tuple[int, ...]) -> None:
    large = noisy(shape)
    errors = []
    for quality in (5, 60, 100):
        decoded = decode(encode(large, "jpeg", quality))
        assert decoded.shape == large.shape
        assert decoded.dtype == np.uint8
        errors.append(np.abs(decoded.astype(int) - large).mean())
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 60


def test_a_jpeg_keeps_a_quarter_of_the_colours_and_rgb_is_rgb() -> None:
    red = np.zeros((16, 16, 3), np.uint8)
    red[:, :, 0] = 200
    encoded = encode(red, "jpeg", 90)
    assert simplejpeg.decode_jpeg_header(encoded)[2:] == ("YCbCr", "420")
    assert np.abs(decode(encoded).astype(int) - red).max() < 5


def test_four_inks_become_the_colours_that_opencv_shows() -> None:
    inks = PIL.Image.fromarray(np.tile(np.array([60, 120, 30], np.uint8), (8, 8, 1))).convert("CMYK")
    # cv2.imdecode(…, IMREAD_UNCHANGED) has [59 119 30] here, up to what JPEG loses.
    assert np.abs(decode(pillow_file(inks, "JPEG", quality=100)).astype(int) - [59, 119, 30]).max() <= 2


def test_a_jpeg_that_was_cut_shows_what_there_is() -> None:
    large = noisy((48, 64))
    encoded = encode(large, "jpeg", 90)
    decoded = decode(encoded[: len(encoded) * 3 // 4])
    assert decoded.shape == large.shape
    assert np.abs(decoded[:8].astype(int) - large[:8]).mean() < 20
    assert len(np.unique(decoded[-8:])) == 1


def test_a_picture_is_decoded_where_it_belongs_if_it_fits() -> None:
    for encoded in (encode(RGB, "png", 80), encode(RGB, "jpeg", 80), pillow_file(RGB, "BMP")):
        place = np.zeros_like(RGB)
        assert decode(encoded, place) is place
        np.testing.assert_array_equal(place, decode(encoded))
        other = np.zeros((9, 9, 3), np.uint8)
        assert decode(encoded, other) is not other


def test_pictures_of_one_kind_are_one_array() -> None:
    column = decode_column([encode(RGB, "png", 80), encode(RGB[::-1], "png", 80)])
    np.testing.assert_array_equal(column, np.stack([RGB, RGB[::-1]]))


@pytest.mark.parametrize("other", [RGB[:2], RGB[:, :, 0], DEEP, None])
def test_pictures_of_several_kinds_are_objects(other: Any) -> None:
    pictures = [RGB, other, RGB]
    column = decode_column([None if picture is None else encode(picture, "png", 80) for picture in pictures])
    assert column.shape == (3,)
    for decoded, picture in zip(column, pictures, strict=True):
        np.testing.assert_array_equal(decoded, picture)


def test_a_column_without_rows_has_none() -> None:
    assert decode_column([]).shape == (0,)


GOOD = encode(RGB, "png", 80)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"bogus", GOOD[:8], GOOD[:30], GOOD[:60], GOOD[:50] + b"\0" + GOOD[51:], GOOD.replace(b"IHDR", b"IHDX"),
        GOOD[:16] + b"\x7f\xff\xff\xff\x7f\xff\xff\xff" + GOOD[24:], GOOD[:16] + b"\0\0\0\5" + GOOD[20:],
        encode(RGB, "jpeg", 80)[:100], b"\xff\xd8\xff", pillow_file(RGB, "GIF"),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_refused(raw: bytes) -> None:
    with pytest.raises((ValueError, OSError)):
        decode(raw)


@pytest.mark.parametrize(
    ("picture", "image_codec", "match"),
    [
        (np.zeros(10, np.uint8), "png", "Supported dimensions"),
        (np.zeros((10, 10, 2), np.uint8), "png", "Supported dimensions"),
        (np.zeros((2, 2, 2, 2), np.uint8), "png", "Supported dimensions"),
        (np.zeros((0, 10), np.uint8), "png", "10 × 0 pixels"),
        (np.zeros((2, 2), np.float32), "png", "only uint8 or uint16"),
        (np.zeros((2, 2), np.uint16), "jpeg", "only uint8"),
        (np.zeros((2, 2, 3), np.uint16), "tiff", "only as png"),
        (np.zeros((2, 2), np.uint8), "jp2", "image_codec='jp2' is unknown"),
    ],
)
def test_a_picture_without_a_file_form_is_refused(picture: Any, image_codec: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        encode(picture, image_codec, 80)


@pytest.mark.parametrize("image_codec", ["bmp", "tiff", "webp"])
def test_other_formats_are_exact_too(image_codec: str) -> None:
    assert_equal(decode(encode(RGB, image_codec, 80)), RGB)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "simplejpeg", None)
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    assert_equal(decode(GOOD), RGB)
    for raw in (b"\xff\xd8\xff", b"bogus"):
        with pytest.raises(ImportError, match=r"spark-tensor-converter\[images\]"):
            decode(raw)
