"""Plain synchronous pyzmq: a DEALER and a ROUTER over TCP, msgspec for the structs, nothing else.

python -m benchmarks.bus.pyzmq_side [ENDPOINT]      (with one: the answering process)
"""

from __future__ import annotations

import subprocess
import sys
import time

import msgspec
import numpy as np
import zmq

from actors.core.launch import die_with_parent
from benchmarks.bus.common import ANSWER_TIMEOUT_S, BURST, WINDOW, Count, Sample, answer, tensor


def serve(endpoint: str) -> None:
    """Echo structs (``e``), count one-way ones (``o``), say how many (``c``), acknowledge arrays (``t``)."""
    die_with_parent()
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    decode, encode = msgspec.msgpack.Decoder(Sample).decode, msgspec.msgpack.Encoder().encode
    count = 0
    while True:
        frames = socket.recv_multipart(copy=False)
        who, what = frames[0].bytes, frames[1].bytes
        match what:
            case b"e":
                socket.send_multipart([who, encode(decode(frames[2].buffer))])
            case b"o":
                decode(frames[2].buffer)
                count += 1
            case b"c":
                socket.send_multipart([who, encode(Count(count))])
            case b"t":
                np.frombuffer(frames[2].buffer, np.float32)
                socket.send_multipart([who, b""])
            case _:
                return


def main() -> None:
    if len(sys.argv) > 1:
        serve(sys.argv[1])
        return
    words = [sys.executable, "-m", "benchmarks.bus.pyzmq_side", "tcp://127.0.0.1:*"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    if server.stdout is None:
        raise RuntimeError("started without a pipe")
    socket = zmq.Context().socket(zmq.DEALER)
    socket.linger = 1000
    socket.rcvtimeo = int(ANSWER_TIMEOUT_S * 1000)
    socket.connect(server.stdout.readline().strip())
    decode, encode = msgspec.msgpack.Decoder(Sample).decode, msgspec.msgpack.Encoder().encode
    sample, array = Sample(), tensor()

    def round_trip(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            socket.send_multipart([b"e", encode(sample)])
            decode(socket.recv())
            seconds.append(time.perf_counter() - start)
        return seconds

    def one_way(count: int) -> list[float]:
        start = time.perf_counter()
        for _ in range(count // BURST):
            for _ in range(BURST):
                socket.send_multipart([b"o", encode(sample)])
            socket.send_multipart([b"c"])
            socket.recv()
        return [time.perf_counter() - start]

    def tensors(count: int) -> list[float]:
        start = time.perf_counter()
        for sent in range(count):
            if sent >= WINDOW:
                socket.recv()
            socket.send_multipart([b"t", array.data], copy=False)
        for _ in range(min(WINDOW, count)):
            socket.recv()
        return [time.perf_counter() - start]

    answer({"round_trip": round_trip, "one_way": one_way, "tensors": tensors})
    socket.send_multipart([b"end"])
    server.wait(10)


if __name__ == "__main__":
    main()
