"""Who has which role after a loss; every expected answer is written by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.message import NodeAddress
from coordinator.job import Job
from coordinator.messages import ROLES, SEVERAL, Role
from coordinator.muster import Member, NoHolder, fittest, host_of, muster
from hwprobe import AffinityMap, Device
from hwprobe.roofline import Kind

JOB = Job()


def device(class_: str, kind: Kind | None, number: int) -> Device:
    return Device(
        host="h",
        id=f"gpu{number}" if class_ != "CPU" else "cpu",
        name=class_,
        hardware_class=class_,
        kind=kind,
        roles=("train",),
        peak_bf16_flops=None,
        bandwidth=None,
        memory_bytes=1,
        cpus="0",
    )


def hardware(*gpus: tuple[str, Kind]) -> AffinityMap:
    devices = (device("CPU", None, 0), *(device(name, kind, number) for number, (name, kind) in enumerate(gpus)))
    return AffinityMap(hosts=(), devices=devices, pools=(), reference_ridge=0.0)


H800, H20, CPU = hardware(("H800", "compute")), hardware(("H20", "bandwidth")), hardware()


def member(node: str, *roles: Role, host: str = "", affinity: AffinityMap = CPU) -> Member:
    return Member(node, host or node, roles, affinity)


def test_whoever_is_there_keeps_its_roles_and_a_spare_takes_what_is_missing() -> None:
    members = [member("a", "trainer"), member("b", "weightsync"), member("e", "env"), member("s"), member("z")]
    assert muster(members, (), JOB) == {
        "a": ["trainer"],
        "b": ["weightsync"],
        "e": ["env"],
        "s": ["proxy", "reward"],  # together, though z is as fit
        "z": [],
    }


def test_a_spare_that_was_given_a_role_takes_what_else_its_lost_host_had() -> None:
    """The host of weightsync, reward and an env was lost; its env was missed first, and given to the one spare."""
    came = Member("s", "s", ("env",), CPU, spare=True)
    members = [member("a", "proxy", "trainer"), member("e", "env"), came]
    assert muster(members, (), JOB) == {"a": ["proxy", "trainer"], "e": ["env"], "s": ["env", "reward", "weightsync"]}


def test_a_spare_without_a_role_comes_before_one_that_has_been_given_one() -> None:
    members = [member("a", "trainer", "reward", "weightsync"), Member("s", "s", ("env",), CPU, spare=True), member("z")]
    assert muster(members, (), JOB)["z"] == ["proxy"]


def test_env_hosts_and_proxies_stay_several_and_any_other_role_has_one_holder() -> None:
    members = [member("a", "proxy", "env", "reward"), member("b", "proxy", "env", "reward", "trainer", "weightsync")]
    assert muster(members, (), JOB) == {
        "a": ["proxy", "env", "reward"],
        "b": ["proxy", "env", "trainer", "weightsync"],
    }


def test_a_host_in_quarantine_has_no_role_and_is_no_spare() -> None:
    members = [member("all", *ROLES, host="h1"), member("s1", host="h1"), member("s2", host="h2")]
    assert muster(members, {"h1"}, JOB) == {"all": [], "s1": [], "s2": list(ROLES)}


def test_a_role_for_which_nobody_is_left_is_named() -> None:
    with pytest.raises(NoHolder, match=r"no spare for the role trainer; there are a \(proxy, env, reward\), w \("):
        muster([member("a", "proxy", "env", "reward"), member("w", "weightsync")], (), JOB)


@pytest.mark.parametrize(
    ("role", "chosen"),
    [("trainer", "compute"), ("proxy", "bandwidth"), ("env", "cpu"), ("reward", "cpu"), ("weightsync", "cpu")],
)
def test_a_role_goes_to_the_hardware_that_suits_it(role: Role, chosen: str) -> None:
    spares = [member("compute", affinity=H800), member("bandwidth", affinity=H20), member("cpu")]
    found = fittest(role, spares, JOB)
    assert found is not None
    assert found.node == chosen


def test_a_declared_class_comes_before_the_usual_one() -> None:
    job = Job(rollout=type(JOB.rollout)(affinity={JOB.environment.name: "H800"}))
    found = fittest("proxy", [member("bandwidth", affinity=H20), member("compute", affinity=H800)], job)
    assert found is not None
    assert found.node == "compute"


def test_a_trainer_of_two_ranks_does_not_fit_on_one_gpu() -> None:
    job = Job(train=type(JOB.train)(tensor_parallel=2))
    two = hardware(("H20", "bandwidth"), ("H20", "bandwidth"))
    assert fittest("trainer", [member("one", affinity=H800)], job) is None
    found = fittest("trainer", [member("one", affinity=H800), member("two", affinity=two)], job)
    assert found is not None
    assert found.node == "two"


def test_a_host_is_known_by_its_address() -> None:
    assert host_of(NodeAddress("n", "tcp://10.0.0.7:4711", "tcp://10.0.0.7:4712", 3)) == "10.0.0.7"


@settings(deadline=None)
@given(
    st.lists(st.sets(st.sampled_from(ROLES)), max_size=6), st.sets(st.integers(0, 5)), st.permutations(list(range(6)))
)
def test_every_role_has_a_holder_and_the_order_of_coming_does_not_matter(
    roles: list[set[Role]], barred: set[int], order: list[int]
) -> None:
    members = [member(f"n{number}", *sorted(has)) for number, has in enumerate(roles)]
    hosts = {f"n{number}" for number in barred}
    mixed = [members[number] for number in order if number < len(members)]
    able = [each for each in members if each.node not in hosts]
    free = any(not each.roles for each in able)
    covered = {role for each in able for role in each.roles} == set(ROLES)
    if not (free or covered):
        with pytest.raises(NoHolder):
            muster(members, hosts, JOB)
        return
    answer = muster(members, hosts, JOB)
    assert muster(mixed, hosts, JOB) == answer
    holders = {role: [node for node, has in answer.items() if role in has] for role in ROLES}
    assert all(len(holders[role]) == 1 for role in ROLES if role not in SEVERAL)
    assert all(holders[role] for role in SEVERAL)
    assert not any(answer[node] for node in hosts & answer.keys())
