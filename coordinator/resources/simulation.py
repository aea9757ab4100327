"""A cluster that plays and trains on virtual time, with engines by the roofline: what a plan is judged by.

Invariant: nothing here knows the planner's formulas: trajectories come and go as events, engines compute what
``hwprobe.cost`` says a step or a prefill takes, and what is reported was counted. The same seed gives the same history.

    begin -> environment -> engine's queue -> prefill -> decoding -> environment ... -> training -> begin
             (step_s)       (places)         (alone)    (a batch)                       (in order)

An engine does one thing at a time: a prefill that waits goes first, else one step for all that decode. Between two
events every step takes the same, so many are taken at once. A trajectory is played where its work would be done first
(outstanding work of the engine plus its own, on that class) and stays there, because its prefix does; what a prefix
takes of the cache while its environment runs is left out, as it is in the planner. Where a mapping is judged or learns
(``Costs``, the proxy's own), that says which class a trajectory goes to, and hears of requests and of what engines do.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import msgspec

from actors.proxy.costs import Costs
from actors.proxy.messages import Assign
from bus.virtual_time import run
from coordinator.resources.mix import Candidate, Mix, engine_s, training_s
from hwprobe.cost import DeviceCost
from hwprobe.costmodel import CostModel
from hwprobe.fitting import Work
from hwprobe.flow import Shares, TaskShape

WARM_UP = 0.4
"""Share of the trajectories that are played before anything is counted."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate did, once warm."""

    rate: float  # trajectories a second
    utilisation: float  # share of the time in which a device computed, over all devices
    by_class: dict[str, float]
    training: float


class Game:
    """One trajectory."""

    __slots__ = ("context", "decode", "left", "name", "prefill", "response", "shape", "task", "work_s")

    def __init__(self, name: str, task: str, shape: TaskShape, chance: random.Random) -> None:
        self.name = name
        self.task = task
        self.shape = shape
        self.left = max(1, round(chance.uniform(0.5, 1.5) * shape.turns)) if shape.turns > 1 else 1
        self.prefill = shape.prompt
        self.response = chance.uniform(0.5, 1.5) * shape.response
        self.decode = 0.0
        self.context = 0.0
        self.work_s = 0.0


