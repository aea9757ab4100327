"""What a process of a run says by its exit status.

Invariant: one number, one thing for whoever started it to do; Slurm, Kubernetes and systemd decide by it.

====== ============================================ ==================================
status meaning                                      to do
====== ============================================ ==================================
0      the run is done; the role was dismissed      nothing
1      the run failed, or its coordinator is lost   read the log; go on with --resume
2      wrong usage, job, key file or launch file    correct it: again is no use
3      the role could not be taken, nobody to join  look at the coordinator, then again
75     another coordinator process leads            start it again as a standby
76     it was told to step down: a standby leads    nothing, or start it again as a standby
130    interrupted, with a checkpoint               go on with --resume
====== ============================================ ==================================
"""

from __future__ import annotations

DONE = 0
FAILED = 1
USAGE = 2
NOT_TAKEN = 3
DEPOSED = 75
STEPPED_DOWN = 76
INTERRUPTED = 130
