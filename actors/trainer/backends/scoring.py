"""Log-probabilities of sampled tokens under the distribution that they were sampled from.

Invariant: temperature first, then the mask of allowed tokens, then log-softmax, in at least float32; what an engine
does when it samples (``actors.proxy.engines.protocol``), so that with equal weights the two agree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from actors.trainer.backends.packing import MicroBatch

Head = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(hidden [R, H], token ids int64 [A] or None) -> logits [R, A], or of the whole vocabulary."""


def sampled_logprobs(
    hidden: torch.Tensor, head: Head, micro: MicroBatch, *, train_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each sampled token and entropy of the distribution it was drawn from, float32 [M] each.

    ``hidden`` [M, H] is the model's last hidden state at ``micro.positions``. Logits are computed for allowed tokens
    only, where the head can. The entropy has a gradient only with ``train_entropy``: over a large vocabulary what
    that needs to be kept is twice the logits themselves.
    """
    tempered = bool((micro.temperature != 1.0).any())
    parts = []
    for choice in micro.choices:
        logits = head(hidden[choice.rows], choice.token_ids)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if tempered:
            logits = logits / micro.temperature[choice.rows, None]
        logprobs = logits.log_softmax(dim=-1)
        chosen = logprobs.gather(1, choice.targets[:, None]).squeeze(1)
        with torch.set_grad_enabled(train_entropy and torch.is_grad_enabled()):
            entropy = -torch.bmm(logprobs.exp()[:, None], logprobs[:, :, None]).flatten()
        parts.append((choice.rows, chosen, entropy))
    if len(parts) == 1:  # the rows are all there, in order
        return parts[0][1], parts[0][2]
    order = torch.cat([rows for rows, _, _ in parts]).argsort()
    return torch.cat([chosen for _, chosen, _ in parts])[order], torch.cat([e for _, _, e in parts])[order]
