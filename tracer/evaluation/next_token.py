"""The token after a prompt: how likely the target is, and whether it comes first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tracer.models.tokens import TokenBatch
from tracer.probes import TokenizedProbe


@dataclass(frozen=True)
class NextTokens:
    """What a model says after some prompts, in the order of the prompts.

    Attributes:
        log_p: `[probe]` float64, log-probability of the target (nats).
        answered: `[probe]` Whether the target is the most likely token.
        said: `[probe]` The most likely token.
        p_said: `[probe]` float64, its probability.
    """

    log_p: Float[Tensor, " probe"]
    answered: Bool[Tensor, " probe"]
    said: Int[Tensor, " probe"]
    p_said: Float[Tensor, " probe"]


@torch.inference_mode()
def next_tokens(
    forward: Callable[[TokenBatch], Tensor],
    items: Sequence[TokenizedProbe],
    *,
    batch_tokens: int = 2048,
    seen: Callable[[int], object] = lambda number: None,
) -> NextTokens:
    """Read the distribution after each prompt.

    Args:
        forward: Gives the logits `[batch, pos, vocab]` of a batch.
        items: Probes with a target of one token.
        batch_tokens: Most tokens of one forward, padding included.
        seen: Called with the number of probes after each forward, e.g. to move a progress bar.
    """
    log_p = torch.zeros(len(items), dtype=torch.float64)
    p_said, said = torch.zeros_like(log_p), torch.zeros(len(items), dtype=torch.int64)
    waiting = sorted(range(len(items)), key=lambda i: -len(items[i].prompt_ids))
    while waiting:
        number = max(1, batch_tokens // len(items[waiting[0]].prompt_ids))
        rows, waiting = waiting[:number], waiting[number:]
        batch = TokenBatch.from_rows([items[i].prompt_ids for i in rows])
        logits = forward(batch)
        last = logits[torch.arange(len(rows)), torch.tensor(batch.lengths) - 1].cpu().double().log_softmax(-1)
        targets = torch.tensor([items[i].target_ids[0] for i in rows])
        log_p[rows] = last.gather(1, targets[:, None])[:, 0]
        most, said[rows] = last.max(-1)
        p_said[rows] = most.exp()
        seen(len(rows))
    return NextTokens(log_p, said == torch.tensor([item.target_ids[0] for item in items]), said, p_said)
