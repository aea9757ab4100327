"""Our side in a process of its own: ``python -m benchmarks.end_to_end.ours JOB.yaml --runs DIRECTORY [key=value]``.

It is ``bin/train`` as it is, but for one thing: the byte tokenizer names no end token, so that every answer has all its
tokens, as on the other side.
"""

from __future__ import annotations

import sys

from actors.env.tokenizers import ByteTokenizer
from coordinator.commands.train import main

if __name__ == "__main__":
    ByteTokenizer.eos_ids = ()
    sys.exit(main())
