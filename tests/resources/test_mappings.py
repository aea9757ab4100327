"""Who decides the mapping of a job, and what happens where nobody can be asked for advice."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from actors.core import Node, Ref
from actors.env.framing import Framing, TextFraming
from actors.env.tokenizers import ByteTokenizer
from actors.policy import Policy
from coordinator.engines import Engines
from coordinator.job import Job, convert
from coordinator.resources import mappings
from coordinator.resources.mappings import mapping_of
from hwprobe.advice import Advisor
from hwprobe.mapping import Declared, Learned, TaskMapping
from tests.support.loops import run


async def made_for(job: Job, warnings: list[str]) -> TaskMapping:
    async with Node("control") as node:
        engines = Engines(node, lambda: [Ref(node.address, "proxy")])
        return await mapping_of(job, node, engines, warn=warnings.append)


def job(mapping: str, policy: Path | None = None) -> Job:
    tree = {"policy": {} if policy is None else {"path": str(policy)}}
    return convert(tree, "job.yaml", [f"rollout.mapping={mapping}", "rollout.max_model_len=512"])


def test_a_job_gets_the_mapping_that_it_asks_for() -> None:
    kinds = {"declared": Declared, "learned": Learned, "advised": Advisor}
    for name, kind in kinds.items():
        warnings: list[str] = []
        assert isinstance(run(made_for(job(name), warnings)), kind)
        assert warnings == []


def test_where_the_tokenizer_cannot_be_read_the_mapping_is_learned_and_that_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    warnings: list[str] = []
    assert isinstance(run(made_for(job("advised", tmp_path), warnings)), Learned)
    assert len(warnings) == 1
    assert "the mapping is learned instead" in warnings[0]
    assert str(tmp_path) in warnings[0]


def test_the_loop_goes_on_while_the_tokenizer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def read(policy: Policy) -> Framing:
        if not may_end.wait(10.0):
            raise OSError("nothing else ran meanwhile")
        return TextFraming(ByteTokenizer())

    monkeypatch.setattr(mappings, "_framing", read)

    async def story() -> None:
        warnings: list[str] = []
        making = asyncio.create_task(made_for(job("advised"), warnings))
        await asyncio.sleep(0.05)
        may_end.set()
        assert (isinstance(await making, Advisor), warnings) == (True, [])

    run(story())
