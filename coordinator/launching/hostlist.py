"""Which host does what: the host list that ``bin/launch`` reads, and the map of roles to hosts.

Invariant: every role of a run has a host, exactly one where there can be only one; the coordinator's host is the first.
A list without roles is dealt out by ``deal``; in YAML::

    port: 5600                       # of the coordinator
    key_file: cluster.key            # at the same place on every host; may be left out on loopback
    directory: /shared/work          # where commands run, on every host
    start: /opt/rollart/bin/start-{role}
    shell: [ssh, -o, BatchMode=yes, "{host}"]
    hosts:
      - {host: gpu-a, address: 10.0.0.1}
      - {host: gpu-b, address: 10.0.0.2}
      - {host: gpu-c, address: 10.0.0.3, spare: true}     # takes the roles of a host that is lost
"""

from __future__ import annotations

import ipaddress
import re
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import yaml

from coordinator.messages import SEVERAL, Role

ALL_ROLES: tuple[Role, ...] = get_args(Role)

LEADS: tuple[Role, ...] = ("coordinator", "trainer", "weightsync", "reward")
"""What stays together on the first host: they share the run directory and the weights."""

DEFAULT_SHELL = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "{host}")


class LaunchError(ValueError):
    """A launch that cannot work as written; one line for the user."""


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry of the list."""

    host: str  # what the shell is told
    address: str = ""  # under which the other hosts reach it; the same as ``host`` by default
    roles: tuple[Role, ...] = ()
    spare: bool = False


class HostList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """See the module docstring."""

    hosts: Annotated[tuple[Host, ...], msgspec.Meta(min_length=1)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 5600
    key_file: str | None = None
    directory: str | None = None
    start: str = "bin/start-{role}"
    shell: tuple[str, ...] = DEFAULT_SHELL


def load_hosts(path: Path) -> HostList:
    """Read a host list; roles are dealt out where it has none. Raises ``LaunchError``."""
    try:
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        hosts = msgspec.convert(tree, HostList)
    except OSError as error:
        raise LaunchError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except msgspec.ValidationError as error:
        raise LaunchError(f"{path}: {error}") from None
    names = [host.host for host in hosts.hosts]
    if len(set(names)) < len(names):
        raise LaunchError(f"{path}: expected every host once, found {', '.join(sorted(names))}")
    for host in hosts.hosts:
        if host.spare and host.roles:
            raise LaunchError(f"{path}: {host.host}: a spare has no roles until it is wanted")
    used = [host for host in hosts.hosts if not host.spare]
    if not used:
        raise LaunchError(f"{path}: every host is a spare")
    if not any(host.roles for host in used):
        dealt = deal(len(used))
        used = [msgspec.structs.replace(host, roles=roles) for host, roles in zip(used, dealt, strict=True)]
    check_roles([host.roles for host in used], str(path))
    spares = [host for host in hosts.hosts if host.spare]
    return msgspec.structs.replace(hosts, hosts=(*used, *spares))


def deal(hosts: int) -> list[tuple[Role, ...]]:
    """Roles by default: training leads on the first host, engines on the second, environments on the rest."""
    if hosts == 1:
        return [ALL_ROLES]
    if hosts == 2:
        return [LEADS, ("proxy", "env")]
    rest: list[tuple[Role, ...]] = [("env",)] * (hosts - 2)
    return [LEADS, ("proxy",), *rest]


def parse_map(text: str, hosts: int) -> list[tuple[Role, ...]]:
    """``"0=coordinator,trainer,weightsync,reward 1=proxy 2-=env"`` for hosts numbered from 0; ``2-`` is 2 and beyond.
    Empty text deals them out. Raises ``LaunchError``."""
    if not text.strip():
        return deal(hosts)
    roles: list[list[Role]] = [[] for _ in range(hosts)]
    for entry in text.split():
        match = re.fullmatch(r"(\d+)(?:(-)(\d*))?=([a-z,]+)", entry)
        if match is None:
            raise LaunchError(f"role map: expected HOSTS=ROLE,ROLE such as 0=coordinator or 2-=env, found {entry!r}")
        first, dash, last, names = match.groups()
        end = int(first) if dash is None else int(last or hosts - 1)
        for host in range(int(first), end + 1):
            if host >= hosts:
                raise LaunchError(f"role map: {entry!r} names host {host}, there are hosts 0 to {hosts - 1}")
            roles[host] += [_role(name, entry) for name in names.split(",")]
    return [tuple(given) for given in roles]


def _role(name: str, entry: str) -> Role:
    found = next((role for role in ALL_ROLES if role == name), None)
    if found is None:
        raise LaunchError(f"role map: {entry!r}: expected one of {', '.join(ALL_ROLES)}, found {name!r}")
    return found


def check_roles(roles: Sequence[tuple[Role, ...]], where: str) -> None:
    """Raises ``LaunchError`` for a role that nobody has, or that too many have."""
    for role in ALL_ROLES:
        holders = [number for number, given in enumerate(roles) for name in given if name == role]
        if not holders:
            raise LaunchError(f"{where}: no host has the role {role}")
        if len(holders) > 1 and (role not in SEVERAL or len(set(holders)) < len(holders)):
            raise LaunchError(f"{where}: the role {role} can be on one host, found it on {len(holders)}")
    if "coordinator" not in roles[0]:
        raise LaunchError(f"{where}: the coordinator belongs on the first host, which the others join")


def waits_for(roles: Sequence[tuple[Role, ...]]) -> list[str]:
    """What the job is told, before what its user says: a run of several proxies begins once all of them are there."""
    proxies = sum("proxy" in given for given in roles)
    return [f"rollout.proxies={proxies}"] if proxies > 1 else []


def numeric(address: str) -> str:
    """The address that a name stands for: sockets are bound to numbers. Raises ``LaunchError``."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(f"address {address}: cannot be resolved here: {error.strerror}") from None
    return str(found[0][4][0])


def command_of(start: str, role: Role | Literal["spare"]) -> list[str]:
    """The first words of what starts a role, as the list (or ROLLART_START) gives them."""
    return [word.replace("{role}", role) for word in shlex.split(start)]


def over_shell(hosts: HostList, host: Host, words: Sequence[str]) -> list[str]:
    """The local command line that runs ``words`` on a host."""
    line = f"exec {shlex.join(words)}"
    if hosts.directory is not None:
        line = f"cd {shlex.quote(hosts.directory)} && {line}"
    return [*(word.replace("{host}", host.host) for word in hosts.shell), line]
