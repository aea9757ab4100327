"""Networks behind one face: ZeroMQ in real time, plain and with keys, and the simulated one in virtual time."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import pytest

import bus.ways
import bus.zeromq
from bus.message import Lane
from bus.security import ClusterKey, make_key
from bus.simulated import Link, SimulatedNetwork, SimulatedTransport
from bus.transport import Transport
from bus.virtual_time import run as run_in_virtual_time
from bus.zeromq import ZeroMQTransport
from tests.bus.running import run as run_in_real_time
from tests.support.ports import free_port

QUEUED = 10
"""Messages that may wait for a peer in these tests, on each lane."""


class Place(Protocol):
    """Where transports live."""

    def join(self, name: str, epoch: int, *, like: Transport | None = None) -> Transport:
        """A transport; ``like``: found where that one was on the control lane."""

    def kill(self, transport: Transport) -> None:
        """End it as a killed process's ends."""

    async def until(self, condition: Callable[[], bool]) -> None:
        """Within 20 s."""

    async def quiet(self) -> None:
        """Time in which everything arrives that is going to."""


class RealPlace:
    """ZeroMQ on loopback."""

    def __init__(self, key: ClusterKey | None = None, *, unix: bool = True) -> None:
        self._key = key
        self._unix = unix
        self._open: list[ZeroMQTransport] = []

    def join(self, name: str, epoch: int, *, like: Transport | None = None) -> ZeroMQTransport:
        port = int(like.address.control.rsplit(":", 1)[1]) if like is not None else free_port()
        transport = ZeroMQTransport(name, epoch, port=port, key=self._key, unix=self._unix)
        self._open.append(transport)
        return transport

    def kill(self, transport: Transport) -> None:
        assert isinstance(transport, ZeroMQTransport)
        transport._receive = None
        for router in transport._routers.values():
            asyncio.get_running_loop().remove_reader(router.fileno())
        if transport._doors is not None and transport._timer is not None:
            transport._timer.cancel()
            transport._doors.close()
        transport._context.destroy(linger=0)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(20_000):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise TimeoutError("it never came to be")

    async def quiet(self) -> None:
        await asyncio.sleep(0.2)

    def close(self) -> None:
        for transport in self._open:
            transport.close()


class SimulatedPlace:
    """A network without faults."""

    def __init__(self) -> None:
        self._network = SimulatedNetwork(
            seed=1, link=Link(jitter_s=0.001, bulk_bytes_per_s=1e8), queued=dict.fromkeys(Lane, QUEUED)
        )

    def join(self, name: str, epoch: int, *, like: Transport | None = None) -> SimulatedTransport:
        port = int(like.address.control.rsplit(":", 1)[1]) if like is not None else 0
        return self._network.join(name, epoch=epoch, port=port)

    def kill(self, transport: Transport) -> None:
        assert isinstance(transport, SimulatedTransport)
        transport.crash()

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(20_000):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise TimeoutError("it never came to be")

    async def quiet(self) -> None:
        await asyncio.sleep(10)


def _run_for_real(
    scenario: Callable[[Place], Awaitable[None]], key: ClusterKey | None = None, *, unix: bool = True
) -> None:
    async def main() -> None:
        place = RealPlace(key, unix=unix)
        try:
            await scenario(place)
        finally:
            place.close()

    with pytest.MonkeyPatch.context() as patch:
        for module in (bus.zeromq, bus.ways):
            patch.setattr(module, "QUEUED", dict.fromkeys(Lane, QUEUED))
        run_in_real_time(main())


def _run_over_tcp(scenario: Callable[[Place], Awaitable[None]]) -> None:
    _run_for_real(scenario, unix=False)


def _run_with_keys(scenario: Callable[[Place], Awaitable[None]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        _run_for_real(scenario, make_key(Path(directory) / "key"))


def _run_simulated(scenario: Callable[[Place], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(SimulatedPlace())

    run_in_virtual_time(main(), limit_s=3600)


_RUNS: dict[str, Callable[[Callable[[Place], Awaitable[None]]], None]] = {
    "zeromq": _run_for_real,
    "zeromq over tcp": _run_over_tcp,
    "zeromq with keys": _run_with_keys,
    "simulated": _run_simulated,
}


def everywhere(scenario: Callable[[Place], Coroutine[Any, Any, None]]) -> Callable[[str], None]:
    """A test of what every transport keeps."""

    return _test_at(list(_RUNS), scenario)


def without_keys(scenario: Callable[[Place], Coroutine[Any, Any, None]]) -> Callable[[str], None]:
    """A test in which one end holds the loop on which the other would have to let it in."""
    return _test_at([where for where in _RUNS if where != "zeromq with keys"], scenario)


def _test_at(places: list[str], scenario: Callable[[Place], Coroutine[Any, Any, None]]) -> Callable[[str], None]:
    @pytest.mark.parametrize("where", places)
    def test(where: str) -> None:
        _RUNS[where](scenario)

    functools.update_wrapper(test, scenario)
    del test.__wrapped__  # type: ignore[attr-defined]  # pytest would look for the scenario's parameters
    return test
