"""What a tracker has kept, read without the code under test: by the libraries' own readers where they have one."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Kept(NamedTuple):
    """One run as its tracker knows it."""

    metrics: dict[str, list[tuple[int, float]]]  # tag -> (step, value), in the order in which they were logged
    config: dict[str, Any]
    name: str
    status: str


BLOCK = 32 * 1024
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def wandb_records(path: Path) -> Iterator[Any]:
    """The protocol buffers of an offline run: LevelDB's log format after a header of 7 bytes (":W&B", 0xBEE1, 0)."""
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415

    data = path.read_bytes()
    assert struct.unpack("<4sHB", data[:7]) == (b":W&B", 0xBEE1, 0)
    place, parts = 7, b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:  # no header fits into what is left of the block
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts = (b"" if kind in (WHOLE, FIRST) else parts) + data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (WHOLE, LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record


def read_wandb(runs: Path, run: Path) -> Kept:
    """All sittings of a run, oldest first; they must have one id."""
    metrics: dict[str, list[tuple[int, float]]] = {}
    config: dict[str, Any] = {}
    name, status, ids = "", "", set[str]()
    for path in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(path):
            if record.HasField("run"):
                name = record.run.display_name
                ids.add(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif record.HasField("history"):
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                version = int(items.pop("version"))
                for tag, value in items.items():
                    if not tag.startswith("_"):
                        metrics.setdefault(tag, []).append((version, json.loads(value)))
            elif record.HasField("exit"):
                status = {0: "finished", 130: "interrupted", 1: "failed"}[record.exit.exit_code]
    assert len(ids) == 1
    return Kept(metrics, config, name, status)


def read_mlflow(runs: Path, run: Path) -> Kept:
    import os  # noqa: PLC0415

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow.tracking import MlflowClient  # noqa: PLC0415

    client = MlflowClient(tracking_uri=f"file:{runs / 'mlflow'}")
    experiment = client.get_experiment_by_name("lakes")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    metrics = {
        tag: [(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, tag)]
        for tag in found.data.metrics
    }
    status = {"FINISHED": "finished", "KILLED": "interrupted", "FAILED": "failed"}[found.info.status]
    return Kept(metrics, found.data.params, found.info.run_name, status)


TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage as store
(name,) = store.get_runs("lakes")
print(json.dumps([name, store.get_logs("lakes", name), store.get_run_config("lakes", name), store.get_alerts("lakes")]))
"""


def read_trackio(runs: Path, run: Path) -> Kept:
    """In a process of its own: the library reads its directory from the environment, once."""
    import os  # noqa: PLC0415
    import subprocess  # noqa: PLC0415
    import sys  # noqa: PLC0415

    environment = {**os.environ, "TRACKIO_DIR": str(runs / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    name, logs, config, alerts = json.loads(done.stdout.splitlines()[-1])
    metrics: dict[str, list[tuple[int, float]]] = {}
    for entry in logs:
        for tag, value in entry.items():
            if tag not in ("step", "timestamp"):
                metrics.setdefault(tag, []).append((entry["step"], value))
    return Kept(metrics, config, name, max(alerts, key=lambda alert: alert["timestamp"])["title"])


READERS = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}
