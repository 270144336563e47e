"""Every causal language model of transformers: located, read, ablated and left alone, against plain hooks.

The oracles use the model's own forward, hooks of their own, and copies of the model with a block deleted.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from every_model import ENTRIES, UNBUILDABLE, block_list, blocks, build
from torch import Tensor, nn
from transformers import PreTrainedModel

from tracer.ablations import Edits, sweep
from tracer.engine import Reads, run
from tracer.errors import ModelRefused
from tracer.models.plain import PlainAdapter
from tracer.models.selfcheck import open_plain
from tracer.models.streams import unembed
from tracer.models.tokens import TokenBatch

REFUSED: dict[str, tuple[str, str]] = {
    "cpmant": ("'causality'", "its mask lets every token see all later ones"),
    "xlm": ("no list of modules", "attention and feed-forward layers lie in separate lists; the parent adds them up"),
    "xlnet": ("'causality'", "its tokens see all later ones unless a permutation is passed"),
}
"""Entries that are rightly refused: what the refusal says, and why."""

NOT_YET: dict[str, tuple[type[Exception], str, str]] = {
    "blt": (ModelRefused, "single positions", "blocks run on patches of bytes, so that their positions are not tokens"),
    "hrm_text": (ModelRefused, "'tail'", "two stacks run in turns; the tail is whole only after both have run"),
    "inkling2_loop_text": (ModelRefused, "'tail'", "the tail also reads what blocks wrote to a history of residuals"),
    "inkling2_text": (ModelRefused, "'tail'", "the tail also reads what blocks wrote to a history of residuals"),
    "prophetnet": (ModelRefused, "batch and position", "the residual holds (1 + ngram) streams one after another"),
    "reformer": (ModelRefused, "batch and position", "the residual is padded to chunks, and there are two of it"),
}
"""Entries that cannot be traced yet: what happens, and why. A test fails when one of them starts to pass."""

FULL: dict[str, str] = {
    "dory": "the state before the loop is mixed into every pass",
    "gemma3n_text": "blocks write keys and values into a dict that later blocks read",
    "gemma4": "blocks write keys and values into a dict that later blocks read",
    "gemma4_text": "blocks write keys and values into a dict that later blocks read",
    "gemma4_unified": "blocks write keys and values into a dict",
    "gemma4_unified_text": "blocks write keys and values into a dict",
}
"""Entries that take one whole forward per ablation, and why."""

NOT_DELETABLE: dict[str, str] = {
    "dory": "the first and last blocks of the loop are found by number",
    "gemma3n_text": "the inputs of all blocks are packed in one tensor, by the number of the block",
    "gemma4": "the inputs of all blocks are packed in one tensor, by the number of the block",
    "gemma4_text": "the inputs of all blocks are packed in one tensor, by the number of the block",
    "mllama": "cross-attention layers are found by number",
    "zamba2": "the weights that blocks share are found by the number of the block",
}
"""Entries of which a block cannot be deleted without changing more than that, and why."""

HANDED_ON: dict[str, tuple[int, int | str]] = {
    "glm_moe_dsa": (1, "prev_topk_indices"),
    "hy_v4": (1, "prev_topk_indices"),
    "zaya": (1, 1),
}
"""Where in its output and in its arguments a block has what blocks hand on beside the residual."""

LENGTHS = (9, 6)
BATCH = TokenBatch.from_rows([[30 + (17 * row + 7 * i) % 90 for i in range(n)] for row, n in enumerate(LENGTHS)])
READS = Reads(torch.tensor([0, 0, 1]), torch.tensor([3, 8, 5]))
EDITS = Edits(BATCH.mask.bool(), ("a", "b"), LENGTHS)
TOLERANCE = 1e-4


def log_probs(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1)


def forward(model: PreTrainedModel) -> Tensor:
    """Log-probabilities `[reads, vocab]` of an ordinary forward."""
    with torch.no_grad():
        logits = model(input_ids=BATCH.ids, attention_mask=BATCH.mask, use_cache=False).logits
    return log_probs(logits[READS.rows, READS.positions])


@contextmanager
def discarded(model: PreTrainedModel, model_type: str, call: int) -> Iterator[list[int]]:
    """Run the blocks, but hand on what the `call`-th of them received; yields the blocks in the order of the calls."""
    order: list[int] = []

    def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        order.append(places[module])
        if len(order) - 1 != call:
            return None
        received = args[0] if args else kwargs["hidden_states"]
        if isinstance(output, Tensor):
            return received
        parts = list(output)
        parts[0] = received
        if model_type in HANDED_ON:
            place, name = HANDED_ON[model_type]
            parts[place] = args[name] if isinstance(name, int) else kwargs[name]
        return parts if isinstance(output, list) else tuple(parts)

    places = {block: i for i, block in enumerate(block_list(model))}
    handles = [block.register_forward_hook(hook, with_kwargs=True) for block in places]
    try:
        yield order
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def deleted(model: PreTrainedModel, block: int) -> Iterator[None]:
    """Take a block out of a model, and its entry out of every list of the config that has one per block."""
    layers = block_list(model)
    configs = {id(c): c for c in (model.config, model.config.get_text_config(decoder=True))}.values()
    originals = [(config, type(config), dict(vars(config))) for config in configs]

    def without(value: Any) -> Any:
        return value[:block] + value[block + 1 :] if isinstance(value, list) and len(value) == len(layers) else value

    for config, config_class, values in originals:
        # Some configs compute the list from the number of a block, which is another one after the deletion.
        computed = {
            name: without(getattr(config, name))
            for name in ("layer_types", "layers_block_type")
            if isinstance(getattr(config_class, name, None), property)
        }
        vars(config).update({name: without(value) for name, value in values.items()})
        config.__class__ = type(config_class.__name__, (config_class,), computed)
    removed = layers[block]
    del layers[block]
    try:
        yield
    finally:
        layers.insert(block, removed)
        for config, config_class, values in originals:
            config.__class__ = config_class
            vars(config).update(values)


def traces(model: nn.Module) -> list[tuple[int, int, int, int, tuple[str, ...]]]:
    """What an adapter could leave behind on the modules."""
    return [
        (
            len(m._forward_hooks),
            len(m._forward_pre_hooks),
            len(m._forward_hooks_with_kwargs),
            len(m._forward_pre_hooks_with_kwargs),
            tuple(name for name in ("_call_impl", "forward", "__call__") if name in m.__dict__),
        )
        for m in model.modules()
    ]


@dataclass(frozen=True)
class Skips:
    """What the engines say about skipping each block; `[blocks, reads, vocab]`."""

    clean: Tensor
    skipped: Tensor


def swept(adapter: PlainAdapter, engine: str) -> Skips:
    n_blocks = adapter.anatomy.n_blocks
    tokens = BATCH.ids[READS.rows, READS.positions]
    with torch.no_grad():
        streams = run(adapter, BATCH, READS, sweep(["zero"], range(n_blocks), 1), EDITS, engine=engine)
        clean, *skipped = (log_probs(unembed(adapter, x, tokens)) for x in (streams.clean[-1], *streams.ablated))
    return Skips(clean, torch.stack(skipped))


def gap(x: Tensor, y: Tensor) -> float:
    return (x - y).abs().max().item()


def check(model_type: str) -> None:
    """Everything that holds for a model that can be traced."""
    model = build(model_type)
    before, truth = traces(model), forward(model)

    adapter, self_check = open_plain(model, all_depths=True)
    assert self_check.engine == ("full" if model_type in FULL else "onepass"), self_check.reason
    assert adapter.anatomy.n_blocks == blocks(model_type)
    skips = swept(adapter, self_check.engine)
    if self_check.engine == "onepass":
        assert gap(skips.skipped, swept(adapter, "full").skipped) <= 1e-5
    assert gap(skips.clean, truth) <= TOLERANCE

    assert traces(model) == before
    assert torch.equal(forward(model), truth)

    for call in range(adapter.anatomy.n_blocks):
        with discarded(model, model_type, call) as order:
            expected = forward(model)
        assert gap(skips.skipped[call], expected) <= TOLERANCE, f"call {call}"
        assert gap(expected, truth) > 1e-2, f"skipping block {call} changes nothing: the check would be vacuous"
    modules = dict(model.named_modules())
    assert [modules[call.module] for call in adapter.anatomy.calls] == [block_list(model)[i] for i in order]

    if model_type not in NOT_DELETABLE:
        shorter = copy.deepcopy(model)
        for call, block in enumerate(order):
            with deleted(shorter, block):
                expected = forward(shorter)
            assert gap(skips.skipped[call], expected) <= TOLERANCE, f"block {block} deleted"


@pytest.mark.parametrize("model_type", [e for e in ENTRIES if e not in {**UNBUILDABLE, **REFUSED, **NOT_YET}])
def test_architecture_can_be_traced(model_type):
    check(model_type)


@pytest.mark.parametrize("model_type", [e for e in ENTRIES if e in REFUSED])
def test_architecture_is_refused_and_left_as_it_was(model_type):
    model = build(model_type)
    before, truth = traces(model), forward(model)
    with pytest.raises(ModelRefused, match=REFUSED[model_type][0]):
        open_plain(model)
    assert traces(model) == before
    assert torch.equal(forward(model), truth)


@pytest.mark.parametrize("model_type", [e for e in ENTRIES if e in NOT_YET])
def test_architecture_that_cannot_be_traced_yet(model_type):
    error, message, _ = NOT_YET[model_type]
    with pytest.raises(error, match=message):
        check(model_type)
    model = build(model_type)
    before, truth = traces(model), forward(model)
    with pytest.raises(error, match=message):
        open_plain(model)
    assert traces(model) == before
    assert torch.equal(forward(model), truth)


@pytest.mark.parametrize("model_type", [e for e in ENTRIES if e in NOT_DELETABLE])
def test_list_of_models_without_deletion_is_as_short_as_it_can_be(model_type):
    model = build(model_type)
    shorter = copy.deepcopy(model)
    gaps = []
    for block in range(len(block_list(model))):
        with discarded(model, model_type, block):
            expected = forward(model)
        try:
            with deleted(shorter, block):
                gaps.append(gap(expected, forward(shorter)))
        except (AttributeError, IndexError, KeyError, RuntimeError):
            gaps.append(float("inf"))
    assert max(gaps) > TOLERANCE


def test_lists_name_entries_once():
    lists = (UNBUILDABLE, REFUSED, NOT_YET)
    named = [name for names in lists for name in names]
    assert len(named) == len(set(named))
    assert set(named) | set(FULL) | set(NOT_DELETABLE) | set(HANDED_ON) <= set(ENTRIES)


def test_readme_counts_what_is_traced():
    refused = len(REFUSED) + len(NOT_YET)
    traced = len(ENTRIES) - len(UNBUILDABLE) - refused
    counts = (
        f"of {len(ENTRIES)} entries {traced} are traced exactly ({traced - len(FULL)} in one pass, {len(FULL)} by "
        f"whole forwards), {refused} are refused with the reason, and {len(UNBUILDABLE)} cannot be built alone"
    )
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert counts in " ".join(readme.split())
