"""PPO's critic against a second plain trainer, and against numbers worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from actors.policy import PolicyError
from actors.settings import TrainSettings
from actors.trainer.backends import make_backend
from actors.trainer.backends.critic import Episode, with_advantages
from actors.trainer.backends.protocol import Backend, NotFinite, TrainBatch
from actors.trainer.backends.torch_backend import TorchBackend
from tests.trainer import plain
from tests.trainer.samples import SETS, VOCABULARY, batch, policy, tree_batch


def make(directory: Path, **settings: Any) -> Backend:
    return make_backend(
        directory,
        seed=0,
        settings=TrainSettings(algorithm="ppo", **settings),
        dtype="float32",
        from_scratch=True,
    )


def weights(backend: Backend) -> dict[str, torch.Tensor]:
    return dict(backend.export())


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    return max(float((before[name] - after[name]).abs().max()) for name in before)


def critic_of(backend: Backend) -> Any:
    assert isinstance(backend, TorchBackend)
    return backend._critic


# ---- against a plain trainer ----------------------------------------------------------------------------------------


def values_of(body: Any, head: nn.Linear, given: TrainBatch) -> list[torch.Tensor]:
    """Per segment: what is expected before each sampled token, from a forward pass of the segment alone."""
    values = []
    for sequence in given.sequences:
        tokens = torch.from_numpy(sequence.tokens.astype(np.int64))[None]
        hidden = body(input_ids=tokens).last_hidden_state[0]
        values.append(head(hidden[np.flatnonzero(sequence.loss_mask) - 1]).squeeze(-1))
    return values


def advantages_of(values: np.ndarray, reward: float, gamma: float, decay: float) -> np.ndarray:
    """GAE as the sum that defines it (arXiv 1506.02438, eq. 16)."""
    last = len(values) - 1
    deltas = [(reward if t == last else gamma * values[t + 1]) - values[t] for t in range(last + 1)]
    return np.array([sum((gamma * decay) ** (k - t) * deltas[k] for k in range(t, last + 1)) for t in range(last + 1)])


def losses_of(actor: Any, values: list[torch.Tensor], given: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the policy, with advantages by GAE (gamma 0.98, lambda 0.9) scaled over the batch, and of the values."""
    weights, errors, advantages = [], [], []
    for ticket in dict.fromkeys(sequence.ticket for sequence in given.sequences):
        own = [i for i, sequence in enumerate(given.sequences) if sequence.ticket == ticket]
        expected = torch.cat([values[i] for i in own])
        known = expected.detach().double().numpy()
        found = advantages_of(known, given.sequences[own[-1]].advantage, 0.98, 0.9)
        new = torch.cat([plain.logprobs(actor, given.sequences[i], SETS) for i in own])
        recorded = [given.sequences[i].logprobs[given.sequences[i].loss_mask == 1] for i in own]
        weights.append(
            torch.exp(new - new.detach()) * torch.exp(new.detach() - torch.from_numpy(np.concatenate(recorded)))
        )
        errors.append(expected - torch.from_numpy(known + found))
        advantages.append(found)
    joined = np.concatenate(advantages)
    scaled = torch.from_numpy((joined - joined.mean()) / (joined.std() + 1e-6))
    return -(torch.cat(weights) * scaled).mean(), torch.cat(errors).square().mean() / 2


