"""What the help texts of the commands have in common."""

from __future__ import annotations


def examples(*lines: str) -> str:
    """The end of a help text, one example a line; for ``argparse.RawDescriptionHelpFormatter``, which keeps them so."""
    return "\n".join(["examples:", *(f"  {line}" for line in lines)])
