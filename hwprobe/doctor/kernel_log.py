"""What the kernel's log says of GPUs: Xid errors.

Invariant: reads what is there and never waits for more; a record that was overwritten meanwhile is passed over.

Source: Documentation/ABI/testing/dev-kmsg; NVIDIA's "XID Errors" (docs.nvidia.com/deploy/xid-errors)::

    3,1042,61234567,-;NVRM: Xid (PCI:0000:1a:00): 79, pid=1234, name=python, GPU has fallen off the bus.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import msgspec

from hwprobe.doctor.findings import Unable

LOG = Path("/dev/kmsg")
_XID = re.compile(rb"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+), ?(.*)")

MEANINGS = {
    48: "an error of the memory that ECC could not correct",
    63: "a bad row of memory is to be replaced",
    64: "a bad row of memory could not be replaced",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus",
    92: "many errors of the memory that ECC corrected",
    94: "an error of the memory that ended one application",
    95: "an error of the memory that spread beyond one application",
    119: "the GPU's system processor (GSP) does not answer",
    120: "the GPU's system processor (GSP) failed",
}
"""Of the hardware or the driver. All others come from programs as a rule (13 and 31: a wrong access, 43, 45: ended)."""


class Xid(msgspec.Struct, frozen=True):
    pci: str
    number: int
    text: str


def read_xids(log: Path = LOG) -> list[Xid]:
    """In the order in which they came. Raises ``Unable`` where the log may not be read."""
    found = []
    for line in _records(log):
        match = _XID.search(line)
        if match is not None:
            pci, number, text = match.groups()
            found.append(Xid(pci.decode().lower(), int(number), text.decode(errors="replace").strip()))
    return found


def _records(log: Path) -> list[bytes]:
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise Unable(f"the kernel's log ({log}) cannot be read: {error.strerror}; run it as root") from None
    read = bytearray()
    try:
        while True:
            try:
                piece = os.read(descriptor, 1 << 16)  # of the device one record at a time
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue
                raise
            if not piece:
                break
            read += piece
    finally:
        os.close(descriptor)
    return bytes(read).splitlines()
