"""A grpc.aio bidirectional stream over TCP, with msgspec as its serializer.

python -m benchmarks.bus.grpc_side [server]
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import msgspec

from benchmarks.bus.common import BURST, Count, Question, Sample, answer

METHOD = "/benchmark.Echo/talk"


class Message(msgspec.Struct, frozen=True):
    """A struct to echo, one to count, or the question how many came."""

    what: str
    sample: Sample | None = None
    count: Count | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


async def talk(messages: AsyncIterator[Message], context: Any) -> AsyncIterator[Message]:
    """The answering side."""
    count = 0
    async for message in messages:
        if message.what == "once":
            count += 1
        else:
            yield message if message.what == "echo" else Message("count", count=Count(count))


async def serve() -> None:
    """Until standard input ends."""
    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(talk, _decode, _encode)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("benchmark.Echo", {"talk": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


async def call(channel: Any) -> Any:
    return channel.stream_stream(METHOD, _encode, _decode)()


async def round_trip(stream: Any, count: int) -> list[float]:
    seconds = []
    message = Message("echo", Sample())
    for _ in range(count):
        start = time.perf_counter()
        await stream.write(message)
        await stream.read()
        seconds.append(time.perf_counter() - start)
    return seconds


async def one_way(stream: Any, count: int) -> list[float]:
    message = Message("once", Sample())
    start = time.perf_counter()
    for _ in range(count // BURST):
        for _ in range(BURST):
            await stream.write(message)
        await stream.write(Message("count"))
        await stream.read()
    return [time.perf_counter() - start]


async def open_channel(port: int) -> Any:
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}")


async def close(channel: Any) -> None:
    await channel.close()


def main() -> None:
    if len(sys.argv) > 1:
        asyncio.run(serve())
        return
    words = [sys.executable, "-m", "benchmarks.bus.grpc_side", "server"]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if server.stdout is None or server.stdin is None:
        raise RuntimeError("started without pipes")
    port = int(server.stdout.readline())
    with asyncio.Runner() as runner:
        channel = runner.run(open_channel(port))
        stream = runner.run(call(channel))
        trips: Question = lambda count: runner.run(round_trip(stream, count))  # noqa: E731
        ways: Question = lambda count: runner.run(one_way(stream, count))  # noqa: E731
        answer({"round_trip": trips, "one_way": ways})
        runner.run(close(channel))
    server.stdin.close()
    server.wait(10)


if __name__ == "__main__":
    main()