def test_five_steps_of_policy_and_critic_equal_plain_torch(tmp_path: Path) -> None:
    """Trajectories of one and of two segments; values, GAE, normalised advantages, two optimisers, two clippings."""
    settings = TrainSettings(
        algorithm="ppo", gamma=0.98, gae_lambda=0.9, max_grad_norm=0.5, critic_rate=3.0, aggregation="token"
    )
    directory = policy(tmp_path / "policy")
    backend = make_backend(directory, seed=0, settings=settings, dtype="float32", from_scratch=True)
    actor = plain.load_exported(backend, directory, tmp_path / "exported")
    body = plain.load_exported(backend, directory, tmp_path / "exported").model
    head = nn.Linear(32, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    critic = [*body.parameters(), *head.parameters()]
    options: Any = {"betas": (settings.adam_beta1, settings.adam_beta2), "weight_decay": 0.0}
    of_actor = torch.optim.AdamW(actor.parameters(), lr=1e-3, **options)
    of_critic = torch.optim.AdamW(critic, lr=3e-3, **options)
    for step in range(5):
        given = batch(step)
        of_actor.zero_grad()
        of_critic.zero_grad()
        loss, value_loss = losses_of(actor, values_of(body, head, given), given)
        (loss + value_loss).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
        norm = torch.nn.utils.clip_grad_norm_(critic, 0.5)
        of_actor.step()
        of_critic.step()
        figures = backend.forward_backward(given) | backend.optim_step(1e-3)
        assert figures["value_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
        assert figures["critic_grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert moved(dict(actor.named_parameters()), weights(backend)) < 2e-5
    state = critic_of(backend).state()
    theirs = {name: p.detach() for name, p in body.named_parameters()}
    theirs |= {f"value_head.{name}": p.detach() for name, p in head.named_parameters()}
    assert moved({name: state[f"master.critic.{name}"] for name in theirs}, theirs) < 2e-5


# ---- by hand --------------------------------------------------------------------------------------------------------


def test_an_episode_goes_on_over_segments_and_ends_with_the_reward(tmp_path: Path) -> None:
    """A fresh critic expects 0, so the advantages are the reward, discounted by gamma x lambda = 0.5 a token."""
    given = batch(3)
    last = given.sequences[-1].ticket
    assert [sequence.ticket for sequence in given.sequences].count(last) == 2
    backend = make(policy(tmp_path), gamma=1.0, gae_lambda=0.5)
    episode = next(e for e in critic_of(backend).estimate(given, backend._algorithms(given)) if e.ticket == last)  # type: ignore[attr-defined]
    count = sum(int(s.loss_mask.sum()) for s in given.sequences if s.ticket == last)
    reward = given.sequences[-1].advantage
    np.testing.assert_array_equal(episode.values, np.zeros(count))
    np.testing.assert_allclose(episode.advantages, [reward * 0.5**k for k in range(count - 1, -1, -1)])


def test_advantages_are_scaled_over_the_tokens_of_an_algorithm(tmp_path: Path) -> None:
    """Four tokens with the advantages 1, 2, 3, 6: mean 3, deviation sqrt(14 / 4)."""
    given = batch(3, segments=2, advantage=1.0)
    backend = make(policy(tmp_path))
    short = []
    for sequence in given.sequences:
        last_two = np.arange(len(sequence.tokens)) >= len(sequence.tokens) - 2
        short.append(msgspec.structs.replace(sequence, loss_mask=last_two.astype(np.uint8)))
    given = msgspec.structs.replace(given, sequences=short)
    episodes = [
        Episode("a", [0], np.zeros(2), np.array([1.0, 2.0])),
        Episode("b", [1], np.zeros(2), np.array([3.0, 6.0])),
    ]
    scaled = with_advantages(given, episodes, backend._algorithms(given))  # type: ignore[attr-defined]
    found = [sequence.token_advantages for sequence in scaled.sequences]
    deviation = (14 / 4) ** 0.5
    for advantages, expected in zip(found, ([-2.0, -1.0], [0.0, 3.0]), strict=True):
        assert advantages is not None
        assert not advantages[:-2].any()
        np.testing.assert_allclose(advantages[-2:], np.array(expected) / deviation, rtol=1e-4)


def test_the_critic_learns_to_expect_what_comes(tmp_path: Path) -> None:
    given = batch(9)
    backend = make(policy(tmp_path), gae_lambda=1.0, critic_rate=1e6)
    explained = []
    for _ in range(60):
        explained.append(backend.forward_backward(given)["explained_variance"])
        backend.optim_step(1e-9)  # the policy stands still
    assert explained[0] == pytest.approx(0.0, abs=1e-6)
    assert explained[-1] > 0.9


@pytest.mark.parametrize("given", [batch(5), tree_batch(3)], ids=["padded", "trees"])
def test_the_critics_step_does_not_depend_on_how_the_batch_is_split(tmp_path: Path, given: TrainBatch) -> None:
    results = []
    for tokens in (1, 60, 100_000):
        backend = make(policy(tmp_path), micro_batch_tokens=tokens, adam_epsilon=1.0)
        for _ in range(2):  # with the first step the head has a weight, and the body a gradient
            backend.forward_backward(given)
            backend.optim_step(1.0)
        results.append({name: t.clone() for name, t in critic_of(backend).state().items() if "master" in name})
    assert moved(results[0], results[1]) < 1e-5
    assert moved(results[0], results[2]) < 1e-5


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_a_critic_that_is_not_finite_moves_nothing_and_names_the_trajectories(tmp_path: Path) -> None:
    backend, given = make(policy(tmp_path)), batch(2)
    critic = critic_of(backend)
    with torch.no_grad():
        critic._head.bias.fill_(float("nan"))
    before = weights(backend)
    with pytest.raises(NotFinite, match="critic's values are not finite") as failure:
        backend.forward_backward(given)
    assert set(failure.value.tickets) == {sequence.ticket for sequence in given.sequences}
    backend.optim_step(1e-2)
    assert moved(before, weights(backend)) == 0


def test_a_policy_that_is_not_finite_leaves_the_critic_where_it_was(tmp_path: Path) -> None:
    backend, given = make(policy(tmp_path)), batch(2)
    broken = [msgspec.structs.replace(s, logprobs=s.logprobs * np.float32("nan")) for s in given.sequences[:1]]
    before = {name: t.clone() for name, t in critic_of(backend).state().items()}
    with pytest.raises(NotFinite, match="t0"):
        backend.forward_backward(msgspec.structs.replace(given, sequences=[*broken, *given.sequences[1:]]))
    backend.optim_step(1e-2)
    after = critic_of(backend).state()
    assert moved({n: t for n, t in before.items() if "master" in n}, after) == 0


def test_looking_at_a_batch_teaches_nothing(tmp_path: Path) -> None:
    backend, given = make(policy(tmp_path)), batch(2)
    inspected = backend.inspect(given)
    assert all(norm > 0 for norm in inspected.gradient_norms.values())
    backend.optim_step(1e-2)
    assert not critic_of(backend)._head.weight.any()


def test_a_checkpoint_holds_the_critic(tmp_path: Path) -> None:
    directory = policy(tmp_path / "policy")
    one, other = make(directory), make(directory)
    for number in range(2):
        one.forward_backward(batch(number))
        one.optim_step(1e-2)
    (tmp_path / "saved").mkdir()
    one.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    for backend in (one, other):
        backend.forward_backward(batch(3))
        backend.optim_step(1e-2)
    assert moved(weights(one), weights(other)) == 0
    assert moved(critic_of(one).state(), critic_of(other).state()) == 0


def test_a_critic_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    directory = policy(tmp_path / "policy")
    other = policy(tmp_path / "other")
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(text.replace(f'"vocab_size": {VOCABULARY}', '"vocab_size": 91'))
    (tmp_path / "exported").mkdir()
    made = make_backend(other, seed=0, settings=TrainSettings(), dtype="float32", from_scratch=True)
    plain.load_exported(made, other, tmp_path / "exported")
    with pytest.raises(PolicyError, match=r"train\.critic: .* has a vocabulary of 91 tokens, the policy one of 90"):
        make(directory, critic=str(tmp_path / "exported"))
