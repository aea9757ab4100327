"""The real proxy, the cost model and the mapper on virtual time, over simulated engines of two classes."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from actors.env.framing import TextFraming
from actors.env.tokenizers import ByteTokenizer
from actors.proxy.costs import HELD_S
from actors.proxy.messages import Assign, CostsState, DescribeCosts, UndoMapping
from actors.proxy.proxy import LLMProxy
from bus.virtual_time import run
from coordinator.engines import Engines
from coordinator.job import JobError, convert
from coordinator.resources.advisor import EngineAdvisor, NoAnswer
from coordinator.resources.mapper import COST_FILE, Mapper, known_costs
from hwprobe.advice import Advisor
from hwprobe.cost import EFFICIENCY, ModelSize
from hwprobe.costmodel import decode_state
from hwprobe.mapping import Learned, TaskMapping
from tests.scheduling.heat import Fleet, Play, Town, town

CLASSES = {"a20": "H20", "b20": "H20", "a800": "H800"}
GAMES = Play(turns=6, observation=1500, response=4, environment_s=1.0, domain="games")
MATH = Play(turns=1, observation=200, response=800, environment_s=0.2, domain="math")
WRONG = {"games": "H20", "math": "H800"}


async def keep_playing(made: Town, name: str, play: Play) -> None:
    """One after the other, until it is cancelled."""
    number = 0
    while True:
        number += 1
        await made.players.begin(f"{name}.{number}", play)


def begin(made: Town, games: int, math: int) -> None:
    for count, play in ((games, GAMES), (math, MATH)):
        for number in range(count):
            made.node.background(keep_playing(made, f"{play.domain}{number}", play))


async def described(made: Town) -> CostsState:
    return await made.node.ask(made.proxy.ref, DescribeCosts(), timeout_s=30.0)


def engines_of(made: Town) -> Engines:
    return Engines(made.node, lambda: [made.proxy.ref])


def mapper(made: Town, mapping: TaskMapping, file: Path, said: list[str]) -> Mapper:
    return Mapper(made.node, engines_of(made), mapping, declared=WRONG, file=file, say=said.append)


def played_by(made: Town, domain: str, since: float) -> Counter[str]:
    """Hardware class -> turns of a task that were answered since."""
    return Counter(
        CLASSES[engine]
        for trajectory, turns in made.players.engines.items()
        if trajectory.startswith(domain)
        for at, engine in turns
        if at >= since
    )


def test_tasks_that_are_declared_the_wrong_way_round_change_places_until_a_person_says_no(tmp_path: Path) -> None:
    file = tmp_path / COST_FILE

    async def story() -> None:
        said: list[str] = []
        async with town(CLASSES) as made:
            for task, class_ in WRONG.items():
                made.proxy._costs.prefer(task, class_)
            for name in CLASSES:
                await made.serve(name)
            begin(made, games=8, math=12)
            made.node.background(mapper(made, Learned(), file, said).run())
            loop = asyncio.get_running_loop()
            await asyncio.sleep(30.0)
            since = loop.time()
            await asyncio.sleep(10.0)
            assert said
            assert said[0].startswith("mapping 1 (learned): ")
            games, math = (played_by(made, domain, since) for domain in ("games", "math"))
            assert games["H800"] > games["H20"], "of three engines one is an H800"
            assert math["H20"] > 4 * math["H800"]
            assert made.players.wrong == []

            costs = await described(made)
            assert costs.state.tasks["games"].turns == 6
            assert costs.state.tasks["math"].response == 800
            for name in ("H20", "H800"):
                reached = costs.state.classes[name].reached()
                assert reached.compute == pytest.approx(EFFICIENCY[name].compute, rel=0.05)
                assert reached.bandwidth == pytest.approx(EFFICIENCY[name].bandwidth, rel=0.05)
            kept = decode_state(file.read_bytes(), "kept")
            assert set(kept.classes) == {"H20", "H800"}

            for _ in said:
                await made.node.ask(made.proxy.ref, UndoMapping(), timeout_s=30.0)
            orders = len(said)
            since = loop.time() + 2.0
            await asyncio.sleep(10.0)
            assert len(said) == orders, "nothing but a person changes it for a while"
            assert played_by(made, "games", since)["H800"] < played_by(made, "games", since)["H20"]
            assert (await described(made)).held_s == pytest.approx(HELD_S - 10.0, abs=2.0)

    run(story())


def test_a_proxys_successor_begins_with_the_mapping_and_the_hold_of_the_one_before(tmp_path: Path) -> None:
    async def story() -> None:
        said: list[str] = []
        async with town(CLASSES) as made:
            first, second = {"math": {"H20": 1.0, "H800": 0.0}}, {"math": {"H20": 0.0, "H800": 1.0}}
            for shares in (first, second):
                await made.node.ask(made.proxy.ref, Assign(shares, "learned"), timeout_s=30.0)
            await made.node.ask(made.proxy.ref, UndoMapping(), timeout_s=30.0)
            there = [made.proxy.ref]
            engines = Engines(made.node, lambda: there)
            mapped = Mapper(made.node, engines, Learned(), declared=WRONG, file=tmp_path / COST_FILE, say=said.append)
            made.node.background(mapped.run())
            await asyncio.sleep(60.0)
            before = await described(made)
            successor = LLMProxy(CLASSES, {}, failed=lambda error: None)
            successor.fleet = Fleet()
            ref = await made.node.spawn(lambda: successor, "successor", restarts=0)
            await asyncio.sleep(5.0)  # in which there is none
            there[:] = [ref]
            await asyncio.sleep(10.0)
            assert said == ["the proxy's successor goes on with mapping 2: math to H20"]
            after = await made.node.ask(ref, DescribeCosts(), timeout_s=30.0)
            assert (after.shares, after.number, len(after.orders)) == (first, 2, 1)
            assert after.held_s == pytest.approx(before.held_s - 15.0, abs=0.1)

    run(story())


def test_an_engine_of_the_run_is_asked_for_advice_and_what_it_says_is_not_believed(tmp_path: Path) -> None:
    """It answers in tokens that depend on the seed alone."""

    async def story() -> None:
        said: list[str] = []
        async with town(CLASSES) as made:
            for name in CLASSES:
                await made.serve(name)
            begin(made, games=6, math=6)
            engine = EngineAdvisor(engines_of(made), TextFraming(ByteTokenizer()), 100_000)
            await made.node.spawn(lambda: engine, "advisor")
            advisor = Advisor(engine.ask, every=5)
            made.node.background(mapper(made, advisor, tmp_path / COST_FILE, said).run())
            await asyncio.sleep(25.0)
            assert len(advisor.log) >= 2
            assert {heard.outcome for heard in advisor.log} == {"refused"}
            assert advisor.log[0].reason.startswith("expected one JSON object with shares and why, found ")
            assert all("(learned)" in line for line in said)
            costs = await described(made)
            assert set(costs.state.tasks) == {"games", "math"}, "nothing is learned from advice"

            tight = EngineAdvisor(engines_of(made), TextFraming(ByteTokenizer()), 100)
            await made.node.spawn(lambda: tight, "tight")
            with pytest.raises(NoAnswer, match="the question has 200 tokens, and engines hold 100"):
                await tight.ask("x" * 200)

    run(story())


def test_a_run_that_goes_on_knows_what_it_had_measured(tmp_path: Path) -> None:
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 264,
    }
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    fresh = known_costs(tmp_path, tmp_path, "float32", ["CPU"])
    # 2 x (4 x 64 x 64 + 3 x 64 x 128) + 2 x 264 x 64 parameters, four bytes each
    assert fresh.model == ModelSize(parameters=115_712.0, layers=2, kv_heads=4, head_dim=16, bytes_per_value=4)
    fresh.demand.asked("games", "t", 10, 0.0)
    (tmp_path / COST_FILE).write_bytes(msgspec.json.encode(fresh.state()))
    assert known_costs(tmp_path, tmp_path, "float32", ["CPU"]).state() == fresh.state()
    (tmp_path / COST_FILE).write_bytes(b"{")
    assert known_costs(tmp_path, tmp_path, "float32", ["CPU"]).demand.tasks == {}
    (tmp_path / "config.json").unlink()
    assert known_costs(tmp_path, tmp_path, "float32", ["CPU"]).model == ModelSize()


def test_a_run_that_ends_before_the_first_twenty_seconds_leaves_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / COST_FILE

    async def story() -> CostsState:
        async with town(CLASSES) as made:
            for name in CLASSES:
                await made.serve(name)
            begin(made, games=2, math=2)
            looking = made.node.background(mapper(made, Learned(), file, []).run())
            await asyncio.sleep(12.0)
            assert not file.exists()
            known = await described(made)
            looking.cancel()  # as the node's end does
            await asyncio.wait([looking])
            return known

    known = run(story())
    kept = decode_state(file.read_bytes(), "kept")
    assert set(kept.tasks) == set(known.state.tasks) == {"games", "math"}
    assert kept.tasks["math"].response == pytest.approx(MATH.response)
    assert kept.tasks["games"].response == pytest.approx(GAMES.response)


def test_a_job_says_who_decides() -> None:
    assert convert({}, "job", []).rollout.mapping == "declared"
    assert convert({}, "job", ["rollout.mapping=learned"]).rollout.mapping == "learned"
    with pytest.raises(JobError, match=r"Invalid enum value 'guessed' - at `\$\.rollout\.mapping`"):
        convert({"rollout": {"mapping": "guessed"}}, "job", [])
