"""Dumps come back as they were written, and what does not fit a policy is refused by name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from actors.env.recorder import TrajectoryRecorder
from actors.policy import Policy
from actors.trainer.dump import (
    FORMAT,
    DumpError,
    DumpFacts,
    Manifest,
    add_step,
    begin_dump,
    check_fit,
    facts_of,
    read_dump,
    write_dump,
)
from actors.trajectory import Trajectory
from tests.end_to_end.tiny_model import make_model

BYTES = DumpFacts("bytes", 264)
MANIFEST = Manifest(FORMAT, "job", "frozenlake", BYTES)


def trajectory(ticket: str, group: int, *, success: bool = False, version: int = 3, token: int = 5) -> Trajectory:
    """Prompt [10, 11], sampled ``token`` from {5, 9, token}."""
    recorder = TrajectoryRecorder(ticket, group, task=group, temperature=0.5)
    recorder.start(np.array([10, 11], np.int32), "map")
    allowed = tuple(sorted({5, 9, token}))
    recorder.sampled(np.array([token]), np.array([-0.5]), np.array([version]), allowed, "R")
    return recorder.finish(env_return=2.0 * success, reward=float(success), success=success)


def written(directory: Path) -> list[Trajectory]:
    """Two groups of two, mixed; one success."""
    four = [
        trajectory("a", 0),
        trajectory("b", 1, version=5),
        trajectory("c", 0, success=True),
        trajectory("d", 1, version=4),
    ]
    write_dump(directory, MANIFEST, four, {"env_failed": 2})
    return four


def test_a_dump_is_what_was_written_and_its_manifest_counts_it(tmp_path: Path) -> None:
    four = written(tmp_path / "dump")
    dump = read_dump(tmp_path / "dump")
    for found, expected in zip(dump.trajectories, four, strict=True):
        assert (found.ticket, found.group, found.reward) == (expected.ticket, expected.group, expected.reward)
        np.testing.assert_array_equal(found.segments[0].tokens, expected.segments[0].tokens)
        np.testing.assert_array_equal(found.segments[0].logprobs, expected.segments[0].logprobs)
    assert [[member.ticket for member in group] for group in dump.groups] == [["a", "c"], ["b", "d"]]
    manifest = json.loads((tmp_path / "dump" / "dump.json").read_text())
    content = (tmp_path / "dump" / "trajectories.log").read_bytes()
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    assert manifest["content"] == {
        "trajectories": 4,
        "groups": 2,
        "group_size": 2,
        "turns": 4,
        "sampled_tokens": 4,
        "success": 0.25,
        "return_mean": 0.5,
        "reward_mean": 0.25,
        "versions": [3, 5],
        "lost": {"env_failed": 2},
        "digest": f"blake2b:{digest}",
    }


def test_steps_come_back_in_their_order_and_one_that_is_done_again_replaces_the_first(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin_dump(run / "recorded", MANIFEST)
    add_step(run / "recorded", 2, [trajectory("late", 7)])
    add_step(run / "recorded", 1, [trajectory("undone", 5)])
    add_step(run / "recorded", 1, [trajectory("early", 6)])
    assert [held.ticket for held in read_dump(run).trajectories] == ["early", "late"]


def test_a_dump_whose_files_changed_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "trajectories.log.more.log").write_bytes(b"")
    read_dump(tmp_path)  # an empty file changes nothing
    content = (tmp_path / "trajectories.log").read_bytes()
    (tmp_path / "trajectories.log").write_bytes(content + content[8:])  # the head stands once
    with pytest.raises(DumpError, match=r"its files are not those that were written \(the digest differs\)"):
        read_dump(tmp_path)
    (tmp_path / "trajectories.log").write_bytes(content[:28] + b"x" + content[29:])
    with pytest.raises(DumpError, match="the record at offset 8 does not fit its checksum"):
        read_dump(tmp_path)


def test_what_is_no_dump_is_named(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match=r"dump\.json: No such file or directory; expected a dump"):
        read_dump(tmp_path)
    (tmp_path / "owner.lock").touch()
    with pytest.raises(DumpError, match=r"this run has kept no trajectories; train with train\.record=true"):
        read_dump(tmp_path)
    begin_dump(tmp_path, MANIFEST)
    with pytest.raises(DumpError, match="there is no trajectory in it"):
        read_dump(tmp_path)
    (tmp_path / "dump.json").write_text('{"format": 1}')
    with pytest.raises(DumpError, match="not the manifest of a dump"):
        read_dump(tmp_path)
    (tmp_path / "dump.json").write_text('{"format": 9, "what": "is to come"}')
    with pytest.raises(DumpError, match=r"dump\.json: a dump of format 9, of newer software; .* upgrade this"):
        read_dump(tmp_path)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "dump")
    model = make_model(tmp_path / "model")
    digest = hashlib.blake2b((model / "tokenizer.json").read_bytes(), digest_size=16).hexdigest()
    facts = facts_of(Policy(path=str(model)), 300)
    assert facts == DumpFacts(f"blake2b:{digest}", 300)
    with pytest.raises(DumpError, match=rf"another tokenizer \(bytes\) than the policy's \(blake2b:{digest}\)"):
        check_fit(read_dump(tmp_path / "dump"), facts)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    write_dump(tmp_path, MANIFEST, [trajectory("a", 0), trajectory("b", 0, token=263)], {})
    dump = read_dump(tmp_path)
    check_fit(dump, BYTES)
    with pytest.raises(
        DumpError, match=r"trajectory b has token 263, the policy's vocabulary ends at 259 \(the dump's at 263\)"
    ):
        check_fit(dump, DumpFacts("bytes", 260))


def test_a_sampled_token_outside_its_allowed_set_is_refused(tmp_path: Path) -> None:
    odd = trajectory("odd", 0)
    odd.segments[0].tokens[2] = 77
    write_dump(tmp_path, MANIFEST, [odd], {})
    with pytest.raises(DumpError, match="trajectory odd has sampled tokens that are not in its allowed set 0"):
        check_fit(read_dump(tmp_path), BYTES)
