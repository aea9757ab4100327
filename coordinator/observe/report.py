"""``report.html``: what a run learned, what it lost, and who did what when, in one file that loads nothing.

Invariant: a report can be made at any time from what is in the run directory, also while the run goes on and after a
crash; what is missing or unreadable is said in its place. The same files give the same report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from coordinator.observe.charts import Band, Point, Series, chart
from coordinator.observe.gantt import timeline
from coordinator.observe.history import History, read_history
from coordinator.observe.imitation import imitation_section
from coordinator.observe.lines import replace_file
from coordinator.observe.page import escaped, folded, page, table, tiles
from coordinator.observe.records import EvalRecord, SampleRecord, StepRecord
from coordinator.observe.rundir import RunDirectory
from coordinator.observe.text import count, duration, lost, number, percent, whole

MOST_EVALUATIONS = 60
MOST_TURN_TEXT = 4_000
MOST_TURNS = 200
FACTS = {
    "environment": "environment.name",
    "engine": "rollout.engine",
    "engines": "rollout.engines",
    "trainer": "train.backend",
    "algorithm": "train.algorithm",
    "alpha": "scheduling.alpha",
    "groups a step": "train.groups_per_step",
    "group size": "train.group_size",
    "learning rate": "train.learning_rate",
    "store": "coordinator.store",
    "seed": "seed",
}
"""What the head of the report names, and where it stands in the job."""


def write_report(run: RunDirectory, *, status: str = "running") -> Path:
    """Write ``report.html`` anew and return it. ``status`` is shown as given: "running", "finished", "failed: ...".

    Takes about a second and 10 MB for 4,000 steps with 90,000 spans, and no more memory for more: call it in an
    executor.
    """
    replace_file(run.report, render(read_history(run), status))
    return run.report


def render(history: History, status: str) -> bytes:
    """The report as HTML."""
    if history.imitation:
        return page(f"{history.name}: {status}", "\n".join(_imitation(history, status)))
    sections = [
        _head(history, status),
        "<h2>Learning curve <small>by version of the weights</small></h2>" + _learning(history),
        "<h2>Training</h2>" + _training(history.steps),
        "<h2>Who did what when</h2>" + _timeline(history),
        "<h2>Lost trajectories</h2>" + _losses(history),
        "<h2>Evaluations</h2>" + _evaluations(history.evaluations),
        "<h2>Trajectories</h2>" + _samples(history.samples),
        "<h2>Job</h2>" + _job(history.job),
    ]
    return page(f"{history.name}: {status}", "\n".join(sections))


def _imitation(history: History, status: str) -> list[str]:
    return [
        _head(history, status),
        "<h2>Imitation <small>by version of the weights</small></h2>" + imitation_section(history.imitation),
        "<h2>Who did what when</h2>" + _timeline(history),
        "<h2>Job</h2>" + _job(history.job),
    ]


def _head(history: History, status: str) -> str:
    colour = {"finished": " good", "failed": " bad"}.get(status.partition(":")[0], "")
    facts = [f"{label} {value}" for label, key in FACTS.items() if (value := _setting(history.job, key)) is not None]
    notes = [" · ".join(facts)] if facts else []
    if history.unreadable:
        notes.append(f"{history.unreadable} lines of the run's files could not be read and are left out here")
    return (
        f'<h1>{escaped(history.name)}<span class="badge{colour}">{escaped(status)}</span></h1>'
        + "".join(f'<p class="muted">{escaped(note)}</p>' for note in notes)
        + ("" if history.imitation else tiles(_figures(history)))
    )


def _figures(history: History) -> list[tuple[str, str]]:
    if not history.steps:
        return [("steps", "0"), ("trajectories lost", str(sum(history.losses.counts.values())))]
    last = history.steps[-1]
    total = _setting(history.job, "train.steps")
    figures = [
        ("steps", f"{last.step}/{total}" if total is not None else str(last.step)),
        ("time", duration(last.elapsed_s)),
        ("reward, trend", number(last.reward_trend)),
        ("success, training", percent(last.success_rate)),
    ]
    if history.evaluations:
        newest, best = history.evaluations[-1], _best(history.evaluations)
        figures.append((f"success, evaluation v{newest.version}", percent(newest.success)))
        figures.append((f"best evaluation, v{best.version}", percent(best.success)))
    figures += [
        ("trajectories trained", count(history.trained)),
        ("tokens trained", count(history.tokens)),
        ("tokens/s sampled", whole(last.tokens_per_s)),
        ("trajectories lost", lost(history.losses.counts or last.lost).partition(" ")[0]),
    ]
    return figures


def _learning(history: History) -> str:
    steps = history.steps
    reward = chart(
        "Reward",
        [
            Series("mean of a step", 1, _points(steps, lambda record: record.reward_mean), "faint"),
            Series("trend", 1, _points(steps, lambda record: record.reward_trend)),
        ],
        band=Band(
            _points(steps, lambda record: max(record.reward_min, record.reward_mean - record.reward_std)),
            _points(steps, lambda record: min(record.reward_max, record.reward_mean + record.reward_std)),
        ),
    )
    evaluated = [(float(record.version), record.success) for record in history.evaluations]
    success = chart(
        "Success",
        [
            Series("training", 1, _points(steps, lambda record: record.success_rate)),
            Series("evaluation", 2, evaluated, "dots"),
        ],
        bounds=(0.0, 1.0),
        text=percent,
    )
    return f'<div class="grid wide">{success}{reward}</div>'


def _training(steps: Sequence[StepRecord]) -> str:
    phases = sorted({phase for record in steps for phase in record.seconds})
    charts = [
        chart("Loss", [Series("", 1, _points(steps, lambda record: record.loss))]),
        chart("Gradient norm", [Series("", 1, _points(steps, lambda record: record.grad_norm))]),
        chart("Entropy, nats a token", [Series("", 1, _points(steps, lambda record: record.entropy))]),
        chart(
            "Staleness, versions",
            [
                Series("greatest", 2, _points(steps, lambda record: record.staleness_max), "faint"),
                Series("mean", 1, _points(steps, lambda record: record.staleness_mean)),
            ],
            text=lambda value: number(value, 1),
        ),
        chart("Tokens/s sampled", [Series("", 1, _points(steps, lambda record: record.tokens_per_s))], text=whole),
        chart("Turns a trajectory", [Series("", 1, _points(steps, lambda record: record.turns_mean))]),
        *(
            chart(f"{name.replace('_', ' ').capitalize()} a trajectory", [Series("", 1, _environment(steps, name))])
            for name in sorted({name for record in steps for name in record.environment})
        ),
        chart(
            "Trainer against rollout",
            [
                Series("ratio - 1", 1, _points(steps, lambda record: record.ratio_mean - 1.0)),
                Series("KL", 2, _points(steps, lambda record: record.kl_rollout)),
            ],
        ),
        chart(
            "Seconds a step",
            [Series(phase, 1 + index % 7, _phase(steps, phase)) for index, phase in enumerate(phases)],
        ),
    ]
    return f'<div class="grid">{"".join(charts)}</div>'


def _timeline(history: History) -> str:
    both = history.overlap
    if not both.training_s:
        return timeline(history.spans)
    sentence = (
        f"Engines generated for {both.generating_s:.1f} s, the trainer trained for {both.training_s:.1f} s; "
        f"both at once for {both.both_s:.1f} s, {percent(both.share)} of the training time."
    )
    return f'<p class="muted" style="margin:0 0 10px">{sentence}</p>{timeline(history.spans)}'


def _losses(history: History) -> str:
    """The ledger's word, which goes on where no step is made any more."""
    counts = history.losses.counts or (history.steps[-1].lost if history.steps else {})
    counts = {reason: n for reason, n in counts.items() if n}
    if not counts:
        return '<div class="card"><p class="muted">none</p></div>'
    most = max(counts.values())
    rows = (
        f'<span>{escaped(reason)}</span><div style="width:{100 * n / most:.1f}%"></div><b>{n}</b>'
        for reason, n in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )
    words = [f"{reason}, the last: {text}" for reason, text in sorted(history.losses.details.items())]
    said = "".join(f'<p class="muted">{escaped(text)}</p>' for text in words)
    return f'<div class="card reasons">{"".join(rows)}</div>{said}'


