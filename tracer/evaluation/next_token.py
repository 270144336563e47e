"""The token after a prompt: its distribution, how likely the target is, and whether it comes first."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tracer.divergence import log_probs
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


def next_tokens(
    forward: Callable[[TokenBatch], Tensor],
    items: Sequence[TokenizedProbe],
    *,
    batch_tokens: int = 2048,
    seen: Callable[[int], object] = lambda number: None,
) -> NextTokens:
    """Compare what comes after each prompt with its target.

    Args:
        forward: Gives the logits `[batch, pos, vocab]` of a batch.
        items: Probes with a target of one token.
        batch_tokens: Most tokens of one forward, padding included.
        seen: Called with the number of probes after each forward, e.g. to move a progress bar.
    """
    targets = torch.tensor([item.target_ids[0] for item in items], dtype=torch.int64)
    log_p, p_said = torch.zeros(2, len(items), dtype=torch.float64)
    said = torch.zeros_like(targets)
    for rows, found in next_distributions(forward, [item.prompt_ids for item in items], batch_tokens=batch_tokens):
        log_p[rows] = found.gather(1, targets[rows, None])[:, 0]
        most, said[rows] = found.max(-1)
        p_said[rows] = most.exp()
        seen(len(rows))
    return NextTokens(log_p, said == targets, said, p_said)


def next_distributions(
    forward: Callable[[TokenBatch], Tensor], prompts: Sequence[Sequence[int]], *, batch_tokens: int = 2048
) -> Iterator[tuple[list[int], Float[Tensor, "rows vocab"]]]:
    """The distribution of the token after each prompt, batch by batch, the longest prompts first.

    Args:
        forward: Gives the logits `[batch, pos, vocab]` of a batch.
        prompts: Token ids.
        batch_tokens: Most tokens of one forward, padding included.

    Yields:
        Which prompts a batch holds, and `[rows, vocab]` float64 log-probabilities on the CPU.
    """
    waiting = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    while waiting:
        number = max(1, batch_tokens // len(prompts[waiting[0]]))
        rows, waiting = waiting[:number], waiting[number:]
        batch = TokenBatch.from_rows([prompts[i] for i in rows])
        with torch.inference_mode():
            logits = forward(batch)
            last = logits[torch.arange(len(rows)), torch.tensor(batch.lengths) - 1]
            found = log_probs(last.float().cpu())
        yield rows, found
