"""``bin/serve JOB|RUN``: a policy behind an OpenAI-compatible endpoint; every session is kept, token by token."""

from __future__ import annotations

import argparse
import asyncio
import sys
from datetime import datetime
from pathlib import Path

import msgspec

from actors.env.agents.play import Door
from actors.settings import AgentSettings, EnvironmentSettings
from actors.trainer.dump import Manifest, write_dump
from actors.trainer.store import StoreCorrupt, read_records
from coordinator.checkpoints import CheckpointUnusable
from coordinator.commands.finished import FinishedRun, Interrupted, Player, PlayFailed
from coordinator.commands.offline import empty_directory
from coordinator.commands.rollout import describe_dump
from coordinator.commands.train import prepare
from coordinator.commands.usage import examples
from coordinator.dumping import manifest_of
from coordinator.job import Job, JobError, check
from coordinator.observe.rundir import RunDirectoryError
from coordinator.pipeline import Pipeline
from coordinator.preflight import check_policy
from coordinator.roles import GUESTS

NOBODY = "actors.env.agents.nobody:nobody"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="serve",
        description="Serve a policy to whoever has the token, until interrupted. Base URL and key are printed. A key "
        "is TOKEN.NAME: each NAME is a session of its own, whose exact tokens and log-probabilities are kept.",
        epilog=examples(
            "serve runs/latest",
            "serve my.yaml --port 8000 --out dumps/guests",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("source", type=Path, metavar="JOB|RUN", help="job file (YAML), or run directory")
    result.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings to change")
    result.add_argument("--version", default="best", help="checkpoint of a run: best (default), latest or a version")
    result.add_argument("--port", type=int, default=0, help="where to listen on loopback (default: any free port)")
    result.add_argument("--sessions", type=int, default=64, help="how many may be open at a time (default: 64)")
    result.add_argument("--out", type=Path, help="directory of the dump (default: dumps/TIME-NAME)")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_intermixed_args(argv)
    try:
        player = _player(arguments)
        out = arguments.out or Path("dumps") / f"{datetime.now():%Y%m%d-%H%M%S}-{player.job.name}"
        empty_directory(out)
        return _serve(player, out)
    except (JobError, RunDirectoryError, CheckpointUnusable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except PlayFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _player(arguments: argparse.Namespace) -> Player:
    """Raises ``JobError``, ``RunDirectoryError``, ``CheckpointUnusable``."""
    player: Player
    if arguments.source.is_dir():
        player = FinishedRun(arguments.source, arguments.version, arguments.overrides)
    else:
        job, _, _ = prepare(arguments.source, arguments.overrides)
        check_policy(job)
        player = Player(job, arguments.source.resolve().parent)
    player.job = serving(player.job, arguments.port, arguments.sessions)
    return player


def serving(job: Job, port: int, sessions: int) -> Job:
    """The same policy and engines, with nobody but guests. Raises ``JobError``."""
    if sessions < 1:
        raise JobError(f"--sessions: expected 1 or more, found {sessions}")
    agent = msgspec.structs.replace(job.environment.agent or AgentSettings(), port=port, guests=sessions)
    replaced = msgspec.structs.replace(job, environment=EnvironmentSettings(name=NOBODY, workers=1, agent=agent))
    check(replaced)
    return replaced


def _serve(player: Player, out: Path) -> int:
    manifest, written = manifest_of(player.job), list[Manifest]()

    def keep(directory: Path) -> None:
        files = sorted((directory / GUESTS).glob("*.log"))
        try:
            sessions = [trajectory for file in files for trajectory, _ in read_records(file)]
            if sessions:
                written.append(write_dump(out, manifest, sessions, {}))
        except (OSError, StoreCorrupt) as error:
            raise PlayFailed(f"{out}: the dump could not be written: {error}") from None

    try:
        player.run(_serving, 1, lambda text: print(text, file=sys.stderr, flush=True), keep=keep)
    except Interrupted:  # as it always ends
        pass
    finally:
        if not any(out.iterdir()):
            out.rmdir()
        print(describe_dump(out, written[0]) if written else "nothing was asked, and nothing is kept")
    return 0


async def _serving(pipeline: Pipeline, directory: Path) -> str:
    version = await pipeline.ready()
    (file,) = (directory / GUESTS).glob("*.json")
    door = msgspec.json.decode(file.read_bytes(), type=Door)
    print(f"serving version {version}; Ctrl-C ends it", file=sys.stderr)
    print(f"base URL  {door.base_url}\nAPI key   {door.token}.NAME", flush=True)
    await asyncio.Event().wait()
    return "served"


if __name__ == "__main__":
    sys.exit(main())