class Engine:
    """See the module docstring. ``done`` hears of each turn that was sampled."""

    def __init__(self, mix: Mix, cost: DeviceCost, done: Callable[[Game], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._mix, self._cost, self._done = mix, cost, done
        self.hardware_class = cost.hardware_class
        self.outstanding_s = 0.0
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._ceiling = mix.classes[cost.hardware_class].ceiling
        self._room = cost.places(mix.model, 1.0, 10**9)  # tokens of cache
        self._held = 0.0
        self._waiting: deque[Game] = deque()
        self._fresh: deque[Game] = deque()  # to be prefilled
        self._decoding: list[Game] = []
        self._since = 0.0
        self._step_s = 0.0  # of the decoding under way; 0 while it prefills or rests
        self._timer: asyncio.TimerHandle | None = None
        self._prefilling: Game | None = None
        self._work = Work(busy_s=0.0)

    def add(self, game: Game) -> None:
        """A turn to be sampled."""
        self._waiting.append(game)
        if self._prefilling is None:
            self._stop_decoding()
            self._go_on()

    def _go_on(self) -> None:
        """Take in what there is room for, then prefill or decode."""
        while self._waiting and self._fits(self._waiting[0]):
            game = self._waiting.popleft()
            self._held += self._size(game)
            self._fresh.append(game)
        now = self._loop.time()
        if self._fresh:
            game = self._fresh.popleft()
            self._prefilling = game
            self._busy_since = now
            takes_s = self._cost.prefill_s(self._mix.model, game.prefill)
            self._timer = self._loop.call_at(now + takes_s, self._prefilled)
        elif self._decoding:
            batch = len(self._decoding)
            context = sum(game.context for game in self._decoding) / batch
            steps = max(0.0, min(game.decode for game in self._decoding))
            self._since = self._busy_since = now
            self._step_s = self._cost.step_s(self._mix.model, batch, context + steps / 2)
            self._timer = self._loop.call_at(now + steps * self._step_s, self._decoded)

    def _size(self, game: Game) -> float:
        return game.context + game.prefill + game.response

    def _fits(self, game: Game) -> bool:
        running = len(self._decoding) + len(self._fresh)
        return running < self._ceiling and (self._held + self._size(game) <= self._room or not running)

    def _prefilled(self) -> None:
        self._rest()
        game, self._prefilling = self._prefilling, None
        if game is not None:
            takes_s = self._cost.prefill_s(self._mix.model, game.prefill)
            self._work += Work(busy_s=takes_s, prefill_tokens=game.prefill)
            game.context += game.prefill
            game.decode = game.response
            self._decoding.append(game)
        self._go_on()

    def _stop_decoding(self) -> None:
        """Count what was sampled up to now; a step under way counts by its part."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._rest()
        if self._step_s:
            self._advance((self._loop.time() - self._since) / self._step_s)

    def busy_s(self) -> float:
        """How long it has computed up to now."""
        since = self._busy_since
        return self._busy_s + (0.0 if since is None else self._loop.time() - since)

    def _rest(self) -> None:
        self._busy_s, self._busy_since = self.busy_s(), None

    def take_work(self) -> Work:
        """What was computed since the last call."""
        work, self._work = self._work, Work(busy_s=0.0)
        return work

    def _advance(self, steps: float) -> None:
        batch, context = len(self._decoding), sum(game.context for game in self._decoding)
        self._work += Work(
            busy_s=steps * self._step_s,
            steps=steps,
            decode_tokens=steps * batch,
            context_tokens=steps * (context + batch * steps / 2),
        )
        self._step_s = 0.0
        for game in self._decoding:
            game.decode -= steps
            game.context += steps

    def _decoded(self) -> None:
        self._timer = None
        self._rest()
        self._advance(max(0.0, min(game.decode for game in self._decoding)))
        finished = [game for game in self._decoding if game.decode <= 1e-6]
        self._decoding = [game for game in self._decoding if game.decode > 1e-6]
        for game in finished:
            self._held -= game.context
            self._done(game)
        self._go_on()


class Cluster:
    """A candidate that plays ``games`` trajectories. ``mapping`` says where each goes."""

    def __init__(
        self,
        mix: Mix,
        candidate: Candidate,
        costs: Mapping[str, DeviceCost],
        games: int,
        seed: int,
        *,
        mapping: Costs | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._mix = mix
        self._costs = costs
        self._games = games
        self._mapping = mapping
        self.began = 0
        self._chance = random.Random(seed)
        self.pose(mix)
        self.engines = [
            Engine(mix, costs[name], self._turn_done)
            for name, devices in candidate.rollout
            for _ in range(devices // costs[name].devices)
        ]
        self._devices = {name: costs[name].devices for name, _ in candidate.rollout}
        self._train_s = training_s(mix, candidate)
        self._mean = sum(mix.share(task) * shape.length for task, shape in mix.tasks.items())
        self._learners = sum(devices for _, devices in candidate.train)
        self._trained_until = 0.0
        self._training_s = 0.0
        self._where: dict[Game, Engine] = {}
        self._ended = 0
        self._marks: list[tuple[float, list[float], float]] = []
        self._over: asyncio.Future[None] = self._loop.create_future()

    def pose(self, mix: Mix) -> None:
        """From now on trajectories are of this mix; those under way go on as they are."""
        self._mix = mix
        self._order = _in_proportion({task: mix.share(task) for task in mix.tasks})
        self._takes_s = {
            name: {task: engine_s(mix, shape, cost) / cost.devices for task, shape in mix.tasks.items()}
            for name, cost in self._costs.items()
        }

    def start(self) -> None:
        for _ in range(self._mix.in_flight):
            self._begin()

    async def play(self) -> Measured:
        self.start()
        await self._over
        (start, before, trained_before), (end, after, trained) = self._marks
        spent = end - start
        by_class: dict[str, list[float]] = {}
        for engine, was, now in zip(self.engines, before, after, strict=True):
            by_class.setdefault(engine.hardware_class, []).append((now - was) / spent)
        training = (trained - trained_before) / spent
        busy = sum(sum(shares) * self._devices[name] for name, shares in by_class.items()) + training * self._learners
        devices = sum(len(shares) * self._devices[name] for name, shares in by_class.items()) + self._learners
        return Measured(
            rate=(self._games - int(WARM_UP * self._games)) / spent,
            utilisation=busy / devices,
            by_class={name: sum(shares) / len(shares) for name, shares in by_class.items()},
            training=training,
        )

    def _begin(self) -> None:
        task = next(self._order)
        self.began += 1
        game = Game(f"g{self.began}", task, self._mix.tasks[task], self._chance)
        able = self._able(task)
        engine = min(able, key=lambda e: e.outstanding_s + self._takes_s[e.hardware_class][task])
        game.work_s = self._takes_s[engine.hardware_class][task]
        engine.outstanding_s += game.work_s
        self._where[game] = engine
        self._loop.call_later(game.shape.reset_s * self._chance.uniform(0.5, 1.5), self._ask, game)

    def _able(self, task: str) -> list[Engine]:
        """The engines of the class that the mapping names, if it names one."""
        if self._mapping is None:
            return self.engines
        name = self._mapping.preferred(task, None, {engine.hardware_class for engine in self.engines})
        return [engine for engine in self.engines if engine.hardware_class == name] or self.engines

    def _ask(self, game: Game) -> None:
        if self._mapping is not None:
            self._mapping.asked(game.task, game.name, game.context + game.prefill, self._loop.time())
        self._where[game].add(game)

    def _turn_done(self, game: Game) -> None:
        game.left -= 1
        if self._mapping is not None:
            self._mapping.answered(game.name, game.response, self._loop.time())
            if not game.left:
                self._mapping.ended(game.name)
        engine = self._where[game]
        wait_s = game.shape.step_s * self._chance.uniform(0.5, 1.5)
        if game.left:
            game.prefill = game.shape.observation
            game.response = self._chance.uniform(0.5, 1.5) * game.shape.response
            self._loop.call_later(wait_s, self._ask, game)
        else:
            engine.outstanding_s -= game.work_s
            del self._where[game]
            self._loop.call_later(wait_s, self._train, game)

    def _train(self, game: Game) -> None:
        """Trained in the order of arrival, as long as it is; its place is then free."""
        takes_s = self._train_s * game.context / self._mean
        now = self._loop.time()
        self._trained_until = max(self._trained_until, now) + takes_s
        self._loop.call_at(self._trained_until, self._end, takes_s)

    def _end(self, took_s: float) -> None:
        self._training_s += took_s
        self._ended += 1
        if self._ended in (int(WARM_UP * self._games), self._games):
            self._marks.append((self._loop.time(), [engine.busy_s() for engine in self.engines], self._training_s))
        if self._ended == self._games:
            self._over.set_result(None)
        elif not self._over.done():
            self._begin()


def _in_proportion(shares: Mapping[str, float]) -> Iterator[str]:
    """Tasks in a fixed order in which each has its share of every stretch: the one that lags most is next."""
    owed = dict.fromkeys(shares, 0.0)
    while True:
        for task, share in shares.items():
            owed[task] += share
        task = max(owed, key=lambda name: owed[name])
        owed[task] -= 1.0
        yield task


def simulate(
    mix: Mix,
    candidate: Candidate,
    costs: Mapping[str, DeviceCost],
    *,
    games: int = 600,
    seed: int = 0,
    shares: Shares | None = None,
) -> Measured:
    """Play so many trajectories in virtual time. ``shares``: where each task goes; default: wherever its work would be
    done first."""
    mapping = None
    if shares is not None:
        mapping = Costs(CostModel.prior(mix.model, costs), {})
        mapping.assign(Assign({task: dict(of) for task, of in shares.items()}, "declared"), 0.0)

    async def main() -> Measured:
        return await Cluster(mix, candidate, costs, games, seed, mapping=mapping).play()

    return run(main(), seed=seed, limit_s=1e9)
