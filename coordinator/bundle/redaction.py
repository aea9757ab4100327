"""What must not leave the machine: keys, tokens and passwords are taken out of every text that is collected.

Invariant: a secret is looked for in three ways, each of which is enough: by its value (those of the environment and of
key files that are known), by the name before it (``api_key: ...``), by its shape (``hf_...``, a PEM block). Of
environment variables only those that are listed here keep their values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

LEFT_OUT = "<left-out>"
SHORTEST_SECRET = 6
"""Shorter values are words that stand everywhere; a secret that short is none."""

_NAME = (
    r"[\w.-]*(?:secret|passwo?r?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|credential|bearer|cookie"
    r"|token(?![a-z]))[\w.-]*"
)
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
_ASSIGNED = re.compile(rf"""({_NAME}["']?\s*[:=]\s*)("[^"\n]*"|'[^'\n]*'|[^\s"',;}}\]]+)""", re.IGNORECASE)
_SHAPES = re.compile(
    "|".join(
        (
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
            r"\bhf_[A-Za-z0-9]{16,}",
            r"\bsk-[A-Za-z0-9_-]{16,}",
            r"\bgh[pousr]_[A-Za-z0-9]{16,}",
            r"\bgithub_pat_[A-Za-z0-9_]{16,}",
            r"\bglpat-[A-Za-z0-9_-]{16,}",
            r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
            r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
            r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
        )
    ),
    re.DOTALL,
)
_AUTHORIZATION = re.compile(r"(?i)\b((?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}")
_IN_ADDRESS = re.compile(r"(?<=://)[^\s/@:]+:[^\s/@]+(?=@)")
_HARMLESS = re.compile(r"""["']?(?:null|none|true|false|-?\d{1,5}(?:\.\d+)?|)["']?""", re.IGNORECASE)

_SHOWN = re.compile(
    r"(?:PATH|LANG|LC_.*|TERM|SHELL|TZ|PYTHON.*|VIRTUAL_ENV|LD_LIBRARY_PATH|LD_PRELOAD|TMPDIR|OMP_.*|MKL_.*|KMP_.*"
    r"|MALLOC_.*|CUDA_.*|NVIDIA_.*|NCCL_.*|GLOO_.*|UCX_.*|TORCH.*|PYTORCH_.*|VLLM_.*|HF_HOME|HF_HUB_OFFLINE"
    r"|TRANSFORMERS_.*|TOKENIZERS_PARALLELISM|SLURM_.*|KUBERNETES_.*|ROLLART_.*|XDG_STATE_HOME)"
)


def is_secret_name(name: str) -> bool:
    """Whether what is called so is a secret."""
    return _SECRET_NAME.fullmatch(name) is not None


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """The values of an environment that must not be seen."""
    return [value for name, value in environment.items() if is_secret_name(name)]


def shown_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Every name; the values of those that are known to be harmless."""
    return {
        name: value if _SHOWN.fullmatch(name) and not is_secret_name(name) else LEFT_OUT
        for name, value in sorted(environment.items())
    }


def _is_secret(value: str) -> bool:
    return not _HARMLESS.fullmatch(value) and LEFT_OUT not in value


class Redactor:
    """Takes out secrets; ``known`` are their values."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._values: set[str] = set()
        self._known: re.Pattern[str] | None = None
        self._add(known)

    def _add(self, known: Iterable[str]) -> None:
        self._values |= {value for value in known if len(value) >= SHORTEST_SECRET}
        longest_first = sorted(self._values, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def learn(self, configuration: str) -> None:
        """What is a secret by its name in a configuration is known by its value from now on, wherever it stands."""
        values = (match[2].strip("\"'") for match in _ASSIGNED.finditer(configuration) if _is_secret(match[2]))
        self._add(values)

    def clean(self, text: str) -> tuple[str, int]:
        """The text without secrets, and how many were taken out."""
        found = 0
        if self._known is not None:
            text, found = self._known.subn(LEFT_OUT, text)
        for pattern in (_SHAPES, _IN_ADDRESS):
            text, count = pattern.subn(LEFT_OUT, text)
            found += count
        text, count = _AUTHORIZATION.subn(rf"\1{LEFT_OUT}", text)
        found += count
        kept = 0

        def assigned(match: re.Match[str]) -> str:
            nonlocal kept
            value = match[2]
            if not _is_secret(value):
                kept += 1
                return match[0]
            quote = value[0] if value[0] in "\"'" else ""
            return f"{match[1]}{quote}{LEFT_OUT}{quote}"

        text, count = _ASSIGNED.subn(assigned, text)
        return text, found + count - kept
