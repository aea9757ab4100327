"""A heavy library is imported by the modules that wrap it, and by no other: an import-linter contract.

import-linter's own ``protected`` contract wants the importers listed by exact name; this one takes patterns
(``actors.proxy.engines.vllm_*``), so that a wrapper may be split into files without touching the contract.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


def outsiders(importers: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The importers that no pattern names."""
    return sorted(name for name in importers if not any(fnmatchcase(name, pattern) for pattern in patterns))


class ConfinedContract(Contract):
    """``library`` may be imported only by modules that match one of ``importers``."""

    library = fields.StringField()
    importers = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        library, patterns = str(self.library), [str(pattern) for pattern in self.importers]  # type: ignore[attr-defined]
        found: list[str] = []
        if library in graph.modules:  # a library that nothing imports yet is no breach
            found = outsiders(graph.find_modules_that_directly_import(library), patterns)
        return ContractCheck(kept=not found, metadata={"outsiders": found, "library": library, "patterns": patterns})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for module in check.metadata["outsiders"]:
            allowed = ", ".join(check.metadata["patterns"])
            output.print_error(f"{module} imports {check.metadata['library']}; only {allowed} may: go through that.")
