"""Supervisors start what failed anew, as often as they may, and then fail themselves."""

import asyncio
import itertools
from collections.abc import Callable

import pytest

from actors.core import ALL_FOR_ONE, ONE_FOR_ONE, Actor, Node, Ref, Restarts, Supervised, Supervisor, handler
from actors.core.restarts import Budget
from actors.core.supervisor import Strategy
from tests.actors.support import Add, Fail, Total, until


class Part(Actor):
    """One of several that belong together."""

    def __init__(self, log: list[str], *, starts: bool = True) -> None:
        self.log = log
        self.total = 0
        self._starts = starts

    async def on_start(self) -> None:
        self.log.append(f"+{self.ref.actor}")
        if not self._starts:
            raise RuntimeError("does not start")

    async def on_stop(self) -> None:
        self.log.append(f"-{self.ref.actor}")

    @handler
    async def add(self, message: Add) -> Total:
        self.total += message.amount
        return Total(self.total)

    @handler
    async def fail(self, message: Fail) -> None:
        raise ValueError(message.text)


def parts(log: list[str], names: str = "abc") -> list[Supervised]:
    return [Supervised(name, lambda: Part(log)) for name in names]


async def supervise(node: Node, make: Callable[[], Supervisor], *, restarts: int = 0) -> Callable[[str], Ref]:
    """What makes refs of children."""
    await node.spawn(make, "supervisor", restarts=restarts)
    return lambda name: Ref(node.address, name)


async def test_one_for_one_starts_only_the_failed_child_anew_under_its_ref() -> None:
    log: list[str] = []
    async with Node("n") as node:
        ref = await supervise(node, lambda: Supervisor(parts(log)))
        for name in "abc":
            await node.ask(ref(name), Add(5), Total, timeout_s=10)
        node.tell(ref("b"), Fail())
        await until(lambda: log == ["+a", "+b", "+c", "-b", "+b"])
        totals = [(await node.ask(ref(name), Add(1), Total, timeout_s=10)).value for name in "abc"]
    assert totals == [6, 1, 6]
    assert log[5:] == ["-c", "-b", "-a"] or sorted(log[5:]) == ["-a", "-b", "-c"]


async def test_all_for_one_stops_all_last_one_first_and_starts_all_in_order() -> None:
    log: list[str] = []
    async with Node("n") as node:
        ref = await supervise(node, lambda: Supervisor(parts(log), strategy=ALL_FOR_ONE))
        await node.ask(ref("a"), Add(5), Total, timeout_s=10)
        node.tell(ref("b"), Fail())
        await until(lambda: log == ["+a", "+b", "+c", "-b", "-c", "-a", "+a", "+b", "+c"])
        assert (await node.ask(ref("a"), Add(1), Total, timeout_s=10)).value == 1


@pytest.mark.parametrize("strategy", [ONE_FOR_ONE, ALL_FOR_ONE])
async def test_a_child_that_was_stopped_on_purpose_stays_so(strategy: Strategy) -> None:
    log: list[str] = []
    async with Node("n") as node:
        ref = await supervise(node, lambda: Supervisor(parts(log), strategy=strategy))
        await node.stop(ref("c"))
        node.tell(ref("a"), Fail())
        await until(lambda: log.count("+a") == 2)
        assert (await node.ask(ref("b"), Add(1), Total, timeout_s=10)).value == 1
        assert log.count("+c") == 1


async def test_a_supervisor_gives_up_upward_after_as_many_starts_as_it_may() -> None:
    log: list[str] = []
    given_up: list[tuple[str, str]] = []
    async with Node("n") as node:
        node.on_give_up(lambda ref, error: given_up.append((str(ref), str(error))))
        ref = await supervise(node, lambda: Supervisor(parts(log, "ab"), restarts=Restarts(at_most=2, within_s=60)))
        for starts in range(1, 4):
            await until(lambda starts=starts: log.count("+a") == starts)  # type: ignore[misc]
            await node.ask(ref("a"), Add(1), Total, timeout_s=10)
            node.tell(ref("a"), Fail(f"number {starts}"))
        await until(lambda: bool(given_up))
        await until(lambda: not node.describe()["actors"])
    ((who, why),) = given_up  # the children's own failures are not the node's owner's business
    assert who == "supervisor@n"
    assert "as often as it may; last, a@n: it failed too often, last with ValueError('number 3')" in why
    assert log.count("+a") == 3
    assert log[-1] == "-b"


