"""``bin/keys``: make, rotate and show the key file with which the nodes of a cluster join each other.

    bin/keys make FILE                      a new cluster key: every node that has the file may join
    bin/keys rotate FILE [--overlap 24h]    a new key; the old one is good until the overlap is over
    bin/keys node FILE NAME NODE-FILE       a file for one node, which can then come under no other name
    bin/keys remove FILE NAME               take a node off the list
    bin/keys show FILE                      what a file holds, without its secrets

Running nodes read their file again when it changes, so a changed file only needs to be copied to the hosts that have
the one before; after ``rotate``, before the overlap is over.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bus import keyring
from bus.keyring import KeyFile, SecurityError

DEFAULT_OVERLAP = "24h"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """A duration such as 30m, 24h or 0."""
    number, unit = (text[:-1], text[-1:]) if text[-1:] in _UNITS else (text, "s")
    try:
        value = float(number) * _UNITS[unit]
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration: expected a number with s, m, h or d, as in 24h")
    return value


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="keys", description="Make, rotate and show the keys with which the nodes of a cluster join each other."
    )
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    make = commands.add_parser("make", help="a new cluster key: every node that has the file may join")
    rotate = commands.add_parser("rotate", help="a new key; the old one is good until the overlap is over")
    node = commands.add_parser("node", help="a file for one node, which can then come under no other name")
    remove = commands.add_parser("remove", help="take a node off the list")
    show = commands.add_parser("show", help="what a file holds, without its secrets")
    make.add_argument("file", type=Path, help="where to write it (mode 0600); an existing file is left alone")
    for command in (rotate, node, remove):
        command.add_argument("file", type=Path, help="the cluster's key file; it is replaced as a whole")
    show.add_argument("file", type=Path, help="a key file")
    rotate.add_argument(
        "--overlap",
        type=seconds,
        default=DEFAULT_OVERLAP,
        metavar="TIME",
        help=f"how long the old key is still good, as in 30m (default: {DEFAULT_OVERLAP}); 0 if it is in wrong hands",
    )
    for command in (node, remove):
        command.add_argument("name", help="name of the node (start-ROLE --name); its children are called NAME.*")
    node.add_argument("node_file", type=Path, help="that node's file; one that it has already gets the present list")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    path: Path = arguments.file
    try:
        if arguments.command == "make":
            keyring.create(path, keyring.new_cluster())
            print(f"{path}: made; copy it to every host and pass it with --key-file")
            return 0
        content = keyring.load(path)
        if arguments.command == "rotate":
            _rotate(path, content, arguments.overlap)
        elif arguments.command == "node":
            _node(path, content, arguments.name, arguments.node_file)
        elif arguments.command == "remove":
            _remove(path, content, arguments.name)
        else:
            _show(path, content, time.time())
    except SecurityError as error:
        where = "" if str(error).startswith("key file") else f"key file {path}: "
        print(f"error: {where}{error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or path}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def _rotate(path: Path, content: KeyFile, overlap_s: float) -> None:
    now = time.time()
    keyring.replace(path, keyring.rotate(content, now=now, overlap_s=overlap_s))
    nodes = sorted({entry.node for entry in content.allow if entry.node})
    also = f", and run bin/keys node again for {', '.join(nodes)}" if nodes else ""
    print(f"{path}: a new key, in use from {_date(now + overlap_s)}; copy it to every host before that{also}")


def _node(path: Path, content: KeyFile, name: str, node_file: Path) -> None:
    if node_file.exists():
        own = keyring.load(node_file)
        if own.node != name:
            raise SecurityError(f"{node_file} exists, and is not the file of node {name!r}")
        keyring.replace(node_file, keyring.update_node(content, own))
        print(f"{node_file}: up to date for node {name}; copy it to its host")
        return
    cluster, own = keyring.add_node(content, name)
    keyring.create(node_file, own)
    keyring.replace(path, cluster)
    print(f"{node_file}: made for node {name}; {path}: lists it now; copy each to where it is needed")


def _remove(path: Path, content: KeyFile, name: str) -> None:
    keyring.replace(path, keyring.remove_node(content, name))
    print(f"{path}: without node {name} now; copy it to every host")


def _show(path: Path, content: KeyFile, now: float) -> None:
    speaking = content.at(now).pair
    print(f"{path}: {f'key file of node {content.node}' if content.node else 'key file of a cluster'}")
    for pair in content.pairs:
        use = "in use" if pair is speaking else "retired" if pair.until is not None and pair.until <= now else "next"
        print(f"  own     {pair.public}  {use}{_until(pair.until)}")
    for entry in content.allow:
        retired = "  retired" if entry.until is not None and entry.until <= now else ""
        print(f"  listed  {entry.public}  {entry.node or 'any node'}{retired}{_until(entry.until)}")


def _until(until: float | None) -> str:
    return "" if until is None else f"  until {_date(until)}"


def _date(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(when))


if __name__ == "__main__":
    sys.exit(main())
