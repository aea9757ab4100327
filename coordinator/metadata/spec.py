"""Which store a job names: ``embedded``, or the ZooKeeper ensembles to spread over, home first."""

from __future__ import annotations

import re

EXPECTED = (
    'expected "embedded", or "zk://host:port,host:port" (the servers of one ensemble; several ensembles are separated '
    'by ";", the home ensemble first)'
)
_SERVER = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


def parse_spec(spec: str) -> tuple[str, ...]:
    """The ensembles, each as ``host:port,host:port``; none for ``embedded``. Raises ``ValueError``."""
    if spec == "embedded":
        return ()
    if not spec.startswith("zk://"):
        raise ValueError(f"metadata store {spec!r}: {EXPECTED}")
    ensembles = [ensemble.split(",") for ensemble in spec.removeprefix("zk://").split(";")]
    servers = [server for ensemble in ensembles for server in ensemble]
    for server in servers:
        match = _SERVER.fullmatch(server)
        if match is None or not 0 < int(match["port"]) < 65536:
            raise ValueError(f"metadata store {spec!r}: {server!r} is not host:port; {EXPECTED}")
        if servers.count(server) > 1:
            raise ValueError(f"metadata store {spec!r}: {server} is named twice; {EXPECTED}")
    return tuple(",".join(ensemble) for ensemble in ensembles)
