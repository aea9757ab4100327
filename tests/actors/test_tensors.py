"""Torch's tensors in messages: exact, without copies, and nothing malformed gets through."""

import subprocess
import sys
import warnings
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import bus.zeromq
from actors.core import Actor, Node, handler
from actors.tensors import Tensor
from bus.codec import INLINE_BYTES, Decoder, Encoder
from bus.message import DecodeError, Lane

DTYPES = [
    torch.bool,
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.float32, torch.float64),
    *(torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
]


class Box(msgspec.Struct):
    data: Tensor


class Array(msgspec.Struct):
    data: np.ndarray


class Facts(msgspec.Struct):
    dtype: str
    first: float


def round_trip(tensor: Tensor) -> Tensor:
    return Decoder(Box).decode(Encoder().encode(Box(tensor))).data


def bits(tensor: Tensor) -> list[int]:
    return list(bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (60, 70)], ids=str)
def test_every_kind_of_element_arrives_with_its_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = round_trip(tensor)
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert bits(found) == bits(tensor)


@pytest.mark.parametrize(
    ("dtype", "one_and_a_half"),
    [(torch.bfloat16, b"\xc0\x3f"), (torch.float8_e4m3fn, b"\x3c"), (torch.float8_e5m2, b"\x3e")],
    ids=str,
)
def test_short_floats_are_on_the_wire_as_their_formats_say(dtype: torch.dtype, one_and_a_half: bytes) -> None:
    """Sign, exponent and fraction by hand: 1.5 is 1.1 in binary, times 2 to the power of 0."""
    (body,) = Encoder().encode(Box(torch.tensor([1.5]).to(dtype)))
    name = str(dtype).removeprefix("torch.")
    assert msgspec.msgpack.decode(body) == {"data": [name, [1], one_and_a_half]}


def test_no_number_is_changed_on_the_way() -> None:
    """Nor a NaN's payload, minus zero, or the largest."""
    every = torch.arange(65_536, dtype=torch.int32).to(torch.uint16)
    found = round_trip(every.view(torch.bfloat16))
    assert torch.equal(found.view(torch.uint16), every)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(6000)[::2],
        torch.ones(3).expand(1000, 3),
        torch.view_as_complex(torch.ones(4, 2)).conj().imag,
    ],
    ids=["permuted", "strided", "expanded", "negated lazily"],
)
def test_any_view_travels_in_its_own_order(tensor: Tensor) -> None:
    found = round_trip(tensor)
    assert found.is_contiguous()
    assert found.tolist() == tensor.tolist()


def test_what_requires_a_gradient_travels_as_its_values() -> None:
    weight = torch.nn.Parameter(torch.full((40, 40), 2.0))
    for tensor in (weight, weight * 3):
        found = round_trip(tensor)
        assert not found.requires_grad
        assert found.tolist() == tensor.tolist()


def derived() -> Tensor:
    class Derived(Tensor):
        pass

    return torch.zeros(3).as_subclass(Derived)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.zeros(3, device="meta"), r"on meta .*bring it to the CPU first \(\.cpu\(\)\)"),
        (torch.zeros(3, 3).to_sparse(), r"a sparse_coo tensor .*only dense ones travel \(\.to_dense\(\)\)"),
        (torch.zeros(3, dtype=torch.complex64), "torch.complex64 .*what travels is bool, int8"),
        (torch.zeros(3, dtype=torch.float8_e4m3fnuz), "torch.float8_e4m3fnuz"),
        (derived(), "a Derived .*only plain tensors"),
    ],
    ids=["elsewhere", "sparse", "complex", "another float8", "derived"],
)
def test_what_does_not_travel_is_refused_where_it_is_sent(tensor: Tensor, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        Encoder().encode(Box(tensor))


def test_a_quantized_tensor_is_refused_where_it_is_sent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to drop them
        tensor = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match="a quantized tensor"):
        Encoder().encode(Box(tensor))


def test_an_array_and_a_tensor_of_plain_numbers_are_the_same_on_the_wire() -> None:
    for count in (3, 5000):
        tensor = torch.arange(count, dtype=torch.int16)
        frames = Encoder().encode(Box(tensor))
        assert Decoder(Array).decode(frames).data.tolist() == tensor.tolist()
        assert [bytes(f) for f in Encoder().encode(Array(tensor.numpy()))] == [bytes(f) for f in frames]


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_large_tensor_is_sent_from_its_own_memory() -> None:
    tensor = torch.zeros(INLINE_BYTES + 1, dtype=torch.uint8)
    _, frame = Encoder().encode(Box(tensor))
    tensor[7] = 42
    assert frame[7] == 42


def test_a_large_tensor_is_received_in_its_frames_memory_and_may_be_changed_there() -> None:
    body, frame = Encoder().encode(Box(torch.zeros(5_000, dtype=torch.bfloat16)))
    arrived = bytearray(frame)
    found: Tensor = Decoder(Box).decode([body, arrived]).data
    arrived[0:2] = b"\xc0\x3f"
    assert found[0].item() == 1.5
    found[1] = 1.5
    assert arrived[2:4] == b"\xc0\x3f"


