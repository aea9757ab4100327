"""Where a request goes."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from actors.proxy.routing import STICKY_SLACK, choose, preferred_class


class Engine(msgspec.Struct):
    name: str
    load: float = 0.0
    hardware_class: str = "H20"


def chosen(*engines: Engine, preferred: str | None = None, holder: str | None = None) -> tuple[str, bool] | None:
    choice = choose(engines, preferred=preferred, holder=holder)
    return None if choice is None else (choice.engine, choice.fell_back)


def test_a_domain_gets_the_class_declared_for_it_and_others_the_default() -> None:
    affinity = {"code": "H800", "default": "H20"}
    assert preferred_class(affinity, "code") == "H800"
    assert preferred_class(affinity, "games") == "H20"
    assert preferred_class({"code": "H800"}, "games") is None


def test_the_least_loaded_engine_is_taken() -> None:
    assert chosen(Engine("a", 0.5), Engine("b", 0.2), Engine("c", 0.9)) == ("b", False)


def test_of_equally_loaded_ones_the_first_by_name_is_taken() -> None:
    assert chosen(Engine("b"), Engine("a")) == ("a", False)


def test_the_preferred_class_is_taken_though_another_is_idle() -> None:
    assert chosen(Engine("a", 0.0, "H20"), Engine("b", 3.0, "H800"), preferred="H800") == ("b", False)


def test_without_an_engine_of_the_preferred_class_another_serves_and_it_is_told() -> None:
    assert chosen(Engine("a", 0.5), Engine("b", 0.1), preferred="H800") == ("b", True)


def test_a_trajectory_stays_with_its_prefix_up_to_a_point() -> None:
    assert chosen(Engine("a", 0.0), Engine("b", STICKY_SLACK), holder="b") == ("b", False)
    assert chosen(Engine("a", 0.0), Engine("b", STICKY_SLACK + 0.01), holder="b") == ("a", False)


def test_a_holder_of_the_wrong_class_does_not_keep_a_trajectory() -> None:
    assert chosen(Engine("a", 0.0, "H20"), Engine("b", 0.0, "H800"), preferred="H800", holder="a") == ("b", False)


def test_a_holder_that_does_not_serve_is_no_choice() -> None:
    assert chosen(Engine("a"), holder="b") == ("a", False)


def test_with_no_engine_there_is_no_choice() -> None:
    assert chosen(preferred="H800", holder="a") is None


ENGINES = st.lists(
    st.builds(Engine, st.sampled_from("abcdef"), st.floats(0, 4), st.sampled_from(["H800", "H20", "CPU"])),
    min_size=1,
    unique_by=lambda engine: engine.name,
)


@given(ENGINES, st.sampled_from(["H800", "H20", "CPU", None]), st.sampled_from([*"abcdef", None]))
def test_the_choice_keeps_its_promises(engines: list[Engine], preferred: str | None, holder: str | None) -> None:
    choice = choose(engines, preferred=preferred, holder=holder)
    assert choice is not None
    taken = next(engine for engine in engines if engine.name == choice.engine)
    of_class = [engine for engine in engines if engine.hardware_class == preferred]
    assert choice.fell_back == (preferred is not None and not of_class)
    assert taken.hardware_class == preferred or preferred is None or choice.fell_back
    least = min(engine.load for engine in of_class or engines)
    assert taken.load <= least + (STICKY_SLACK if taken.name == holder else 0)
    assert choose(list(reversed(engines)), preferred=preferred, holder=holder).engine == choice.engine  # type: ignore[union-attr]
