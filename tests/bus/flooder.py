"""``python -m tests.bus.flooder ENDPOINT garbage|jobs|loads``: sends as fast as it can, until it is killed."""

import os
import sys

import msgspec
import zmq

from bus.message import Header, Kind, NodeAddress


def frames(what: str) -> list[bytes]:
    sender = NodeAddress("flooder", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", 1)
    header = msgspec.msgpack.encode(Header(kind=Kind.TELL, to="slow", sender=sender, to_epoch=0, id=0, type="Job"))
    if what == "garbage":
        return [os.urandom(100), os.urandom(1000)]
    if what == "jobs":
        return [header, msgspec.msgpack.encode({"number": 1})]
    return [header, msgspec.msgpack.encode({"number": 1}), bytes(1 << 20)]


def main() -> None:
    endpoint, what = sys.argv[1:]
    socket = zmq.Context().socket(zmq.DEALER)
    socket.routing_id = b"flooder/1"
    socket.connect(endpoint)
    message = frames(what)
    while True:
        socket.send_multipart(message)


if __name__ == "__main__":
    main()
