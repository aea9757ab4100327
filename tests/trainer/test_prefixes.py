"""Sequences as trees, against tries written out by hand or as sets of prefixes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from actors.trainer.backends.packing import Packer
from actors.trainer.backends.prefixes import Forest, Row
from actors.trainer.backends.protocol import TrainBatch
from tests.trainer.samples import SETS, sequence, tree_batch

torch = pytest.importorskip("torch")


def arrays(*sequences: str) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in sequences]


def text(row: Row) -> str:
    return bytes(row.tokens.astype(np.uint8)).decode()


def random_trees(seed: int) -> list[np.ndarray]:
    """Sequences that begin with a random part of an earlier one; some are equal, some a prefix of another."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 3, int(rng.integers(1, 12)))]
    while len(sequences) < 30:
        origin = sequences[rng.integers(len(sequences))]
        kept = origin[: rng.integers(0, len(origin) + 1)]
        new = np.concatenate([kept, rng.integers(0, 300, int(rng.integers(0, 6)))])
        if len(new):
            sequences.append(new)
    return [each.astype(np.int32) for each in sequences]


def prefixes(sequences: list[np.ndarray]) -> int:
    """The size of their trie: how many different beginnings they have."""
    return len({tuple(each[: n + 1].tolist()) for each in sequences for n in range(len(each))})


def test_a_group_lies_in_a_row_with_its_prompt_once() -> None:
    [row] = Forest(arrays("promptB", "promptAx", "promptAy")).rows(100)
    assert text(row) == "promptAxyB"
    assert row.depths.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 6]
    assert {path.sequence: path.places.tolist() for path in row.paths} == {
        0: [0, 1, 2, 3, 4, 5, 9],
        1: [0, 1, 2, 3, 4, 5, 6, 7],
        2: [0, 1, 2, 3, 4, 5, 6, 8],
    }


@pytest.mark.parametrize("seed", range(8))
def test_paths_read_their_sequences_and_each_prefix_lies_in_a_row_once(seed: int) -> None:
    sequences = random_trees(seed)
    [row] = Forest(sequences).rows(10_000)
    assert sorted(path.sequence for path in row.paths) == list(range(len(sequences)))
    assert len(row.tokens) == prefixes(sequences)
    for path in row.paths:
        np.testing.assert_array_equal(row.tokens[path.places], sequences[path.sequence])
        np.testing.assert_array_equal(row.depths[path.places], np.arange(len(path.places)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [1, 12, 25, 60])
def test_rows_keep_to_the_budget_and_hold_every_sequence_once(seed: int, budget: int) -> None:
    sequences = random_trees(seed)
    rows = Forest(sequences).rows(budget)
    assert sorted(path.sequence for row in rows for path in row.paths) == list(range(len(sequences)))
    for row in rows:
        held = [sequences[path.sequence] for path in row.paths]
        assert len(row.tokens) == prefixes(held)
        assert len(row.tokens) <= max(budget, *(len(each) for each in held))
        for path in row.paths:
            np.testing.assert_array_equal(row.tokens[path.places], sequences[path.sequence])


def test_a_tree_that_fits_stays_whole_and_a_larger_one_is_cut_where_it_shares_least() -> None:
    # "ab..." is 6 tokens, "cd..." is 6, too: a budget of 8 must not fill the first row with the start of the second.
    rows = Forest(arrays("abxx", "cdxx", "abyy", "cdyy")).rows(8)
    assert [text(row) for row in rows] == ["abxxyy", "cdxxyy"]
    # 10 tokens; two subtrees below "p" of 5 and 4 tokens, each repeats "p".
    rows = Forest(arrays("pabcd", "pabx", "pqrs", "pqt")).rows(6)
    assert [text(row) for row in rows] == ["pabcdx", "pqrst"]
    assert [text(row) for row in Forest(arrays("abc", "de")).rows(8)] == ["abcde"]
    assert [text(row) for row in Forest(arrays("abcdefg", "abcdefh")).rows(3)] == ["abcdefg", "abcdefh"]
    assert Forest([]).rows(8) == []


def test_segments_that_share_nothing_are_padded_as_before() -> None:
    rng = np.random.default_rng(0)
    apart = [sequence(rng, f"t{i}", 20, loss_mask=np.arange(20) % 2 == 1) for i in range(4)]
    apart = [msgspec.structs.replace(each, allowed=np.full(20, -1, np.int32)) for each in apart]
    for given, trees in ((TrainBatch(apart, SETS), False), (tree_batch(0), True)):
        packer = Packer(given, np.ones(len(given.sequences)), torch.device("cpu"), trees=True)
        micros = list(packer.micro_batches(list(range(len(given.sequences))), 1000))
        assert [micro.row is not None for micro in micros] == [trees]
