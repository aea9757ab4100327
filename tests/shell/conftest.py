"""Tests that are coroutines run on an event loop of their own."""

import pytest

from tests.bus.running import call_if_coroutine


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    return call_if_coroutine(pyfuncitem)
