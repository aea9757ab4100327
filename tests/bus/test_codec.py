"""Structs and arrays on the wire."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bus.codec import INLINE_BYTES, Decoder, Encoder, dumps, loads
from bus.message import DecodeError

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPES = ["bool", *INTEGERS, "float16", "float32", "float64"]


class Box(msgspec.Struct):
    data: np.ndarray


class Shelf(msgspec.Struct):
    name: str
    boxes: list[Box]
    extra: dict[str, np.ndarray]


def round_trip(data: Any) -> Any:
    return Decoder(Box).decode(Encoder().encode(Box(data))).data


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [3, 5000])
def test_arrays_of_plain_numbers_arrive_as_they_were(dtype: str, count: int) -> None:
    data = np.random.default_rng(0).integers(0, 100, count).astype(dtype)
    found = round_trip(data)
    assert found.dtype == data.dtype
    np.testing.assert_array_equal(found, data)


@pytest.mark.parametrize(
    "data",
    [
        np.array(2.5),
        np.zeros((0, 3), np.float32),
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
        np.arange(4000, dtype=np.int64)[::2],
        np.asfortranarray(np.arange(6000.0).reshape(60, 100)),
    ],
    ids=["0-d", "empty", "transposed", "strided", "fortran"],
)
def test_any_layout_in_memory_travels(data: np.ndarray) -> None:
    found = round_trip(data)
    assert found.shape == data.shape
    np.testing.assert_array_equal(found, data)


def test_big_endian_numbers_arrive_with_their_value() -> None:
    found = round_trip(np.array([1, 256], ">i4"))
    assert found.dtype == np.dtype("<i4")
    assert found.tolist() == [1, 256]


def test_bfloat16_travels_as_its_bits() -> None:
    one_and_minus_two = np.array([0x3F80, 0xC000] * 4096, np.uint16)  # IEEE 754, upper half of float32
    found = round_trip(one_and_minus_two)
    widened = (found.astype(np.uint32) << 16).view(np.float32)
    assert widened[:2].tolist() == [1.0, -2.0]


def test_a_large_array_is_sent_from_its_own_memory() -> None:
    data = np.zeros(INLINE_BYTES + 1, np.uint8)
    _, frame = Encoder().encode(Box(data))
    data[7] = 42
    assert frame[7] == 42


def test_a_large_array_is_received_in_its_frames_memory_and_cannot_be_changed() -> None:
    body, frame = Encoder().encode(Box(np.zeros(10_000, np.uint8)))
    arrived = bytearray(frame)
    found: Any = Decoder(Box).decode([body, arrived]).data
    arrived[7] = 42
    assert found[7] == 42
    assert not found.flags.writeable


def test_a_small_array_travels_inside_the_body() -> None:
    assert len(Encoder().encode(Box(np.zeros(INLINE_BYTES, np.uint8)))) == 1


def test_arrays_are_found_wherever_they_are_nested() -> None:
    shelf = Shelf("s", [Box(np.arange(3000)), Box(np.arange(2))], {"x": np.arange(4000.0), "y": np.array(True)})
    frames = Encoder().encode(shelf)
    assert len(frames) == 3
    found: Shelf = Decoder(Shelf).decode(frames)
    assert [box.data.shape for box in found.boxes] == [(3000,), (2,)]
    np.testing.assert_array_equal(found.extra["x"], np.arange(4000.0))
    assert found.extra["y"].item() is True


@pytest.mark.parametrize(
    "data",
    [
        np.array([{}], object),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array(["2024-01-01"], "datetime64[D]"),
        np.array([1j]),
        np.zeros(2, "i4,f4"),
        np.zeros(2, np.longdouble),
    ],
    ids=lambda data: str(data.dtype),
)
def test_arrays_of_anything_else_are_refused_where_they_are_sent(data: np.ndarray) -> None:
    with pytest.raises(TypeError, match="only plain numbers travel"):
        Encoder().encode(Box(data))


def test_what_is_no_message_is_refused_where_it_is_sent() -> None:
    with pytest.raises(TypeError, match="cannot put a PosixPath in a message"):
        Encoder().encode(Path("/"))


MALFORMED: dict[str, Any] = {
    "object dtype": ["|O", [1], b"12345678"],
    "void dtype": ["|V8", [1], b"12345678"],
    "text dtype": ["<U2", [1], b"12345678"],
    "datetime dtype": ["<M8", [1], b"12345678"],
    "complex dtype": ["<c8", [1], b"12345678"],
    "big-endian dtype": [">i4", [1], b"1234"],
    "structured dtype": ["i4,f4", [1], b"12345678"],
    "no dtype": [None, [1], b"1"],
    "unhashable dtype": [[], [1], b"1"],
    "more than the bytes": ["<i4", [2], b"1234"],
    "fewer than the bytes": ["<i4", [1], b"12345678"],
    "not a multiple": ["<i4", [1], b"123"],
    "huge shape": ["|u1", [2**62], b"1"],
    "shape beyond 64 bits": ["|u1", [2**63], b"1"],
    "shape that overflows": ["|u1", [2**40, 2**40], b"1"],
    "too many dimensions": ["|u1", [1] * 1000, b"1"],
    "negative shape": ["|u1", [-1], b"1"],
    "float shape": ["|u1", [1.0], b"1"],
    "boolean shape": ["|u1", [True], b"1"],
    "number as shape": ["|u1", 1, b"1"],
    "frame that is not there": ["|u1", [1], 1],
    "frame before the first": ["|u1", [1], -1],
    "frame by truth value": ["|u1", [5], False],
    "text as data": ["|u1", [1], "1"],
    "nothing as data": ["|u1", [1], None],
    "list as data": ["|u1", [1], [1]],
    "two parts": ["|u1", [1]],
    "four parts": ["|u1", [1], b"1", 0],
    "a map": {"a": 1, "b": 2, "c": 3},
    "text": "abc",
    "nothing": None,
    "a number": 7,
}


@pytest.mark.parametrize("array", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_array_is_a_decode_error(array: Any) -> None:
    body = msgspec.msgpack.encode({"data": array})
    with pytest.raises(DecodeError):
        Decoder(Box).decode([body, b"12345"])


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [b"\xc1"], [b"\x81\xa4data"], [b"\x91" * 100_000], [msgspec.msgpack.encode({"other": 1})]],
    ids=["no frame", "empty body", "reserved byte", "cut short", "nested deeply", "another struct"],
)
def test_a_malformed_body_is_a_decode_error(frames: list[bytes]) -> None:
    with pytest.raises(DecodeError):
        Decoder(Box).decode(frames)


def test_a_blob_for_a_file_comes_back() -> None:
    shelf = Shelf("s", [Box(np.arange(3000))], {})
    found = loads(dumps(shelf), Shelf)
    np.testing.assert_array_equal(found.boxes[0].data, np.arange(3000))


@pytest.mark.parametrize("blob", [b"", b"\x90", b"\x91\xc0", b"\xc1"])
def test_a_malformed_blob_is_a_decode_error(blob: bytes) -> None:
    with pytest.raises(DecodeError):
        loads(blob, Shelf)
