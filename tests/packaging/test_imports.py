"""Control processes start without the heavy libraries: importing their modules loads none of them."""

from __future__ import annotations

import json
import sys

import pytest

from tests.packaging.support import ROOT, run

HEAVY = ["torch", "transformers", "vllm", "megatron", "kazoo", "gymnasium", "tensorboard", "ray"]
HEAVY += ["wandb", "mlflow", "trackio"]

IMPORT_ALL = """
import importlib, json, pkgutil, sys
names = []
for name in sys.argv[1].split(","):
    module = importlib.import_module(name)
    names.append(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
            names.append(found.name)
print(json.dumps({"names": names, "loaded": sorted({name.split(".")[0] for name in sys.modules})}))
"""


def imported(packages: str) -> tuple[list[str], set[str]]:
    done = run([sys.executable, "-c", IMPORT_ALL, packages], env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return answer["names"], set(answer["loaded"])


@pytest.mark.parametrize(
    ("packages", "least"),
    [
        ("bus", 5),
        ("actors.core,actors.settings,actors.policy,actors.trajectory", 4),
        ("actors.proxy.engines.protocol,actors.trainer.backends.protocol,actors.weightsync.manifest", 3),
        ("coordinator.job,coordinator.scheduling,coordinator.resources,coordinator.observe", 4),
        ("hwprobe", 5),
    ],
)
def test_control_side_modules_load_no_heavy_library(packages: str, least: int) -> None:
    names, loaded = imported(packages)
    assert len(names) >= least
    assert loaded.isdisjoint(HEAVY)


def test_the_check_sees_a_heavy_library_when_there_is_one() -> None:
    assert "gymnasium" in imported("actors.env.frozenlake,gymnasium.error")[1]
