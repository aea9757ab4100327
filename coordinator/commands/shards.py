"""``bin/admin shards``: the ensembles of a sharded metadata store, and their change while jobs use it.

admin shards show --store zk://h1:2181                  what each holds, and how fast it answers
admin shards add h4:2181,h5:2181 --store zk://h1:2181   put an ensemble into the ring; its share moves there
admin shards remove 2 --store zk://h1:2181              move what shard 2 holds to the others, and take it out
admin shards remove 2 --dead --store zk://h1:2181       take it out although it is lost for good, with what it held
admin shards resume --store zk://h1:2181                finish a change that was interrupted
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import msgspec

from coordinator.metadata import open_sharded
from coordinator.metadata.abandoning import Abandoned, abandon
from coordinator.metadata.copying import keys_on
from coordinator.metadata.credentials import CredentialsError, read_credentials
from coordinator.metadata.moving import Moved, Mover
from coordinator.metadata.protocol import StoreError
from coordinator.metadata.ringstate import FENCE_PATH, SLOTS, source
from coordinator.metadata.sharded import ShardedStore

VERBS = ("show", "add", "remove", "resume")


class ShardLine(msgspec.Struct, frozen=True):
    """One ensemble."""

    id: str
    hosts: str
    prefixes: int  # that it holds
    read_ms: float
    epoch: int  # of its fence
    home: bool


class Shards(msgspec.Struct, frozen=True):
    """The ring."""

    epoch: int
    shards: list[ShardLine]
    moving: str = ""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="admin shards",
        description="The ensembles of a sharded metadata store.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("verb", choices=VERBS)
    result.add_argument("what", nargs="?", default="", help="add: host:port,host:port; remove: the shard's number")
    result.add_argument("--store", required=True, metavar="zk://HOME", help="as in coordinator.store; home is enough")
    result.add_argument("--credentials", type=Path, metavar="FILE", help="as in coordinator.store_credentials")
    result.add_argument("--timeout", type=float, default=10.0, metavar="S", help="for each call (default: 10)")
    result.add_argument("--json", action="store_true", help="print one JSON object")
    result.add_argument("--dead", action="store_true", help="remove: the ensemble does not answer and never will")
    result.add_argument("--yes", action="store_true", help="do not ask before a change")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if (arguments.verb in ("add", "remove")) != bool(arguments.what):
        parser().error(f"{arguments.verb}: expected {'one ensemble' if not arguments.what else 'nothing more'}")
    if arguments.dead and arguments.verb != "remove":
        parser().error(f"{arguments.verb}: --dead goes with remove")
    if arguments.verb != "show" and not arguments.yes and not _confirmed(arguments):
        return 2
    try:
        answer = asyncio.run(_carry_out(arguments))
    except (StoreError, CredentialsError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(answer)
    return 0


def _confirmed(arguments: argparse.Namespace) -> bool:
    what = f"{arguments.verb} {arguments.what}".strip()
    if not sys.stdin.isatty():
        does = "gives up what that ensemble holds" if arguments.dead else "moves entries under running jobs"
        print(f"error: {what} {does}; say --yes to do it unasked", file=sys.stderr)
        return False
    if arguments.dead:
        print(f"{what} --dead: what shard {arguments.what} holds is lost for good, also if its disks are still there.")
    else:
        print(f"{what}: entries move under running jobs, which each wait for theirs for a moment.")
    return input("Go on? [y/N] ").strip().lower() in ("y", "yes")


async def _carry_out(arguments: argparse.Namespace) -> str:
    credentials = None if arguments.credentials is None else read_credentials(arguments.credentials)
    without = (arguments.what,) if arguments.dead else ()
    store = await open_sharded(arguments.store, timeout_s=arguments.timeout, credentials=credentials, without=without)
    try:
        if arguments.dead:
            abandoned = await abandon(store.ring, arguments.what)
            return msgspec.json.encode(abandoned).decode() if arguments.json else gone(abandoned)
        if arguments.verb == "show":
            shards = await look(store)
            return msgspec.json.encode(shards).decode() if arguments.json else described(shards)
        mover = Mover(store.ring, told=lambda line: print(line, file=sys.stderr, flush=True))
        changes = {"add": mover.add, "remove": mover.remove}
        verb = arguments.verb
        moved = await (mover.resume() if verb == "resume" else changes[verb](arguments.what))
        return msgspec.json.encode(moved).decode() if arguments.json else told(moved)
    finally:
        await store.close()


async def look(store: ShardedStore) -> Shards:
    """What the ensembles hold just now."""
    state = store.ring.state
    return Shards(
        state.epoch,
        list(await asyncio.gather(*(_line(store, member.id) for member in state.members))),
        ""
        if not state.before
        else f"{state.done / SLOTS:.0%} of the way from {_ids(state.before)} to {_ids(state.ring)}",
    )


async def _line(store: ShardedStore, shard: str) -> ShardLine:
    ring, loop = store.ring, asyncio.get_running_loop()
    before = loop.time()
    await ring.stores[shard].get(FENCE_PATH)
    read_ms = (loop.time() - before) * 1e3
    keys = await keys_on(ring.stores[shard])
    held = sum(source(ring.state, key) == shard for key in keys)
    epoch = await ring.confirm(shard)
    return ShardLine(shard, ring.state.hosts(shard), held, round(read_ms, 2), epoch, shard == "0")


def described(shards: Shards) -> str:
    lines = [f"epoch {shards.epoch}" + (f", moving: {shards.moving}" if shards.moving else "")]
    lines.append(f"{'shard':8}{'prefixes':>9}{'read':>12}{'fence':>8}  servers")
    for line in shards.shards:
        name = f"{line.id} home" if line.home else line.id
        lines.append(f"{name:8}{line.prefixes:9}{line.read_ms:9.2f} ms{line.epoch:8}  {line.hosts}")
    return "\n".join(lines)


def told(moved: Moved) -> str:
    return (
        f"{moved.prefixes} of {moved.of} placement prefixes moved ({moved.versus_bound:.2f} of the bound, 1.2/"
        f"{moved.shards}); the ring has epoch {moved.epoch}"
    )


def gone(abandoned: Abandoned) -> str:
    lines = [
        f"shard {abandoned.shard} ({abandoned.hosts}) is out of the ring, which has epoch {abandoned.epoch}; "
        f"{abandoned.lost} placement prefixes went with it, but for what clients that live tell again:",
        *(f"  {prefix}" for prefix in abandoned.prefixes),
    ]
    if abandoned.unfinished:
        lines.append("another change of the ring waits: bin/admin shards resume")
    return "\n".join(lines)


def _ids(shards: tuple[str, ...]) -> str:
    return "(" + ", ".join(shards) + ")"


if __name__ == "__main__":
    sys.exit(main())
