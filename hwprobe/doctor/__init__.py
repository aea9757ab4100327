"""The doctor: what makes a host or its network unfit for a run, with evidence, cause and remedy.

    >>> from hwprobe.doctor import Check, Examined, examine
    >>> report = examine([Check("nothing", "nothing at all", lambda: Examined())])
    >>> report.findings
    []

The checks here need no other package of this project; those of the bus, of ZooKeeper and of a run's records are added
by ``coordinator.doctor``.
"""

from hwprobe.doctor.findings import Examined, Finding, Fix, Unable
from hwprobe.doctor.report import describe
from hwprobe.doctor.runner import Check, Checked, Report, examine

__all__ = ["Check", "Checked", "Examined", "Finding", "Fix", "Report", "Unable", "describe", "examine"]
