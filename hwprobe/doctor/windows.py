"""TCP windows: how much may be on its way at once.

Invariant: reads only. Short windows are a finding where they cost something: this host has a fast card, or other hosts
were named that it sends to; elsewhere they are a note.
"""

from __future__ import annotations

from pathlib import Path

from hwprobe.doctor.findings import Examined, Fix, Unable
from hwprobe.doctor.fixing import SETTINGS, command, read_setting

LEAST = 16_000_000
WANTED = 16 << 20
"""16 MB: 10 Gbit/s for 13 ms."""

TRIPLES = {"net/ipv4/tcp_rmem": "receive", "net/ipv4/tcp_wmem": "send"}
BOUNDS = ("net/core/rmem_max", "net/core/wmem_max")
"""Of programs that set their buffers by themselves (SO_RCVBUF), which nothing here does: told, not judged."""

SCALING = "net/ipv4/tcp_window_scaling"


def look(matters: bool, root: Path = SETTINGS) -> Examined:
    """Raises ``Unable`` where the kernel does not tell."""
    examined = Examined()
    sizes: list[str] = []
    if read_setting("net/ipv4/tcp_rmem", root) is None:
        raise Unable(f"{root}/net/ipv4/tcp_rmem is not there")
    for setting in (*TRIPLES, *BOUNDS):
        text = read_setting(setting, root)
        if text is None or not text.split()[-1].isdigit():  # not every network namespace shows the bounds
            continue
        most = int(text.split()[-1])
        sizes.append(f"{setting.rpartition('/')[2]} {most / 1e6:.1f} MB")
        if most < LEAST and matters and setting in TRIPLES:
            _short(setting, TRIPLES[setting], text, examined)
    if read_setting(SCALING, root) == "0":
        fix = Fix(SCALING, "0", "1")
        examined.error(
            "tcp_window_scaling",
            "expected 1, found 0",
            "without scaling no window is larger than 64 KB: 0.5 Gbit/s at 1 ms",
            command(fix),
            fix,
        )
    spare = "" if matters else " (no fast card here, and no other host named)"
    examined.note(", ".join(sizes) + spare)
    return examined


def _short(setting: str, direction: str, text: str, examined: Examined) -> None:
    *before, _ = text.split()
    fix = Fix(setting, text, " ".join([*before, str(WANTED)]))
    examined.warning(
        setting.rpartition("/")[2],
        f"expected at least {LEAST // 10**6} MB, found {int(text.rsplit(maxsplit=1)[-1]) / 1e6:.1f} MB",
        f"a connection cannot {direction} more than that for each round trip, however fast the link is",
        f"{command(fix)} (and the same line in /etc/sysctl.d, to keep it)",
        fix,
    )
