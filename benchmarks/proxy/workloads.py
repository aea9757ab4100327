"""The two tasks of the paper's measurement, and all that was fitted to it.

Origin: RollArt, arXiv 2512.22560: rollout seconds of Qwen3-8B on 2 H800 and on 6 H20 (digitised from a figure), turns
of each task (FrozenLake 20 to 100, GEM-math less than 5), and the brief's 3.2 (prefill of Qwen3-32B, H800 over H20)
and 1.41 (decoding, H20 over H800). The rest was searched for: at most four parameters a task, marked as fitted, none
for one batch size or one class. What is not marked was taken as it is, once.

What a class reaches (``EFFICIENCY``): 0.8 of an H20 is the anchor, as in ``hwprobe.cost``, and bandwidths are as there.
The brief's 3.2 is of a model on four devices, which sum their activations twice a layer over NVLink (400 GB/s on H800,
900 on H20; half of one direction is reached): an H800 then reaches 0.629 of its FLOP/s by itself, and on one device it
is 5.3 times an H20. With 3.2 on one device the paper's 6 H20 could not be much slower than its 2 H800 where prefill is
all, and they are.

FrozenLake's bend (71 s at 96 trajectories, 76 at 128, 190 at 192; on H20 72, 142, 353) is what happens when prefixes of
trajectories whose environments work no longer fit beside what runs: they are computed anew, turn by turn. It comes
where it does only with the brief's H20 of 48 GB (the paper's table has 96) and a small share of the memory for weights
and caches, which the paper does not state; the two tasks need different ones.
"""

from __future__ import annotations

import math
import random

import msgspec

from hwprobe.cost import EFFICIENCY as KNOWN
from hwprobe.cost import Efficiency, ModelSize
from hwprobe.roofline import lookup_class

LINK_EFFICIENCY = 0.5
"""Share of NVLink's bandwidth in one direction that sums over devices reach."""
EFFICIENCY = {"H20": KNOWN["H20"], "H800": Efficiency(compute=0.6289, bandwidth=KNOWN["H800"].bandwidth)}
H20_GIB = 48.0
"""The brief's profile."""
OVERHEAD_S = 0.004
"""Of an engine's step, on either class: scheduling and launches, as vLLM's and SGLang's take on a small model."""
LONGEST = 32_000
"""Tokens of a trajectory (the paper's context)."""


class Turn(msgspec.Struct, frozen=True):
    """What comes before it, what is sampled, how long the environment takes after it."""

    observation: int
    response: int
    wait_s: float


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One task. Responses and waits are uniform from half to one and a half times their means."""

    name: str
    turns: tuple[int, int]  # the least and the most
    mean_turns: float | None = None  # exponential beyond the least; None: uniform
    prompt: int  # tokens, at first
    observation: int  # tokens before each later turn
    response: int  # tokens, mean
    wait_s: float  # mean
    cache_share: float  # of a device's memory, for weights and caches together

    def trajectories(self, count: int, seed: int) -> list[list[Turn]]:
        """Lengths at evenly spaced quantiles, in random order: a batch is as long as the distribution says."""
        chance = random.Random(seed)
        places = [(place + 0.5) / count for place in range(count)]
        chance.shuffle(places)
        return [self._trajectory(place, chance) for place in places]

    def _trajectory(self, place: float, chance: random.Random) -> list[Turn]:
        least, most = self.turns
        if self.mean_turns is None:
            count = int(least + place * (most - least + 1))
        else:
            count = min(most, int(least - (self.mean_turns - least) * math.log(1 - place)))
        made: list[Turn] = []
        length = 0
        for number in range(count):
            observation = self.observation if number else self.prompt
            response = max(1, int(chance.uniform(0.5, 1.5) * self.response))
            response = min(response, LONGEST - length - observation)
            if response < 1:
                break
            length += observation + response
            made.append(Turn(observation, response, chance.uniform(0.5, 1.5) * self.wait_s))
        return made


FROZENLAKE = Workload(
    name="frozenlake",
    turns=(20, 100),
    mean_turns=33.0,  # fitted
    prompt=200,
    observation=155,  # fitted
    response=3,  # an action
    wait_s=0.6,  # fitted
    cache_share=0.46,  # fitted
)
MATH = Workload(
    name="math",
    turns=(1, 4),
    prompt=300,
    observation=2500,  # fitted
    response=1900,  # fitted
    wait_s=0.3,
    cache_share=0.65,  # fitted
)


def shared_prefill_s(hardware_class: str, model: ModelSize, hidden: int, devices: int) -> float:
    """Seconds of one token's prefill by devices that share the model: arithmetic, and two sums of activations a layer
    around a ring. Raises ``ValueError`` for a class without figures."""
    figures = lookup_class(hardware_class)
    if figures is None:
        raise ValueError(f"hardware class {hardware_class}: no figures in the built-in table (hwprobe.roofline)")
    flops = devices * figures.peak_bf16_flops * EFFICIENCY[hardware_class].compute
    sent = 2 * model.layers * hidden * model.bytes_per_value * 2 * (devices - 1) / devices
    return 2 * model.parameters / flops + sent / (figures.nvlink_bandwidth / 2 * LINK_EFFICIENCY)
