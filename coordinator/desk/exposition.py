"""Prometheus' text format, written plainly (prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4).

Invariant: samples of one metric stand together below its HELP and TYPE lines, whoever contributed them in which order;
a label may hold any text, a value may be NaN or infinite.

    text = Exposition()
    text.gauge("rollart_up", "Whether a node answered.", 1, node="control")
    text.counter("rollart_actor_failures", "Handlers that raised.", 3, node="control", actor="proxy")
    str(text)

A library for this keeps a registry of live objects and a server thread; here all figures are kept by others already,
and only have to be spelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Family:
    def __init__(self, name: str, kind: str, purpose: str) -> None:
        self.head = f"# HELP {name} {_escaped(purpose)}\n# TYPE {name} {kind}\n"
        self.lines: list[str] = []


class Exposition:
    """See the module docstring."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def gauge(self, name: str, purpose: str, value: float, /, **labels: str) -> None:
        """A number that goes up and down."""
        self._family(name, "gauge", purpose).lines.append(_sample(name, labels, value))

    def counter(self, name: str, purpose: str, value: float, /, **labels: str) -> None:
        """A number that only grows, but for restarts; ``_total`` is added to its name."""
        name = f"{name}_total"
        self._family(name, "counter", purpose).lines.append(_sample(name, labels, value))

    def histogram(
        self, name: str, purpose: str, counts: Sequence[int], bounds: Sequence[float], total: float, /, **labels: str
    ) -> None:
        """``counts`` of each bucket by itself, one more than there are ``bounds``; ``total``: their sum."""
        lines = self._family(name, "histogram", purpose).lines
        reached = 0
        for count, bound in zip(counts, (*bounds, math.inf), strict=True):
            reached += count
            lines.append(_sample(f"{name}_bucket", {**labels, "le": _bound(bound)}, reached))
        lines.append(_sample(f"{name}_sum", labels, total))
        lines.append(_sample(f"{name}_count", labels, reached))

    def _family(self, name: str, kind: str, purpose: str) -> _Family:
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = _Family(name, kind, purpose)
        return family

    def __str__(self) -> str:
        return "".join(family.head + "".join(family.lines) for family in self._families.values())


def _sample(name: str, labels: dict[str, str], value: float) -> str:
    listed = ",".join(f'{key}="{_escaped(text, quote=True)}"' for key, text in labels.items())
    return f"{name}{{{listed}}} {_number(value)}\n" if listed else f"{name} {_number(value)}\n"


def _escaped(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quote else text


def _bound(value: float) -> str:
    """As the client libraries spell it: series are told apart by it."""
    return "+Inf" if math.isinf(value) else repr(float(value))


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if value != int(value) else str(int(value))
