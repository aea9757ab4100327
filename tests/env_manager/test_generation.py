"""What an env host asks another proxy for, where the one that it had asked is lost in the middle of an answer."""

from __future__ import annotations

from collections import Counter

import numpy as np

from actors.core import Actor, Node, Ref, handler
from actors.env.episode import Episode
from actors.env.framing import TextFraming
from actors.env.generation import Generation, Wanted
from actors.env.messages import Ticket
from actors.env.peers import Peers
from actors.env.proxies import Proxies
from actors.env.tokenizers import ByteTokenizer
from actors.proxy.engines.protocol import Begun, Completion
from actors.proxy.kept import pack
from actors.proxy.messages import Accepted, Add, Finished, KeptSoFar, ProxySet, ServingProxy
from actors.settings import RolloutSettings
from tests.support.loops import run, until

WANTED = Wanted(max_tokens=20)


class Proxy(Actor):
    """Accepts, and answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[Add] = []

    @handler
    async def add(self, message: Add) -> Accepted:
        self.asked.append(message)
        return Accepted("")

    def tell(self, since: int, count: int) -> None:
        """What the last request has sampled: tokens that say where they belong."""
        asked = self.asked[-1]
        places = np.arange(since, since + count, dtype=np.int32)
        part = Begun(places, -places.astype(np.float32), np.full(count, 3, np.int32))
        report = pack("e0", [(asked.request.request_id, since, part)])
        self.node.tell(asked.reply_to, KeptSoFar(self.ref, report))

    def answer(self, tokens: int) -> None:
        asked, places = self.asked[-1], np.arange(tokens, dtype=np.int32)
        completion = Completion(
            asked.request.request_id, places, -places.astype(np.float32), np.full(tokens, 3, np.int32), "stop"
        )
        self.node.tell(asked.reply_to, Finished("e0", [completion]))


class Asker(Actor):
    """The part of an env host that a generation needs."""

    def __init__(self, proxies: Proxies, nobody: Ref) -> None:
        self.counters: Counter[str] = Counter()
        self._peers = Peers(coordinator=nobody, proxies=proxies, reward=nobody, store=nobody)
        self.heard = 0

    async def on_start(self) -> None:
        self.generation = Generation(
            self,
            self._peers,
            RolloutSettings(turn_timeout_s=20.0),
            environment="game",
            framing=TextFraming(ByteTokenizer()),
            counters=self.counters,
        )

    @handler
    async def kept_so_far(self, message: KeptSoFar) -> None:
        self.generation.kept(message)
        self.heard += 1

    @handler
    async def finished(self, message: Finished) -> None:
        self.generation.finished(message.completions)


def some_episode() -> Episode:
    episode = Episode(Ticket("t", 0, 0, "train", 1.0, 0), 0.0)
    episode.recorder.start(np.frombuffer(b"what comes next?", np.uint8).astype(np.int32))
    return episode


def begun_of(add: Add) -> list[int]:
    return [] if add.request.begun is None else add.request.begun.tokens.tolist()


def serving(*proxies: Proxy) -> ProxySet:
    return ProxySet([ServingProxy(each.ref, {"CPU": 8}) for each in proxies])


def test_another_proxy_is_asked_to_go_on_behind_what_the_lost_one_has_told_of() -> None:
    async def test() -> None:
        async with Node("control") as node, Node("p0") as first_node, Node("p1") as second_node:
            first, second = Proxy(), Proxy()
            await first_node.spawn(lambda: first, "proxy")
            await second_node.spawn(lambda: second, "proxy")
            proxies = Proxies(serving(first))
            asker = Asker(proxies, first.ref)
            await node.spawn(lambda: asker, "env")
            answer = node.background(asker.generation.generate(some_episode(), None, urgent=False, wanted=WANTED))
            await until(lambda: first.asked)
            first.tell(0, 3)
            first.tell(3, 2)
            await until(lambda: asker.heard == 2)
            proxies.follow(serving(second))
            await until(lambda: second.asked)
            assert begun_of(second.asked[0]) == [0, 1, 2, 3, 4]
            begun = second.asked[0].request.begun
            assert begun is not None
            assert (begun.versions.tolist(), begun.logprobs.tolist()) == ([3] * 5, [0, -1, -2, -3, -4])
            first.tell(5, 4)  # it was cut off, not dead: what it goes on to say belongs to no answer
            await until(lambda: asker.heard == 3)
            second.tell(5, 2)
            await until(lambda: asker.heard == 4)
            proxies.follow(serving(first))
            await until(lambda: len(first.asked) == 2)
            assert begun_of(first.asked[1]) == [0, 1, 2, 3, 4, 5, 6]
            first.answer(9)
            completion = await answer
            assert completion.tokens.tolist() == list(range(9))
            assert asker.counters == {"requests_of_an_earlier_proxy": 2, "tokens_kept": 7}
            assert len(asker.generation._kept) == 0

    run(test())


def test_what_was_told_of_an_answered_request_is_forgotten() -> None:
    async def test() -> None:
        async with Node("control") as node, Node("p0") as first_node:
            first = Proxy()
            await first_node.spawn(lambda: first, "proxy")
            asker = Asker(Proxies(serving(first)), first.ref)
            await node.spawn(lambda: asker, "env")
            answer = node.background(asker.generation.generate(some_episode(), None, urgent=False, wanted=WANTED))
            await until(lambda: first.asked)
            first.tell(0, 3)
            await until(lambda: asker.heard == 1)
            assert len(asker.generation._kept) == 1
            first.answer(4)
            await answer
            assert len(asker.generation._kept) == 0
            first.tell(3, 3)
            await until(lambda: asker.heard == 2)
            assert len(asker.generation._kept) == 0

    run(test())
