"""Several proxies of one run, in virtual time: the coordinator's side."""

from __future__ import annotations

import asyncio

import pytest

from bus.message import RemoteError
from coordinator.messages import RoleFailed
from tests.scheduling.test_handover import Town, town

LOOKS_AFTER_S = 60.0


def known(built: Town) -> list[list[str]]:
    """The proxies that every other node knows of."""
    return [part.proxies for name, part in built.parts.items() if not name.startswith("proxy")]


def serving(built: Town) -> dict[str, int]:
    found = built.made.coordinator.roster.proxies.found
    return {member.ref.node.name: sum(member.places.values()) for member in found.members}


async def two_that_serve(built: Town) -> None:
    await built.add("proxy-2", "proxy")
    await built.parts["proxy-1"].serves(8)
    await built.parts["proxy-2"].serves(32)


def test_a_second_proxy_takes_part_and_all_are_told_of_both_and_of_what_they_serve() -> None:
    async def scenario(built: Town) -> None:
        await two_that_serve(built)
        assert known(built) == [["proxy-1", "proxy-2"]] * 3
        assert serving(built) == {"proxy-1": 8, "proxy-2": 32}
        await built.parts["proxy-1"].serves(0)
        assert serving(built) == {"proxy-1": 0, "proxy-2": 32}
        assert built.failed == []

    town(scenario)


@pytest.mark.parametrize("name", ["proxy-1", "proxy-2"])
def test_the_run_goes_on_without_one_of_two_that_is_lost(name: str) -> None:
    async def scenario(built: Town) -> None:
        await two_that_serve(built)
        lost, (other,) = built.parts.pop(name), {"proxy-1", "proxy-2"} - {name}
        await lost.node.close()
        await asyncio.sleep(LOOKS_AFTER_S)
        assert known(built) == [[other]] * 3
        found = built.made.coordinator.roster.has("proxy")
        assert found is not None
        assert found.node.name == other
        assert name not in [join.node.name for join in built.made.coordinator.roster.joins]
        again = await built.add("proxy-3", "proxy")
        assert known(built) == [[other, again.name]] * 3

    town(scenario)


def test_the_run_begins_without_one_of_two_that_is_lost_before_any_serves() -> None:
    async def scenario(built: Town) -> None:
        await built.add("proxy-2", "proxy")
        await built.parts.pop("proxy-1").node.close()
        await asyncio.sleep(LOOKS_AFTER_S)
        assert known(built) == [["proxy-2"]] * 3

    town(scenario)


def test_the_run_does_not_go_on_where_the_one_that_is_left_serves_nothing() -> None:
    async def scenario(built: Town) -> None:
        await two_that_serve(built)
        await built.parts["proxy-2"].serves(0)
        await built.parts.pop("proxy-1").node.close()
        await asyncio.sleep(LOOKS_AFTER_S)
        (failure,) = built.made.failures
        assert str(failure) == "node proxy-1 (proxy) is lost: no sign of life for 20.0 s"
        built.made.failures.clear()

    town(scenario)


def test_a_proxy_without_engines_ends_and_the_others_go_on() -> None:
    async def scenario(built: Town) -> None:
        await two_that_serve(built)
        failing = built.parts["proxy-2"]
        failing.node.tell(built.made.ref, RoleFailed("proxy", "proxy-2", "no engine is left"))
        await asyncio.sleep(0.5)
        with pytest.raises(RemoteError, match="node proxy-2 takes no part in the run any more"):
            await failing.serves(16)
        assert (known(built), serving(built)) == ([["proxy-1"]] * 3, {"proxy-1": 8})
        assert failing.ended == "lost to the run: no engine is left"

    town(scenario)


def test_one_of_several_is_let_go_and_nobody_is_waited_for() -> None:
    async def scenario(built: Town) -> None:
        await two_that_serve(built)
        changed = await built.handover.let_go("proxy-1")
        assert (
            changed.message
            == "proxy-1 is gone; the run goes on without it until another node for proxy joins in its place"
        )
        assert (known(built), built.handover.under_way) == ([["proxy-2"]] * 3, "")

    town(scenario)


def test_a_proxy_that_has_restarted_is_another_one() -> None:
    async def scenario(built: Town) -> None:
        await two_that_serve(built)
        before = built.parts.pop("proxy-2")
        await before.node.close()
        again = await built.add("proxy-2", "proxy")
        await asyncio.sleep(1.0)
        assert known(built) == [["proxy-1", "proxy-2"]] * 3
        assert serving(built) == {"proxy-1": 8, "proxy-2": 0}
        assert again.ref != before.ref

    town(scenario)


def test_who_does_not_answer_for_a_while_hears_of_the_newest_proxies_later() -> None:
    async def scenario(built: Town) -> None:
        network = built.made.network
        network.partition({"reward-1"}, {"control"})
        await built.add("proxy-2", "proxy")
        await built.add("proxy-3", "proxy")
        assert known(built) == [["proxy-1", "proxy-2", "proxy-3"]] * 2 + [["proxy-1"]]
        network.heal()
        await asyncio.sleep(8.0)
        assert known(built) == [["proxy-1", "proxy-2", "proxy-3"]] * 3

    town(scenario)


def test_who_is_lost_is_told_nothing_more() -> None:
    async def scenario(built: Town) -> None:
        await built.add("proxy-2", "proxy")
        await built.parts["proxy-1"].serves(8)
        await built.parts.pop("proxy-2").node.close()
        await built.add("proxy-3", "proxy")
        await asyncio.sleep(LOOKS_AFTER_S)
        assert built.made.coordinator.roster.tidings.deaf == []

    town(scenario)
