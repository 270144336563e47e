"""From residual streams at the read positions to numbers per probe, one chunk of `[rows, vocab]` at a time.

Depth rows are read by logit lens (nostalgebraist 2020): the model's own tail on `resid[d]`. Variant rows are the
outputs under an ablation. All log-probabilities, entropies and divergences are in nats.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from tracer.divergence import angular_distance, entropy, js_divergence, kl_divergence, log_probs
from tracer.engine import ReadStreams
from tracer.logit_lens import Lens
from tracer.models.anatomy import Anatomy

MAX_LOGITS = 1 << 24
"""Most entries of one chunk of `[rows, vocab]` (float64: 128 MiB)."""


@dataclass(frozen=True)
class Targets:
    """What is read for each probe of a batch.

    Attributes:
        probe: `[reads]` the row of the batch that each read belongs to; reads of one probe lie together.
        tokens: `[reads]` the token that each read should predict; several per probe for joint targets.
        rivals: `[probes, rivals]` tokens whose probability is kept at every depth, padded by repetition.
    """

    probe: Tensor
    tokens: Tensor
    rivals: Tensor

    @property
    def first_reads(self) -> Tensor:
        """`[probes]` the read that predicts the first target token of each probe."""
        new = torch.ones_like(self.probe, dtype=torch.bool)
        new[1:] = self.probe[1:] != self.probe[:-1]
        return new.nonzero().flatten()


@dataclass(frozen=True)
class Measures:
    """Numbers per probe of one batch, or of all. Leading axes: depths 0..L, or variants; last: probes.

    Attributes:
        log_p: `[depths, probes]` log-probability of the target (sum over its tokens).
        rival_log_p: `[depths, probes, rivals]` log-probability of other tokens.
        rank: `[depths, probes]` rank of the target, 1 = top (the worst of its tokens); ties share their middle rank.
        entropy: `[depths, probes]` of the lens distribution.
        kl_to_final: `[depths, probes]` KL(lens distribution || output distribution).
        norm: `[depths, probes]` Euclidean norm of the residual at the position that predicts the target.
        angle: `[depths, probes]` angular distance to the depth before, in units of pi; 0 at depth 0.
        answer: `[probes]` the model's top-1 token.
        answered: `[probes]` whether every target token is the model's top-1.
        ceiling: `[probes]` JSD of the output from the uniform distribution.
        jsd: `[variants, probes]` JSD of the outputs with and without the ablation.
        ablated_log_p: `[variants, probes]` log-probability of the target under the ablation.
        ablated_rank: `[variants, probes]` rank of the target under the ablation.
        ablated_answered: `[variants, probes]` whether every target token is top-1 under the ablation.
        ablated_entropy: `[variants, probes]` entropy of the output under the ablation.
        ablated_kl: `[variants, probes]` KL(output under the ablation || clean output).
        ablated_norm: `[variants, probes]` norm of the last residual under the ablation.
        ablated_angle: `[variants, probes]` angular distance of the last residual to the clean one, in units of pi.
    """

    log_p: np.ndarray
    rival_log_p: np.ndarray
    rank: np.ndarray
    entropy: np.ndarray
    kl_to_final: np.ndarray
    norm: np.ndarray
    angle: np.ndarray
    answer: np.ndarray
    answered: np.ndarray
    ceiling: np.ndarray
    jsd: np.ndarray
    ablated_log_p: np.ndarray
    ablated_rank: np.ndarray
    ablated_answered: np.ndarray
    ablated_entropy: np.ndarray
    ablated_kl: np.ndarray
    ablated_norm: np.ndarray
    ablated_angle: np.ndarray

    def as_dict(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def measure(
    anatomy: Anatomy, lens: Lens, streams: ReadStreams, targets: Targets, variants: int, max_logits: int = MAX_LOGITS
) -> Measures:
    """Unembed every depth and every ablation and reduce to numbers per probe.

    Args:
        anatomy: of the opened model.
        lens: from streams to logits.
        streams: what the engine returned.
        targets: what to read.
        variants: how many ablations there are.
        max_logits: most entries of one chunk of `[rows, vocab]`.
    """
    depths = anatomy.n_blocks + 1
    reducer = _Reducer(targets, depths, variants)
    items = range(depths + variants)
    for reads in _chunks(targets, max_logits // anatomy.vocab):
        final = log_probs(lens.logits([depths - 1], reads)[0])
        reducer.add_final(final, reads)
        per_call = max(1, max_logits // (len(reads) * anatomy.vocab))
        for start in range(0, len(items), per_call):
            for item, rows in zip(
                items[start : start + per_call], lens.logits(items[start : start + per_call], reads), strict=True
            ):
                reducer.add(item, log_probs(rows), final, reads)
    return reducer.measures(_geometry(anatomy, streams, targets, variants))


def _geometry(anatomy: Anatomy, streams: ReadStreams, targets: Targets, variants: int) -> dict[str, np.ndarray]:
    """Norms and angles of the streams; missing where the positions of the stream are not tokens."""
    first = targets.first_reads.tolist()
    if streams.clean is None or streams.ablated is None:
        shapes = {"norm": anatomy.n_blocks + 1, "angle": anatomy.n_blocks + 1}
        shapes |= {"ablated_norm": variants, "ablated_angle": variants}
        return {name: np.full((rows, len(first)), np.nan) for name, rows in shapes.items()}
    clean, ablated = (
        [rows_of_stream(anatomy, stream)[first] for stream in part] for part in (streams.clean, streams.ablated)
    )
    nothing = torch.zeros(1, len(first), dtype=torch.float64)
    found = {
        "norm": torch.stack([stream.norm(dim=-1) for stream in clean]),
        "angle": torch.cat([nothing, *(angular_distance(a, b)[None] for a, b in pairwise(clean))]),
        "ablated_angle": torch.cat([nothing[:0], *(angular_distance(clean[-1], x)[None] for x in ablated)]),
        "ablated_norm": torch.cat([nothing[:0], *(x.norm(dim=-1)[None] for x in ablated)]),
    }
    return {name: values.numpy() for name, values in found.items()}


def rows_of_stream(anatomy: Anatomy, stream: Tensor) -> Tensor:
    """`[reads, d]` float64 on the CPU from a single-position stream of any layout."""
    return anatomy.rows_first(stream).flatten(1).cpu().double()


class _Reducer:
    """Collects numbers per probe from log-probabilities `[reads, vocab]`, item by item.

    Items 0..depths-1 are the lens at a depth, the following ones the output under an ablation.
    """

    def __init__(self, targets: Targets, depths: int, variants: int):
        n_probes, n_rivals = targets.rivals.shape
        self.targets = targets
        self.depths = depths
        self.starts = set(targets.first_reads.tolist())
        self.log_p = np.zeros((depths + variants, n_probes))
        self.rank = np.ones((depths + variants, n_probes), dtype=np.int64)
        self.answered = np.ones((depths + variants, n_probes), dtype=bool)
        self.entropy = np.zeros((depths + variants, n_probes))
        self.rival_log_p = np.zeros((depths, n_probes, n_rivals))
        self.kl_to_final = np.zeros((depths + variants, n_probes))
        self.jsd = np.zeros((variants, n_probes))
        self.answer = np.zeros(n_probes, dtype=np.int64)
        self.ceiling = np.zeros(n_probes)

    def add_final(self, final: Tensor, reads: Sequence[int]) -> None:
        """The model's own output."""
        at, probes = self._first(reads)
        self.answer[probes] = final[at].argmax(-1).cpu().numpy()
        uniform = torch.full_like(final[:1], -math.log(final.shape[-1]))
        self.ceiling[probes] = js_divergence(final[at], uniform).cpu().numpy()

    def add(self, item: int, log_p: Tensor, final: Tensor, reads: Sequence[int]) -> None:
        """One depth or one ablation, for some reads."""
        index = torch.as_tensor(reads)
        tokens = self.targets.tokens[index].to(log_p.device)
        own = log_p.gather(-1, tokens[:, None])
        owners = self.targets.probe[index].numpy()
        above, level = (log_p > own).sum(-1), (log_p == own).sum(-1)
        np.add.at(self.log_p[item], owners, own[:, 0].cpu().numpy())
        np.maximum.at(self.rank[item], owners, (above + (level + 1) // 2).cpu().numpy())
        np.logical_and.at(self.answered[item], owners, (log_p.argmax(-1) == tokens).cpu().numpy())
        at, probes = self._first(reads)
        self.entropy[item, probes] = entropy(log_p[at]).cpu().numpy()
        self.kl_to_final[item, probes] = kl_divergence(log_p[at], final[at]).cpu().numpy()
        if item < self.depths:
            rivals = log_p[at].gather(-1, self.targets.rivals[probes].to(log_p.device))
            self.rival_log_p[item, probes] = rivals.cpu().numpy()
        else:
            self.jsd[item - self.depths, probes] = js_divergence(log_p[at], final[at]).cpu().numpy()

    def measures(self, geometry: dict[str, np.ndarray]) -> Measures:
        """Everything collected, with what was measured on the streams themselves."""
        return Measures(
            log_p=self.log_p[: self.depths],
            rival_log_p=self.rival_log_p,
            rank=self.rank[: self.depths],
            entropy=self.entropy[: self.depths],
            kl_to_final=self.kl_to_final[: self.depths],
            answer=self.answer,
            answered=self.answered[self.depths - 1],
            ceiling=self.ceiling,
            jsd=self.jsd,
            ablated_log_p=self.log_p[self.depths :],
            ablated_rank=self.rank[self.depths :],
            ablated_answered=self.answered[self.depths :],
            ablated_entropy=self.entropy[self.depths :],
            ablated_kl=self.kl_to_final[self.depths :],
            **geometry,
        )

    def _first(self, reads: Sequence[int]) -> tuple[list[int], list[int]]:
        """Places among `reads` that predict a first target token, and the probes that they belong to."""
        at = [place for place, read in enumerate(reads) if read in self.starts]
        return at, self.targets.probe[[reads[place] for place in at]].tolist()


def _chunks(targets: Targets, most_rows: int) -> Iterator[list[int]]:
    """Split the reads into runs of whole probes with at most half of `most_rows` reads (at least one probe).

    Half, since the final distribution stays in memory beside the chunk that is compared with it.
    """
    chunk: list[int] = []
    for row in range(len(targets.rivals)):
        own = (targets.probe == row).nonzero().flatten().tolist()
        if chunk and len(chunk) + len(own) > most_rows // 2:
            yield chunk
            chunk = []
        chunk += own
    if chunk:
        yield chunk