def _evaluations(evaluations: Sequence[EvalRecord]) -> str:
    if not evaluations:
        return '<div class="card"><p class="muted">none yet</p></div>'
    best = _best(evaluations)
    rows = [
        (
            "best" if record is best else "",
            [
                f"v{record.version}" + (" (best)" if record is best else ""),
                percent(record.success),
                number(record.return_mean),
                number(record.turns_mean, 1),
                str(record.episodes),
            ],
        )
        for record in evaluations
    ]
    head = ["version", "success", "return", "turns", "episodes"]
    older = len(rows) - MOST_EVALUATIONS
    shown = table(head, reversed(rows[-MOST_EVALUATIONS:]))
    return shown + folded(f"{older} older ones", table(head, reversed(rows[:older]))) if older > 0 else shown


def _samples(samples: Sequence[SampleRecord]) -> str:
    if not samples:
        return '<div class="card"><p class="muted">none yet</p></div>'
    places = range(len(samples))  # of equal ones the newest is shown
    chosen = {
        "Latest": len(samples) - 1,
        "Best": max(places, key=lambda place: (samples[place].reward, place)),
        "Worst": min(places, key=lambda place: (samples[place].reward, -place)),
    }
    labels: dict[int, list[str]] = {}
    for label, place in chosen.items():
        labels.setdefault(place, []).append(label)
    return f'<div class="grid wide">{"".join(_sample(" and ".join(n), samples[p]) for p, n in labels.items())}</div>'


