"""What a node hears of the run's proxies, and whom it tells."""

from __future__ import annotations

import pytest

from actors.core import Ref
from actors.proxy.messages import ProxySet, ServingProxy
from bus.message import NodeAddress
from coordinator.proxies import ProxyNews

ONE = ServingProxy(Ref(NodeAddress("p0", "tcp://p0:1", "", 1), "proxy"), {"CPU": 8})


def test_who_fails_on_the_news_keeps_them_from_nobody_else_and_is_heard_of() -> None:
    news, told = ProxyNews(), list[ProxySet]()

    def fails(found: ProxySet) -> None:
        raise KeyError("t1/0")

    news.on_change(fails)
    news.on_change(told.append)
    with pytest.raises(ExceptionGroup, match=r"of the proxies \(1, 1\) everybody was told, and some failed") as caught:
        news.hear(ProxySet([ONE], (1, 1)))
    assert told == [ProxySet([ONE], (1, 1))]
    assert caught.group_contains(KeyError, match="t1/0")
