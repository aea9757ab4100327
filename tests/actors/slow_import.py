"""A child whose imports take for ever: it says that it has begun, and gets no further."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

file = Path(sys.argv[1])
file.with_suffix(".partial").write_text(str(os.getpid()))
file.with_suffix(".partial").rename(file)
time.sleep(600)
