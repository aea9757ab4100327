"""One tool, by the best way that works here.

Invariant: a way that fails is named in the report's notes with its reason, then the next is tried; where a way is asked
for by name, no other is taken. Nothing that works is an error, with every reason.
"""

from __future__ import annotations

import msgspec

from hwprobe.tracing import bpf_tools, pyspy, sampled
from hwprobe.tracing.children import ChildFailed, Interruption
from hwprobe.tracing.kernel import Kernel, offers
from hwprobe.tracing.order import Order, Site
from hwprobe.tracing.report import How, Report


class NothingWorks(RuntimeError):
    """No way of a tool works here; one line for the user."""


def trace(order: Order, site: Site, kernel: Kernel, interruption: Interruption) -> Report:
    """Raises ``NothingWorks``."""
    failed: list[str] = []
    for offer in offers(kernel):
        if offer.tool != order.tool or order.how not in (None, offer.how):
            continue
        if not offer.possible:
            failed.append(f"not by {offer.how}: {offer.detail}")
            continue
        try:
            report = _run(offer.how, order, site, kernel, interruption)
        except ChildFailed as error:
            failed.append(f"not by {offer.how}: {error}")
            if interruption.stopped:
                break
        else:
            return msgspec.structs.replace(report, notes=(*failed, *report.notes))
    reasons = "; ".join(failed) or f"there is no such way: {order.how}"
    raise NothingWorks(f"{order.tool} cannot be traced here: {reasons}")


def _run(how: How, order: Order, site: Site, kernel: Kernel, interruption: Interruption) -> Report:
    if how == "bpf":
        return bpf_tools.WAYS[order.tool](order, site, kernel, interruption)
    if how == "py-spy":
        return pyspy.stacks(order, site, kernel, interruption)
    return sampled.WAYS[order.tool](order, site, interruption)
