"""The shell's commands: what they are called, take and do; help, completion and dispatch all read this one table."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from difflib import get_close_matches
from typing import Literal

import msgspec

from coordinator.shell import looks, orders
from coordinator.shell.answers import Help, Helps
from coordinator.shell.connection import Connection, ShellError

Kind = Literal["node", "host", "stream", "engine", "ticket", "number", "command", "name"]
"""Of an argument: completion offers live names by it, and errors say by it what was expected."""


Danger = Callable[..., Awaitable[str]]
"""What a command may cost as things are, "" for nothing; takes what the command takes."""


class Argument(msgspec.Struct, frozen=True):
    name: str
    kind: Kind
    optional: bool = False

    def __str__(self) -> str:
        return f"[{self.name}]" if self.optional else self.name


class Command(msgspec.Struct, frozen=True):
    """``work`` answers, or with ``streams`` yields, structs that ``text`` knows."""

    name: str
    purpose: str
    work: Callable[..., Awaitable[msgspec.Struct] | AsyncIterator[msgspec.Struct]]
    arguments: tuple[Argument, ...] = ()
    more: str = ""
    danger: str | Danger = ""  # what it may cost: it asks first
    streams: bool = False

    @property
    def usage(self) -> str:
        return " ".join([self.name, *map(str, self.arguments)])

    def help(self) -> Help:
        danger = self.danger if isinstance(self.danger, str) else "it depends on how things are"
        return Help(self.usage, self.purpose, self.more, danger)


NODE = Argument("NODE", "node")
ANY_NODE = Argument("NODE", "node", optional=True)
TICKET = Argument("TICKET", "ticket")


async def show_help(run: Connection, *words: str) -> Helps:
    """Of one command, or all."""
    if not words:
        return Helps([command.help() for command in COMMANDS])
    found = [c for c in COMMANDS if c.name == " ".join(words) or c.name.split()[0] == " ".join(words)]
    if not found:
        raise unknown(words)
    return Helps([command.help() for command in found])


COMMANDS: tuple[Command, ...] = (
    Command("status", "how far the run is, and what it is doing", looks.status),
    Command("jobs", "the run directories beside this one: which run, how far they came", looks.jobs),
    Command(
        "nodes",
        "every process of the run, and whether it answers",
        looks.nodes,
        more="Those that joined, and those that they started. One that is silent says how long it was waited for.",
    ),
    Command(
        "actors",
        "the actors of a node (of all): what waits for them, what they handled and how fast",
        looks.actors,
        (ANY_NODE,),
        more="p50 and p99 are the bounds of the histogram's buckets in which they lie. Below: the node's counters.",
    ),
    Command(
        "engines",
        "the inference engines, as the proxy sees them, and their GPUs",
        looks.engines,
        more="Below, where engines are on GPUs: how busy these are by their driver (the busiest of an engine's), "
        "memory, power (their sum), temperature (of the hottest), traffic as the GPUs see it. '-' is what a GPU does "
        "not tell.",
    ),
    Command("trajectories", "what runs now, and what each waits for", looks.trajectories),
    Command(
        "follow",
        "watch a running trajectory, turn by turn, to its end",
        looks.follow,
        (Argument("TICKET", "ticket", optional=True),),
        more="Without a ticket: the one that began last, or begins next. Ctrl-C ends the watching, not the trajectory.",
        streams=True,
    ),
    Command(
        "explain",
        "the whole life of a trajectory, and why it is where it is",
        looks.explain,
        (TICKET,),
        more="Also of one that has ended, in an earlier sitting of the run too: its ledger's journal is read.",
    ),
    Command("queues", "where work waits: admission, batch, engines, mailboxes", looks.queues),
    Command("versions", "the learner's version, and what each engine has proven to serve", looks.versions),
    Command("shards", "the metadata store: calls, failures and latencies of each shard", looks.shards),
    Command("pools", "the devices of each hardware class, over all hosts", looks.pools),
    Command(
        "hosts",
        "the hosts of the run: which are in use, spare or in quarantine, and how often they failed",
        looks.hosts,
        more="A host whose roles fail again and again is left out for a while; 'release' lets it back in.",
    ),
    Command("hardware", "devices, what they are good for, and which process runs where", looks.hardware, (ANY_NODE,)),
    Command(
        "metrics",
        "all counters and gauges, as Prometheus reads them",
        looks.metrics,
        (Argument("PREFIX", "name", optional=True),),
    ),
    Command("pause", "admit and train nothing until 'resume'; what runs goes on to its end", orders.pause),
    Command("resume", "go on after 'pause'", orders.resume),
    Command(
        "set alpha",
        "how many versions older than the learner's a trajectory may be that is trained on",
        orders.set_alpha,
        (Argument("N", "number"),),
        danger=orders.lower_alpha,
    ),
    Command(
        "set lambda",
        "how many groups run beyond the need, so that the slowest are not waited for",
        orders.set_lambda,
        (Argument("N", "number"),),
    ),
    Command(
        "set weight",
        "how much a stream of tasks counts among the others (scheduling.mix), from now on",
        orders.set_weight,
        (Argument("STREAM", "stream"), Argument("WEIGHT", "name")),
    ),
    Command(
        "abort",
        "end a trajectory that waits or runs",
        orders.abort,
        (TICKET,),
        more="Another one of its group runs in its place.",
        danger="it is counted lost (aborted_by_order), and what it has played is gone",
    ),
    Command(
        "drain",
        "give a node's env host no new trajectories",
        orders.drain,
        (Argument("NODE", "host"),),
        more="What runs there goes on to its end. 'fill' undoes it.",
        danger="nothing new is started there until 'fill'; where it is the last one, the run stands still",
    ),
    Command("fill", "give a node's env host trajectories again", orders.fill, (Argument("NODE", "host"),)),
    Command(
        "release",
        "let a host in quarantine be given roles again",
        orders.release,
        (Argument("HOST", "name"),),
        danger="it failed several times within ten minutes; the next time it is left out for longer",
    ),
    Command(
        "let-go",
        "let a node go, so that another one takes its roles while the run goes on",
        orders.let_go,
        (Argument("NODE", "node"),),
        more="An env host once it is empty (it is drained). Any other ends after the step under way, the trainer's "
        "after a checkpoint; the run then waits for a node with the same roles, which goes on with what was under way.",
        danger="the run stands still until another node with its roles joins; if none does in time, it fails",
    ),
    Command(
        "step-down",
        "end the coordinator's process, so that a standby leads the run on",
        orders.step_down,
        danger="this process ends; the standby's leads on with everything that runs",
    ),
    Command(
        "rebalance",
        "let engines that hold more than their share of the trajectories let some go",
        orders.rebalance,
        more="Their next turns are routed by load alone, and their prefixes computed anew where they go.",
    ),
    Command(
        "undo-mapping",
        "take back the last order of which hardware class plays which task",
        orders.undo_mapping,
        more="'hardware' shows the orders. For ten minutes only another 'undo-mapping' changes the mapping then.",
    ),
    Command(
        "audit",
        "who ordered what, and what came of it: the last lines of the audit log",
        orders.audit,
        (Argument("N", "number", optional=True),),
    ),
    Command("help", "the commands, or what one does", show_help, (Argument("COMMAND", "command", optional=True),)),
)


def find(words: Sequence[str]) -> tuple[Command, list[str]]:
    """The command that these words begin with, and its arguments. Raises ``ShellError`` saying what was expected."""
    for command in sorted(COMMANDS, key=lambda one: -len(one.name)):
        name = command.name.split()
        if list(words[: len(name)]) == name:
            arguments = list(words[len(name) :])
            _check(command, arguments)
            return command, arguments
    raise unknown(words)


def unknown(words: Sequence[str]) -> ShellError:
    names = [command.name for command in COMMANDS]
    close = get_close_matches(" ".join(words[:2]), names, 1) or get_close_matches(words[0], names, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"expected one of: {', '.join(names)}"
    return ShellError(f"unknown command {' '.join(words)!r}; {hint}")


def _check(command: Command, arguments: list[str]) -> None:
    if command.name == "help":
        return
    needed = sum(not argument.optional for argument in command.arguments)
    if not needed <= len(arguments) <= len(command.arguments):
        found = f"found {' '.join(arguments)!r}" if arguments else "found nothing more"
        raise ShellError(f"expected: {command.usage}; {found}")
    for argument, value in zip(command.arguments, arguments, strict=False):
        if argument.kind == "number" and not value.isdigit():
            raise ShellError(f"expected: {command.usage}, with a whole number of 0 or more; found {value!r}")