async def test_a_supervisor_of_a_supervisor_starts_the_whole_lower_one_anew() -> None:
    log: list[str] = []
    async with Node("n") as node:

        def lower() -> Supervisor:
            return Supervisor(parts(log, "ab"), restarts=Restarts(at_most=0))

        ref = await supervise(node, lambda: Supervisor([Supervised("lower", lower)]))
        node.tell(ref("a"), Fail())
        await until(lambda: log == ["+a", "+b", "-a", "-b", "+a", "+b"])
        assert (await node.ask(ref("a"), Add(1), Total, timeout_s=10)).value == 1


async def test_a_child_restarts_in_place_first_where_it_may() -> None:
    log: list[str] = []
    children = [Supervised("a", lambda: Part(log), restarts=Restarts(at_most=1)), Supervised("b", lambda: Part(log))]
    async with Node("n") as node:
        ref = await supervise(node, lambda: Supervisor(children, strategy=ALL_FOR_ONE))
        node.tell(ref("a"), Fail())
        await until(lambda: log == ["+a", "+b", "-a", "+a"])
        node.tell(ref("a"), Fail())
        await until(lambda: log[4:] == ["-a", "-b", "+a", "+b"])


async def test_a_start_that_fails_counts_as_a_failure() -> None:
    log: list[str] = []
    made = itertools.count()
    child = Supervised("a", lambda: Part(log, starts=next(made) != 1))
    async with Node("n") as node:
        ref = await supervise(node, lambda: Supervisor([child], restarts=Restarts(at_most=2)))
        node.tell(ref("a"), Fail())
        await until(lambda: log == ["+a", "-a", "+a", "-a", "+a"])
        assert (await node.ask(ref("a"), Add(1), Total, timeout_s=10)).value == 1


async def test_a_supervisor_whose_child_does_not_start_does_not_start() -> None:
    log: list[str] = []
    children = [Supervised("a", lambda: Part(log)), Supervised("b", lambda: Part(log, starts=False))]
    async with Node("n") as node:
        with pytest.raises(RuntimeError, match="does not start"):
            await node.spawn(lambda: Supervisor(children), "supervisor", restarts=0)
        assert log == ["+a", "+b", "-b", "-a"]
        assert node.describe()["actors"] == {}


async def test_a_supervisor_waits_before_it_starts_anew_where_it_is_told_to() -> None:
    log: list[str] = []
    loop = asyncio.get_running_loop()
    limits = Restarts(at_most=2, first_wait_s=0.05)
    async with Node("n") as node:
        ref = await supervise(node, lambda: Supervisor(parts(log, "a"), restarts=limits))
        for starts, wait_s in ((1, 0.05), (2, 0.1)):
            began = loop.time()
            node.tell(ref("a"), Fail())
            await until(lambda starts=starts: log.count("+a") == starts + 1)  # type: ignore[misc]
            assert loop.time() - began >= wait_s


async def test_one_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="children with one name twice"):
        Supervisor(parts([], "aa"))


# ---- budgets ---------------------------------------------------------------------------------------------------------


def test_waits_double_up_to_the_longest() -> None:
    budget = Budget(Restarts(at_most=6, first_wait_s=1.0, longest_wait_s=5.0))
    assert [budget.spend(0.0) for _ in range(7)] == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0, None]


def test_restarts_are_counted_within_a_window() -> None:
    budget = Budget(Restarts(at_most=2, within_s=10.0, first_wait_s=1.0))
    assert [budget.spend(now) for now in (0.0, 5.0, 9.0, 10.5, 16.0, 16.0)] == [1.0, 2.0, None, 2.0, 2.0, None]


def test_the_default_is_at_once_and_three_times() -> None:
    budget = Budget(Restarts())
    assert [budget.spend(now) for now in (0.0, 1e3, 1e6, 1e9)] == [0.0, 0.0, 0.0, None]


@pytest.mark.parametrize(
    "field", [{"at_most": -1}, {"within_s": 0.0}, {"first_wait_s": -1.0}, {"longest_wait_s": -1.0}]
)
def test_limits_that_are_none_are_refused(field: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected at_most >= 0"):
        Restarts(**field)  # type: ignore[arg-type]


async def test_an_actor_waits_before_its_restart_in_place_and_keeps_its_messages() -> None:
    log: list[str] = []
    loop = asyncio.get_running_loop()
    async with Node("n") as node:
        ref = await node.spawn(lambda: Part(log), "a", restarts=Restarts(first_wait_s=0.05))
        node.tell(ref, Fail())
        began = loop.time()
        assert (await node.ask(ref, Add(1), Total, timeout_s=10)).value == 1
        assert loop.time() - began >= 0.05
        node.tell(ref, Fail())
        await asyncio.sleep(0.01)
        await node.stop(ref)  # while it waits for its restart
    assert log == ["+a", "-a", "+a", "-a", "-a"]
