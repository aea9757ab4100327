"""``bin/keys``: what it writes, says and refuses."""

import time
from pathlib import Path

import pytest

from bus import keyring
from coordinator.commands.keys import main


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.key"
    assert main(["make", str(path)]) == 0
    return path


def error_of(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_a_new_key_is_its_owners_alone_and_overwrites_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert file.stat().st_mode & 0o777 == 0o600
    before = file.read_bytes()
    assert error_of(capsys, "make", file) == f"error: {file}: File exists\n"
    assert file.read_bytes() == before


def test_rotating_keeps_the_old_key_for_the_overlap_and_drops_what_has_retired(file: Path) -> None:
    (first,) = keyring.load(file).pairs
    start = time.time()
    assert main(["rotate", str(file), "--overlap", "2h"]) == 0
    old, new = keyring.load(file).pairs
    assert (old.public, old.secret) == (first.public, first.secret)
    assert old.until is not None
    assert 7200 <= old.until - start < 7260
    assert new.until is None
    assert new.public != old.public
    assert main(["rotate", str(file), "--overlap", "0"]) == 0
    middle, newest = keyring.load(file).pairs[1:]
    assert middle.public == new.public
    assert main(["rotate", str(file)]) == 0
    assert next(pair.public for pair in keyring.load(file).pairs) == newest.public
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["cluster.key"], "nothing is left beside it"


def test_who_is_let_in_and_who_answers_with_what_while_keys_are_rotated() -> None:
    """Worked out by hand: the key from before speaks, and both are let in, until the overlap is over."""
    before = keyring.new_cluster()
    after = keyring.rotate(before, now=1000.0, overlap_s=100.0)
    first, second = (pair.public for pair in after.pairs)
    for now, speaks, let_in in [
        (1000.0, first, [True, True]),
        (1099.9, first, [True, True]),
        (1100.0, second, [False, True]),
    ]:
        ring = after.at(now)
        assert ring.pair is not None
        assert ring.pair.public == speaks == ring.server_key("any")
        assert [ring.lists(first), ring.lists(second)] == let_in
    assert before.at(5000.0).server_key("any") == first, "who has not the new file goes on as before"


def test_a_nodes_file_is_good_for_its_name_alone(file: Path, tmp_path: Path) -> None:
    own_file = tmp_path / "gpu7.key"
    assert main(["node", str(file), "gpu7", str(own_file)]) == 0
    own, cluster = keyring.load(own_file), keyring.load(file)
    assert own.node == "gpu7"
    assert own_file.stat().st_mode & 0o777 == 0o600
    assert cluster.pairs[0].secret not in own_file.read_text(), "it does not hold the cluster's secret"
    ring, mine, theirs = cluster.at(0.0), own.pairs[0].public, cluster.pairs[0].public
    names = ["gpu7", "gpu7.engine-0", "gpu77", "gpu", "control", ""]
    assert [ring.may_be(mine, name) for name in names] == [True, True, False, False, False, False]
    assert [ring.may_be(theirs, name) for name in names] == [False, False, True, True, True, True]


def test_a_nodes_file_is_brought_up_to_date_after_a_rotation(file: Path, tmp_path: Path) -> None:
    own_file = tmp_path / "gpu7.key"
    words = ["node", str(file), "gpu7", str(own_file)]
    assert main(words) == 0
    before = keyring.load(own_file)
    assert main(["rotate", str(file)]) == 0
    assert main(words) == 0
    after = keyring.load(own_file)
    assert after.pairs == before.pairs
    assert after.allow == keyring.load(file).allow != before.allow


def test_a_removed_node_is_not_listed_any_more(file: Path, tmp_path: Path) -> None:
    before = keyring.load(file)
    assert main(["node", str(file), "gpu7", str(tmp_path / "gpu7.key")]) == 0
    assert main(["remove", str(file), "gpu7"]) == 0
    assert keyring.load(file) == before


def test_what_cannot_be_done_is_said(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "gpu7.key"
    assert main(["node", str(file), "gpu7", str(own)]) == 0
    assert "node 'gpu7' is listed already; bin/keys remove" in error_of(capsys, "node", file, "gpu7", tmp_path / "x")
    assert "not the file of node 'gpu8'" in error_of(capsys, "node", file, "gpu8", own)
    assert "node 'gpu9' is not listed" in error_of(capsys, "remove", file, "gpu9")
    assert "the file of node 'gpu7': only the cluster's can be rotated" in error_of(capsys, "rotate", own)
    assert "'a/b' cannot be the name of a node" in error_of(capsys, "node", file, "a/b", tmp_path / "x")
    assert (
        error_of(capsys, "show", tmp_path / "none") == f"error: key file {tmp_path}/none: No such file or directory\n"
    )
    other = tmp_path / "other.key"
    assert main(["make", str(other)]) == 0
    assert "not the file of a node of this cluster" in error_of(capsys, "node", other, "gpu7", own)
    file.chmod(0o644)
    assert "open to others (mode 644); run chmod 600" in error_of(capsys, "rotate", file)


@pytest.mark.parametrize("overlap", ["-1h", "soon", "", "1w", "nan", "inf"])
def test_an_overlap_that_is_no_duration_is_refused(
    file: Path, overlap: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["rotate", str(file), f"--overlap={overlap}"])
    assert caught.value.code == 2
    assert "is not a duration: expected a number with s, m, h or d, as in 24h" in capsys.readouterr().err


def test_show_tells_what_is_in_use_and_no_secret(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["node", str(file), "gpu7", str(tmp_path / "gpu7.key")]) == 0
    assert main(["rotate", str(file), "--overlap", "30m"]) == 0
    capsys.readouterr()
    assert main(["show", str(file)]) == 0
    said = capsys.readouterr().out
    old, new = keyring.load(file).pairs
    lines = [line.split() for line in said.splitlines()[1:]]
    assert [line[:4] for line in lines[:2]] == [["own", old.public, "in", "use"], ["own", new.public, "next"]]
    assert [line[2] for line in lines[2:]] == ["any", "gpu7", "any"]
    assert old.secret not in said
    assert new.secret not in said