def test_what_was_received_in_memory_that_must_not_change_is_copied() -> None:
    body, frame = Encoder().encode(Box(torch.zeros(5_000)))
    arrived = bytes(frame)
    found: Tensor = Decoder(Box).decode([body, arrived]).data
    found.fill_(1.0)
    assert not any(arrived)


def test_elements_across_words_are_copied_to_where_torch_expects_them() -> None:
    body, frame = Encoder().encode(Box(torch.arange(1_000.0)))
    arrived = memoryview(bytearray(b"x" + bytes(frame)))[1:]
    found: Tensor = Decoder(Box).decode([body, arrived]).data
    assert found.data_ptr() % 4 == 0
    assert found.tolist() == [float(n) for n in range(1_000)]


class Keeper(Actor):
    """Looks at what it gets."""

    def __init__(self) -> None:
        self.last: Tensor | None = None

    @handler
    async def take(self, message: Box) -> Facts:
        self.last = message.data
        return Facts(str(message.data.dtype), message.data[0, 0].item())


async def test_a_tensor_goes_from_node_to_node_into_the_memory_of_the_frame_that_zeromq_received() -> None:
    frames: list[memoryview] = []
    async with Node("a") as a, Node("b") as b:
        keeper = Keeper()
        ref = await b.spawn(lambda: keeper, "keeper")
        receive = b._transport._receive  # type: ignore[attr-defined]

        def look(lane: Lane, routing_id: bytes, parts: Any, *, more: bool = False) -> None:
            frames.extend(part for part in parts if isinstance(part, memoryview))
            receive(lane, routing_id, parts, more=more)

        b._transport._receive = look  # type: ignore[attr-defined]
        tensor = torch.full((512, 512), 1.5, dtype=torch.bfloat16)
        facts = await a.ask(ref, Box(tensor), Facts, timeout_s=10, lane=Lane.BULK)
        assert (facts.dtype, facts.first) == ("torch.bfloat16", 1.5)
        assert keeper.last is not None
        start = np.frombuffer(frames[-1], np.uint8).ctypes.data
        assert len(frames[-1]) == tensor.nbytes
        assert keeper.last.data_ptr() == start


async def test_within_a_node_both_ends_share_the_tensor() -> None:
    async with Node("a") as a:
        keeper = Keeper()
        ref = await a.spawn(lambda: keeper, "keeper")
        tensor = torch.zeros(2, 2)
        await a.ask(ref, Box(tensor), Facts, timeout_s=10)
        assert keeper.last is tensor


async def test_a_tensor_beyond_the_bound_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus.zeromq, "MAX_FRAME_BYTES", 1 << 20)
    async with Node("a") as a, Node("b") as b:
        ref = await b.spawn(Keeper, "keeper")
        with pytest.raises(ValueError, match="array of 1048578 bytes: at most 1048576 travel"):
            await a.ask(ref, Box(torch.zeros((1 << 19) + 1, 1, dtype=torch.bfloat16)), Facts, timeout_s=10)


# ---- what is malformed -----------------------------------------------------------------------------------------------

MALFORMED: dict[str, Any] = {
    "complex": ["<c8", [1], b"12345678"],
    "objects": ["|O", [1], b"12345678"],
    "unknown to torch": ["bfloat17", [1], b"12"],
    "named as torch does": ["torch.bfloat16", [1], b"12"],
    "no type": [None, [1], b"1"],
    "more than the bytes": ["bfloat16", [2], b"12"],
    "fewer than the bytes": ["bfloat16", [1], b"1234"],
    "not a multiple": ["bfloat16", [1], b"123"],
    "huge shape": ["float8_e5m2", [2**62], b"1"],
    "shape that overflows": ["bfloat16", [2**40, 2**40], b"12"],
    "huge, and none of it": ["bfloat16", [0, 2**62, 2**62], b""],
    "too many dimensions": ["bfloat16", [1] * 1000, b"12"],
    "negative shape": ["bfloat16", [-1], b"12"],
    "boolean shape": ["bfloat16", [True], b"12"],
    "number as shape": ["bfloat16", 1, b"12"],
    "neither true nor false": ["|b1", [2], b"\x01\x02"],
    "frame that is not there": ["|u1", [1], 1],
    "frame before the first": ["|u1", [1], -1],
    "frame of another size": ["bfloat16", [3], 0],
    "text as data": ["|u1", [1], "1"],
    "nothing as data": ["|u1", [1], None],
    "two parts": ["|u1", [1]],
    "a map": {"a": 1, "b": 2, "c": 3},
    "a number": 7,
}


@pytest.mark.parametrize("tensor", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_tensor_is_a_decode_error(tensor: Any) -> None:
    body = msgspec.msgpack.encode({"data": tensor})
    with pytest.raises(DecodeError):
        Decoder(Box).decode([body, b"12345"])


# ---- without torch ---------------------------------------------------------------------------------------------------


def test_without_the_import_a_tensor_is_refused_and_the_error_says_what_to_import() -> None:
    lines = [
        "import bus.codec, actors.core, sys",
        "assert 'torch' not in sys.modules",
        "import torch",
        "bus.codec.Encoder().encode(torch.zeros(3))",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "TypeError: cannot put a Tensor in a message: import actors.tensors, and it travels" in done.stderr
