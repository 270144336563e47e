"""From tokenized probes to batches that a model can run: what to feed, where to read, which targets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from tracer.ablations import Calibration, Edits, Positions, donated, donor_of, donor_positions, position_mask
from tracer.engine import Reads
from tracer.measures import Targets
from tracer.models.plain import Adapter
from tracer.models.sublayers import Sublayers
from tracer.models.tokens import TokenBatch
from tracer.probes import TokenizedProbe

CLEAN_SHARE = 8
"""A batch of probes fills an eighth of `batch_tokens`: its variants share calls, and finished batches come often."""


@dataclass(frozen=True)
class TargetTable:
    """The different targets of each group.

    Attributes:
        targets: group to its distinct targets (tuples of token ids), in order of first appearance.
        own: for each probe, which of its group's targets is its own.
    """

    targets: Mapping[str, tuple[tuple[int, ...], ...]]
    own: np.ndarray

    @classmethod
    def of(cls, items: Sequence[TokenizedProbe]) -> "TargetTable":
        """Collect the targets of all probes."""
        seen: dict[str, dict[tuple[int, ...], int]] = {}
        own = []
        for item in items:
            group = seen.setdefault(item.probe.group, {})
            own.append(group.setdefault(item.target_ids, len(group)))
        return cls({name: tuple(group) for name, group in seen.items()}, np.array(own, dtype=np.int64))

    def joint(self, group: str) -> bool:
        """Whether some target of the group has several tokens, so that it cannot be read at one position."""
        return any(len(target) > 1 for target in self.targets[group])


@dataclass(frozen=True)
class ProbeBatch:
    """Probes that run together.

    Attributes:
        index: which probes of the trace these are.
        items: the probes.
        tokens: prompts with all but the last target token, right-padded.
        reads: the positions that predict each target token.
        targets: what is read there.
        last: the last position of each prompt.
    """

    index: tuple[int, ...]
    items: tuple[TokenizedProbe, ...]
    tokens: TokenBatch
    reads: Reads
    targets: Targets
    last: tuple[int, ...]


def probe_batches(items: Sequence[TokenizedProbe], table: TargetTable, batch_tokens: int) -> list[ProbeBatch]:
    """Length-sorted batches of about `batch_tokens / 8` tokens each, one probe at least.

    The order depends on the lengths and the given order alone, so that an interrupted trace finds the same batches.
    """
    most = max(1, batch_tokens // CLEAN_SHARE)
    batches: list[ProbeBatch] = []
    current: list[int] = []
    for index in sorted(range(len(items)), key=lambda i: (_length(items[i]), i)):
        if current and (len(current) + 1) * _length(items[index]) > most:
            batches.append(_batch(items, current, table))
            current = []
        current.append(index)
    if current:
        batches.append(_batch(items, current, table))
    return batches


def crossed(items: Sequence[TokenizedProbe], table: TargetTable, group: str) -> list[TokenizedProbe]:
    """Every prompt of a group with every one of its targets, prompt by prompt."""
    return [
        TokenizedProbe(item.probe, item.prompt_ids, target)
        for item in items
        if item.probe.group == group
        for target in table.targets[group]
    ]


def token_batches(rows: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[TokenBatch]:
    """Length-sorted, right-padded batches of plain token sequences."""
    current: list[Sequence[int]] = []
    for row in sorted(rows, key=len):
        if current and (len(current) + 1) * len(row) > batch_tokens:
            yield TokenBatch.from_rows(current)
            current = []
        current.append(row)
    if current:
        yield TokenBatch.from_rows(current)


def edits_for(
    adapter: Adapter,
    batch: ProbeBatch,
    kinds: Sequence[str],
    positions: Positions,
    *,
    donors: Mapping[str, TokenizedProbe],
    calibration: Calibration | None,
    sublayers: Sublayers | None,
    seed: int,
    noise_scale: float,
    perturb_scale: float,
    other: Sequence[nn.Module] | None,
) -> Edits:
    """How the given ablations act on a batch; runs the donors once when `resample` is among them.

    Args:
        adapter: the opened model.
        batch: the probes.
        kinds: the ablations.
        positions: where they act.
        donors: probe id to its donor, from `choose_donors`.
        calibration: needed by `mean` and `noise`.
        sublayers: needed by ablations of parts.
        seed: of the noise.
        noise_scale: in units of the contribution's standard deviation.
        perturb_scale: in units of the norm of each weight matrix.
        other: blocks of another checkpoint, needed by `swap_weights`.
    """
    donations = donor_mask = None
    if "resample" in kinds:
        givers = [donors[item.probe.id].prompt_ids for item in batch.items]
        width = batch.tokens.ids.shape[1]
        # Only the prompt is exchanged: teacher-forced target tokens keep their own contribution.
        places = np.stack(
            [
                donor_positions(len(item.prompt_ids), len(giver), width)
                for item, giver in zip(batch.items, givers, strict=True)
            ]
        )
        donor_mask = torch.as_tensor(places >= 0)
        donations = donated(adapter, TokenBatch.from_rows(givers), places, sublayers)
    return Edits(
        adapter=adapter,
        mask=position_mask(positions, batch.tokens, batch.last),
        probe_ids=tuple(item.probe.id for item in batch.items),
        lengths=batch.tokens.lengths,
        seed=seed,
        noise_scale=noise_scale,
        perturb_scale=perturb_scale,
        calibration=calibration,
        donations=donations,
        donor_mask=donor_mask,
        whole=positions == "all",
        sublayers=sublayers,
        other=other,
    )


def choose_donors(items: Sequence[TokenizedProbe], seed: int) -> dict[str, TokenizedProbe]:
    """A donor of the same group for every probe, fixed by (seed, probe id).

    Raises:
        InputError: a group has a single probe.
    """
    by_id = {item.probe.id: item for item in items}
    members: dict[str, list[str]] = {}
    for item in items:
        members.setdefault(item.probe.group, []).append(item.probe.id)
    return {item.probe.id: by_id[donor_of(item.probe.id, members[item.probe.group], seed)] for item in items}


def _length(item: TokenizedProbe) -> int:
    return len(item.prompt_ids) + len(item.target_ids) - 1


def _batch(items: Sequence[TokenizedProbe], index: Sequence[int], table: TargetTable) -> ProbeBatch:
    chosen = tuple(items[i] for i in index)
    tokens = TokenBatch.from_rows([item.prompt_ids + item.target_ids[:-1] for item in chosen])
    last = tuple(len(item.prompt_ids) - 1 for item in chosen)
    reads = [
        (row, last[row] + step, token) for row, item in enumerate(chosen) for step, token in enumerate(item.target_ids)
    ]
    rows, positions, wanted = (torch.tensor(column) for column in zip(*reads, strict=True))
    # Rivals are read at one position; groups with longer targets are read by `crossed` instead.
    rivals = [[target[0] for target in table.targets[item.probe.group]] for item in chosen]
    widest = max(map(len, rivals))
    padded = torch.tensor([row + row[:1] * (widest - len(row)) for row in rivals])
    return ProbeBatch(
        index=tuple(index),
        items=chosen,
        tokens=tokens,
        reads=Reads(rows, positions),
        targets=Targets(rows, wanted, padded),
        last=last,
    )
