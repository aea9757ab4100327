"""What a class of engines reaches of its peaks, fitted to what engines say that they did: two efficiencies a class.

Invariant: a fit is a pure fold over reports; with none it is the roofline's prior, and however many come, it stays a
finite, positive pair, and where there is a data sheet neither exceeds the peak. What no report bears on (a class that
only decodes says nothing of its FLOP/s) stays at the prior.

A report says for how long an engine computed, and what. At the prior's efficiencies, prefill would have taken F seconds
and decoding M:

    busy = compute x F + bandwidth x M        F = 2 P tokens / FLOP/s        M = (steps W + cache read k) / bytes/s

so how many times slower a class is than its prior are the coefficients of a linear model without a constant: least
squares over the reports, older ones forgotten exponentially, with the prior as a tenth of a report of evidence (ridge
regression towards the prior; kept as sums, so that nothing is ever inverted but a 2 x 2 matrix). Each report counts by
its relative error, so that long ones weigh no more than short ones, and one that is more than ``FAR`` times too long
counts by its own size, which makes it harmless (a process that was not scheduled, a page fault). But where ``STREAK``
reports in a row are too long, or too short, the class has changed (throttled, shared): by as much as the least of them
says, which from then on is the prior of what they bear on, and everything before is forgotten.

Decoding whose arithmetic takes longer than its reading (large batches on a bandwidth-optimised device) belongs to F, by
the prior's figures: by the fitted ones an error in one factor would feed itself.
What an engine does besides (Python, launches) is not told apart: it shows as a lower efficiency of what it was beside.
"""

from __future__ import annotations

import math

import msgspec

from hwprobe.cost import EFFICIENCY, USUAL, DeviceCost, Efficiency, ModelSize, device_cost

MEMORY = 40
"""Reports, about, that count."""
FAR = 3.0
"""Times too long or too short from which a report is an outlier."""
CHANGED = 0.25
"""Relative error (logarithm) that counts for a streak."""
STREAK = 5
PART = 0.1
"""Of what the other factor accounts for, that one must account for to be changed by a streak."""
NOTICED = 0.1
"""Weight of the last report in the mean error that people are told."""
LEAST_S = 1e-6
"""A shorter report is no measurement."""
EVIDENCE = 0.1
"""What the prior counts for, in reports."""
FURTHEST = 20.0
"""What a relative error (logarithm) is at most taken for."""
ALIKE = 1e-9
LEAST, MOST = 1e-4, 1e5
"""Bounds of the fitted factors: times slower than the prior. With a data sheet the least is what reaches the peak."""

GUESS = DeviceCost(hardware_class="", flops=1e11, bandwidth=1e10, memory_bytes=1e15)
"""Of a class that no data sheet is known of, a few CPU cores among them: the first reports replace it."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine did since it last said so."""

    busy_s: float  # in which a step ran
    prefill_tokens: float = 0.0  # computed for the first time: what a kept prefix saves is not among them
    steps: float = 0.0  # that sampled
    decode_tokens: float = 0.0  # sampled by those
    context_tokens: float = 0.0  # summed over steps and sequences: the lengths that were read

    def __add__(self, other: Work) -> Work:
        return Work(
            busy_s=self.busy_s + other.busy_s,
            prefill_tokens=self.prefill_tokens + other.prefill_tokens,
            steps=self.steps + other.steps,
            decode_tokens=self.decode_tokens + other.decode_tokens,
            context_tokens=self.context_tokens + other.context_tokens,
        )


