"""``bin/keys FILE``: make the key file with which the nodes of a cluster join each other."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bus.security import make_key


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="keys", description="Make a cluster key: every node that has the file can join, nobody else can connect."
    )
    result.add_argument("file", type=Path, help="where to write it (mode 0600); an existing file is left alone")
    return result


def main(argv: list[str] | None = None) -> int:
    path: Path = parser().parse_args(argv).file
    try:
        make_key(path)
    except OSError as error:
        print(f"error: {path}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{path}: made; copy it to every host and pass it with --key-file")
    return 0


if __name__ == "__main__":
    sys.exit(main())
