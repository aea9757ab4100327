"""The format of everything that outlives a process: one place that knows which are written and which are read.

    what                                     says its format in                        read, of old
    a checkpoint's run.json                  its field ``format``                      1 (without journal)
    a rank's part of a checkpoint            ``rank-*.json``, field ``format``         -
    trajectory records (store, buffer,       the file's head                           0 (without head),
      dump, recorded steps)                                                            1 (messages)
    a dump                                   ``dump.json``, field ``format``           -
    a run directory (ledger, metrics,        ``format.json``                           0 (without that file)
      timeline, samples, hosts, audit log)
    a run's cost model                       ``cost.json``, field ``format``           -
                                             (``hwprobe.costmodel``)
    the embedded metadata store              SQLite's ``user_version``                 -
    a run's entries in a metadata store      ``/jobs/<run>/status``, field ``format``  -
      (also ``/leader/<run>/epoch``)
    the ring of shards (also its fences,     ``/ring``, field ``format``               -
      the prefixes, what was lost)

A run's number stands for all that is below ``/jobs/<run>`` and ``/leader/<run>``; the ring's for ``/ring-fence``,
``/ring-prefixes``, ``/ring-lost`` and ``/ring-lost-names`` as well. A fence with a field that
is not known is refused. Whatever else is in a store goes with a session (``/members``, candidates, locks).
Messages have a version of their own (``bus.message.PROTOCOL_VERSION``).

Invariant: what is read has said its format first; what is newer than this software, or older than it can read, is
refused by one line that says what was expected, what was found, where, and what to do.

A format's number is raised by whatever makes older software misread it. A field that has a default and may be left out
raises nothing: readers pass over fields that they do not know.
"""

from __future__ import annotations

import msgspec

from actors.version import VERSION


class FormatRefused(ValueError):
    """Something that this software cannot read; one line."""


class Format(msgspec.Struct, frozen=True):
    """One of them: ``current`` is what is written, ``oldest`` to ``current`` are read."""

    name: str
    current: int
    oldest: int

    def check(self, found: object, where: object) -> int:
        """The format that was found, if it can be read. Raises ``FormatRefused``."""
        if isinstance(found, int) and self.oldest <= found <= self.current:
            return found
        what, to_do = self._fault(found)
        read = f"format {self.current}" if self.oldest == self.current else f"formats {self.oldest} to {self.current}"
        raise FormatRefused(f"{where}: {what}; this software ({VERSION}) reads {read}: {to_do}")

    def _fault(self, found: object) -> tuple[str, str]:
        if not isinstance(found, int):
            return f"a {self.name} that says no format (found {found!r})", "it is damaged, or something else"
        if found > self.current:
            return f"a {self.name} of format {found}, of newer software", "use that, or upgrade this"
        return f"a {self.name} of format {found}, of older software", "use that"


CHECKPOINT = Format("checkpoint", 2, oldest=1)
RANK_PART = Format("rank's part of a checkpoint", 1, oldest=1)
RECORDS = Format("file of trajectories", 2, oldest=0)
DUMP = Format("dump", 1, oldest=1)
RUN_DIRECTORY = Format("run directory", 1, oldest=0)
EMBEDDED_STORE = Format("metadata store", 1, oldest=1)
RUN_FACTS = Format("run in a metadata store", 1, oldest=1)
RING = Format("ring of metadata shards", 1, oldest=1)