class ClassFit(msgspec.Struct, frozen=True, kw_only=True):
    """One class: its prior, and sums over the reports. Factors are times slower than the prior."""

    prior: DeviceCost  # of one engine, at the prior's efficiencies
    efficiency: Efficiency  # the prior's
    peaks: bool = False  # whether the efficiencies are shares of a data sheet's, which nothing exceeds
    compute: float = 1.0  # factors, as fitted
    bandwidth: float = 1.0
    from_compute: float = 1.0  # what they are drawn to: the prior, or what a change has made of it
    from_bandwidth: float = 1.0
    cc: float = 0.0  # weighted sums of products: compute x compute
    cb: float = 0.0
    bb: float = 0.0
    cy: float = 0.0  # compute x busy
    by: float = 0.0
    streak: int = 0  # reports in a row that were too long; negative: too short
    least: float = 0.0  # error of that one among them that was off by least
    spread: float = 0.0  # mean of the last |log(busy / expected)|
    reports: int = 0

    def cost(self) -> DeviceCost:
        """One engine at what it reaches."""
        prior = self.prior
        return msgspec.structs.replace(
            prior, flops=prior.flops / self.compute, bandwidth=prior.bandwidth / self.bandwidth
        )

    def reached(self) -> Efficiency:
        return Efficiency(
            compute=self.efficiency.compute / self.compute, bandwidth=self.efficiency.bandwidth / self.bandwidth
        )

    def seconds(self, model: ModelSize, work: Work) -> tuple[float, float]:
        """(F, M) at the prior's efficiencies."""
        prefill_s = self.prior.prefill_s(model, work.prefill_tokens)
        arithmetic_s = self.prior.prefill_s(model, work.decode_tokens)
        reading = work.steps * model.weight_bytes + work.context_tokens * model.cache_bytes
        reading_s = reading / self.prior.bandwidth
        if arithmetic_s > reading_s:
            return prefill_s + arithmetic_s, 0.0
        return prefill_s, reading_s

    def expected_s(self, model: ModelSize, work: Work) -> float:
        compute_s, bandwidth_s = self.seconds(model, work)
        return self.compute * compute_s + self.bandwidth * bandwidth_s

    def after(self, model: ModelSize, work: Work) -> ClassFit:
        """The fit with one report more; one without work or time is passed over."""
        compute_s, bandwidth_s = self.seconds(model, work)
        expected_s = self.compute * compute_s + self.bandwidth * bandwidth_s
        if not (LEAST_S <= work.busy_s < math.inf and 0 < expected_s < math.inf):
            return self
        error = max(-FURTHEST, min(FURTHEST, math.log(work.busy_s) - math.log(expected_s)))
        far = abs(error) > math.log(FAR)
        size_s = max(work.busy_s, expected_s) if far else expected_s
        keep = 1 - 1 / MEMORY
        c, b, y = compute_s / size_s, bandwidth_s / size_s, work.busy_s / size_s
        sums = msgspec.structs.replace(
            self,
            cc=keep * self.cc + c * c,
            cb=keep * self.cb + c * b,
            bb=keep * self.bb + b * b,
            cy=keep * self.cy + c * y,
            by=keep * self.by + b * y,
            spread=self.spread + NOTICED * (abs(error) - self.spread),
            reports=self.reports + 1,
        )
        return sums._noticing(error)._solved()

    def _noticing(self, error: float) -> ClassFit:
        """Count a streak, and take its consequence."""
        sign = (error > CHANGED) - (error < -CHANGED)
        goes_on = sign * self.streak > 0
        streak = self.streak + sign if goes_on else sign
        least = min(abs(error), self.least) if goes_on else abs(error)
        if abs(streak) < STREAK:
            return msgspec.structs.replace(self, streak=streak, least=least)
        times = math.exp(sign * least)
        by_compute, by_bandwidth = self.compute * math.sqrt(self.cc), self.bandwidth * math.sqrt(self.bb)
        heard = PART * max(by_compute, by_bandwidth)
        least_c, least_b = self._bounds()
        compute = _bounded(self.compute * (times if by_compute >= heard else 1.0), least_c)
        bandwidth = _bounded(self.bandwidth * (times if by_bandwidth >= heard else 1.0), least_b)
        return ClassFit(
            prior=self.prior,
            efficiency=self.efficiency,
            peaks=self.peaks,
            compute=compute,
            bandwidth=bandwidth,
            from_compute=compute,
            from_bandwidth=bandwidth,
            spread=self.spread,
            reports=self.reports,
        )

    def _bounds(self) -> tuple[float, float]:
        """The least factors."""
        return (self.efficiency.compute, self.efficiency.bandwidth) if self.peaks else (LEAST, LEAST)

    def _solved(self) -> ClassFit:
        """The factors with the least squared error. What they are drawn to counts relative to itself."""
        to_c, to_b = self.from_compute, self.from_bandwidth
        cc, bb = self.cc + EVIDENCE / to_c**2, self.bb + EVIDENCE / to_b**2
        cy, by = self.cy + EVIDENCE / to_c, self.by + EVIDENCE / to_b
        least_c, least_b = self._bounds()
        determinant = cc * bb - self.cb**2
        if determinant <= ALIKE * cc * bb:  # all reports are of one mixture: both factors change by the same
            c, b = self.compute, self.bandwidth
            times = (c * cy + b * by) / (c * c * cc + 2 * c * b * self.cb + b * b * bb)
            c, b = _bounded(c * times, least_c), _bounded(b * times, least_b)
            return msgspec.structs.replace(self, compute=c, bandwidth=b)
        compute = (cy * bb - by * self.cb) / determinant
        bandwidth = (by * cc - cy * self.cb) / determinant
        if compute < least_c:  # two figures that can hardly be told apart: the rest is the other one's
            compute, bandwidth = least_c, (by - self.cb * least_c) / bb
        if bandwidth < least_b:
            compute, bandwidth = (cy - self.cb * least_b) / cc, least_b
        return msgspec.structs.replace(self, compute=_bounded(compute, least_c), bandwidth=_bounded(bandwidth, least_b))


def _bounded(factor: float, least: float) -> float:
    return min(MOST, max(least, factor))


def prior_of(hardware_class: str, model: ModelSize) -> ClassFit:
    """From the data sheet and the usual efficiencies; a guess where there is no data sheet."""
    try:
        cost = device_cost(hardware_class, model)
    except ValueError:
        return ClassFit(
            prior=msgspec.structs.replace(GUESS, hardware_class=hardware_class),
            efficiency=Efficiency(compute=1.0, bandwidth=1.0),
        )
    return ClassFit(prior=cost, efficiency=EFFICIENCY.get(hardware_class, USUAL), peaks=True)
