"""The desk answers while parts of the run are not there yet, and says which."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.core import Node, Ref
from actors.settings import RolloutSettings
from bus.message import CannotListen, RemoteError
from coordinator.commands.finished import _no_more_than_engines_take, _small
from coordinator.desk.messages import DESK, Follow, GetEngines, GetMetrics
from coordinator.job import CoordinatorSettings, Job
from tests.desk.test_orders import place


async def test_metrics_say_which_parts_of_the_run_do_not_answer(tmp_path: Path) -> None:
    async with place(tmp_path) as made, Node("asker") as asker:
        text = (await asker.ask(Ref(made.address, DESK), GetMetrics(), timeout_s=20)).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    parts = {sample.labels["part"]: sample.value for sample in families["rollart_part_up"].samples}
    assert parts == {"proxy": 0, "env": 1}
    assert families["rollart_alpha"].samples[0].value == 1
    (capacity,) = families["rollart_groups_capacity"].samples
    assert capacity.value == 4  # (1 + alpha) * 2 groups


async def test_what_is_not_up_yet_is_named(tmp_path: Path) -> None:
    async with place(tmp_path) as made, Node("asker") as asker:
        desk = Ref(made.address, DESK)
        with pytest.raises(RemoteError, match="the proxy is not up yet"):
            await asker.ask(desk, GetEngines(), timeout_s=20)
        for ticket, words in (("t7", "trajectory t7 does not run"), ("", "there is no env host yet")):
            with pytest.raises(RemoteError, match=words):
                async for _ in asker.stream(desk, Follow(ticket), timeout_s=20):
                    pass


async def test_a_metrics_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=rf"coordinator\.metrics_port: 127\.0\.0\.1:{port}: "):
            async with place(tmp_path, metrics=("127.0.0.1", port)):
                pass


def test_playing_beside_a_run_does_not_claim_the_runs_metrics_port() -> None:
    job = msgspec.structs.replace(Job(), coordinator=CoordinatorSettings(metrics_port=9200))
    assert _small(job, 4).coordinator.metrics_port == 0


def test_playing_asks_no_more_at_once_than_the_engines_take() -> None:
    """What waits in an engine's queue may be lost to its deadline on a slow machine."""
    rollout = RolloutSettings(engines=2, max_sequences=32)
    job = msgspec.structs.replace(Job(), rollout=rollout)
    assert _no_more_than_engines_take(_small(job, 400)).environment.concurrent == 64
    assert _no_more_than_engines_take(_small(job, 9)).environment.concurrent == 9
