"""What a cluster is planned for: a mix of tasks, the model, how much runs at once, and the classes to choose from.

Invariant: an unknown key or an impossible value is one line that names its path. In YAML::

    model: {parameters: 8.2e9, layers: 36, kv_heads: 8, head_dim: 128}
    in_flight: 256            # trajectories at once: (1 + alpha) x groups_per_step x group_size
    tasks:
      games: {weight: 2, turns: 12, prompt: 1500, observation: 600, response: 40, step_s: 0.4}
      math: {weight: 1, turns: 1, prompt: 300, response: 4000}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from hwprobe.cost import DeviceCost, Efficiency, ModelSize, device_cost
from hwprobe.flow import TaskShape

Positive = Annotated[float, msgspec.Meta(gt=0)]


class MixError(ValueError):
    """A mix that cannot be planned for; one line for the user."""


class ClassOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A hardware class that may be chosen."""

    cost: Positive = 1.0  # of one device, in any currency
    memory_gib: Positive | None = None  # of one device; default: the data sheet's
    ceiling: Annotated[int, msgspec.Meta(ge=1)] = 128  # sequences in one engine's batch


OFFERS = {"H800": ClassOffer(cost=2.85, ceiling=256), "H20": ClassOffer(cost=1.0, ceiling=128)}
"""Prices and batch ceilings of the paper and the brief."""


class Mix(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """See the module docstring."""

    tasks: Annotated[dict[str, TaskShape], msgspec.Meta(min_length=1)]
    model: ModelSize = ModelSize()
    in_flight: Annotated[int, msgspec.Meta(ge=1)] = 256
    train: bool = True  # the same devices train what they play
    efficiency: dict[str, Efficiency] = {}  # class -> what engines were measured to reach; others as known
    classes: Annotated[dict[str, ClassOffer], msgspec.Meta(min_length=1, max_length=2)] = msgspec.field(
        default_factory=lambda: dict(OFFERS)
    )

    def share(self, task: str) -> float:
        """How often a trajectory is of this task."""
        return self.tasks[task].weight / sum(shape.weight for shape in self.tasks.values())


class Candidate(msgspec.Struct, frozen=True, order=True):
    """Devices by class and use."""

    rollout: tuple[tuple[str, int], ...]  # class -> devices that play
    train: tuple[tuple[str, int], ...] = ()  # class -> devices that train

    def devices(self, hardware_class: str) -> int:
        return dict(self.rollout).get(hardware_class, 0) + dict(self.train).get(hardware_class, 0)

    def __str__(self) -> str:
        parts = [f"{count} {name} play" for name, count in self.rollout]
        return ", ".join([*parts, *(f"{count} {name} train" for name, count in self.train)])


def engine_s(mix: Mix, shape: TaskShape, cost: DeviceCost) -> float:
    """Seconds of one device that a trajectory takes there in a well-filled batch (half of what fits)."""
    batch = max(1, cost.places(mix.model, shape.length, mix.classes[cost.hardware_class].ceiling) // 2)
    decode_s = shape.decode_tokens * cost.step_s(mix.model, batch, shape.length / 2) / batch
    return (cost.prefill_s(mix.model, shape.prefill_tokens) + decode_s) * cost.devices


def trainer_cost(mix: Mix, hardware_class: str) -> DeviceCost:
    """What training reaches there, as it is known: ``mix.efficiency`` is what engines were measured to reach."""
    return device_cost(hardware_class, mix.model, mix.classes[hardware_class].memory_gib)


def training_s(mix: Mix, candidate: Candidate) -> float:
    """Seconds that all trainers together take for one trajectory of the mix."""
    if not candidate.train:
        return 0.0
    ((name, devices),) = candidate.train
    tokens = sum(mix.share(task) * shape.length for task, shape in mix.tasks.items())
    cost = trainer_cost(mix, name)
    return cost.train_s(mix.model, tokens) * cost.devices / devices


class _Loader(yaml.SafeLoader):
    """8.2e9 is a number, as in job files."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_mix(path: Path) -> Mix:
    """Raises ``MixError``."""
    try:
        tree: Any = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise MixError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise MixError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return convert_mix(tree, str(path))


def convert_mix(tree: Mapping[str, Any], where: str) -> Mix:
    """Raises ``MixError``."""
    try:
        return msgspec.convert(tree, Mix)
    except msgspec.ValidationError as error:
        raise MixError(f"{where}: {error}") from None