def _sample(label: str, sample: SampleRecord) -> str:
    outcome = "success" if sample.success else "no success"
    turns = [_turn(speaker, words) for speaker, words in sample.transcript[:MOST_TURNS]]
    if len(sample.transcript) > MOST_TURNS:
        turns.append(f'<p class="muted">{len(sample.transcript) - MOST_TURNS} more are in samples/</p>')
    title = f"{label.capitalize()}: reward {number(sample.reward)}, {outcome}"
    about = f'<p class="muted">trajectory {escaped(sample.ticket)}, version {sample.version}</p>'
    return folded(title, f'{about}<div class="talk">{"".join(turns)}</div>', unfolded=True)


def _turn(speaker: str, words: str) -> str:
    more = len(words) - MOST_TURN_TEXT
    shown = words[:MOST_TURN_TEXT].rstrip() + (f" … {more} more characters are in samples/" if more > 0 else "")
    kind = "action" if speaker == "action" else "other"
    return f'<div class="turn {kind}"><span>{escaped(speaker)}</span><pre>{escaped(shown)}</pre></div>'


def _job(job: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(job, sort_keys=False, allow_unicode=True, width=120)
    return folded("job.yaml, resolved", f"<pre>{escaped(text)}</pre>")


def _best(evaluations: Sequence[EvalRecord]) -> EvalRecord:
    return max(reversed(evaluations), key=lambda record: record.success)


def _points(steps: Sequence[StepRecord], value: Callable[[StepRecord], float]) -> list[Point]:
    return [(float(record.version), value(record)) for record in steps]


def _phase(steps: Sequence[StepRecord], phase: str) -> list[Point]:
    return _points(steps, lambda record: record.seconds.get(phase, float("nan")))


def _environment(steps: Sequence[StepRecord], name: str) -> list[Point]:
    return _points(steps, lambda record: record.environment.get(name, float("nan")))


def _setting(job: dict[str, Any], key: str) -> Any:
    node: Any = job
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node
