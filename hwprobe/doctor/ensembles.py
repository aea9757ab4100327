"""ZooKeeper servers, asked one by one with the command ``srvr`` (four letters, no session).

Invariant: every server is waited for at most ``ANSWER_S`` a try; nothing is written.

Source: the ZooKeeper administrator's guide, "The Four Letter Words".
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence

import msgspec

from hwprobe.doctor.findings import Examined, Unable

ANSWER_S = 3.0
TRIES = 5
SLOW_S = 0.1
REFUSED_WORD = "not in the whitelist"


class Answer(msgspec.Struct, frozen=True):
    """What one server said, in the least time of several tries."""

    text: str
    took_s: float
    failure: str = ""  # refused, no answer, ... instead


def look(ensembles: Sequence[str], *, tls: bool = False) -> Examined:
    """``ensembles``: each as ``host:port,host:port``. Raises ``Unable`` where there are none, or they speak TLS."""
    if not ensembles:
        raise Unable("the store is embedded, or none was named (--store zk://HOST:PORT)")
    if tls:
        raise Unable("the servers speak TLS, in which there is no srvr command; see store")
    examined = Examined()
    for ensemble in ensembles:
        servers = ensemble.split(",")
        serving = sum(_server(server, examined) for server in servers)
        if 0 < serving < len(servers) and serving <= len(servers) // 2:
            examined.error(
                ensemble,
                f"{serving} of {len(servers)} servers serve",
                "there is no majority: the ensemble takes no changes",
                "start the servers that are down",
            )
    return examined


def _server(server: str, examined: Examined) -> bool:
    """Whether it serves."""
    answer = ask(server)
    mode = re.search(r"^Mode: (\w+)", answer.text, re.MULTILINE)
    if answer.failure == "refused":
        examined.error(
            server,
            "the connection is refused",
            "no server runs there",
            "start it; if it was running, its log says why it ended",
        )
    elif answer.failure:
        examined.error(
            server,
            f"no answer to srvr within {ANSWER_S:g} s ({answer.failure})",
            "the server hangs (a long garbage collection, a disk that does not answer, a stopped process), or a "
            "firewall drops what is sent to it",
            "look at its load, its garbage collection log and the disk of its dataLogDir; start it again",
        )
    elif REFUSED_WORD in answer.text:
        examined.note(f"{server}: does not say (4lw.commands.whitelist)")
        return True
    elif mode is None:
        examined.error(
            server,
            f"it answers: {' '.join(answer.text.split())[:100] or 'nothing'}",
            "the server is not serving: it has no majority, or has not caught up with its leader",
            "look at the other servers of its ensemble and at its log",
        )
    elif answer.took_s > SLOW_S:
        examined.warning(
            server,
            f"the fastest of {TRIES} answers took {1000 * answer.took_s:.0f} ms, expected at most "
            f"{1000 * SLOW_S:g} ms ({mode[1]}{_own_view(answer.text)})",
            "the server is overloaded, starved of memory (garbage collection), on a busy disk, or far away",
            "give it a disk of its own for dataLogDir and a heap that fits into memory; keep it near the coordinators",
        )
    else:
        examined.note(f"{server}: {mode[1]}, {1000 * answer.took_s:.1f} ms{_own_view(answer.text)}")
    return mode is not None


def _own_view(text: str) -> str:
    found = re.search(r"^Latency min/avg/max: (\S+)", text, re.MULTILINE)
    return "" if found is None else f"; its own requests took {found[1]} ms (min/avg/max)"


def ask(server: str) -> Answer:
    """The best of several tries; the first failure ends it."""
    best = Answer("", float("inf"))
    for _ in range(TRIES):
        started = time.monotonic()
        text, failure = _srvr(server)
        if failure:
            return Answer("", 0.0, failure)
        best = min(best, Answer(text, time.monotonic() - started), key=lambda answer: answer.took_s)
    return best


def _srvr(server: str) -> tuple[str, str]:
    host, _, port = server.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S) as connection:
            connection.sendall(b"srvr")
            said = bytearray()
            while piece := connection.recv(4096):
                said += piece
            return said.decode(errors="replace"), ""
    except ConnectionRefusedError:
        return "", "refused"
    except TimeoutError:
        return "", "silent"
    except OSError as error:
        return "", error.strerror or str(error)
