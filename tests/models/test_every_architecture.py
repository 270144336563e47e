"""Every causal language model of transformers: located, read, ablated and left alone, against plain hooks.

The oracles use the model's own forward, hooks of their own, and copies of the model with a block deleted.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from every_model import ENTRIES, UNBUILDABLE, block_list, block_modules, blocks, build
from support_table import assert_recorded, is_current, refused, traced
from tiny import VOCAB, older_than
from torch import Tensor, nn
from transformers import PreTrainedModel

from tracer.ablations import Edits, sweep
from tracer.engine import Reads, run
from tracer.errors import ModelRefused
from tracer.logit_lens import open_lens
from tracer.models.plain import PlainAdapter
from tracer.models.selfcheck import open_plain
from tracer.models.tokens import TokenBatch

REFUSED: dict[str, tuple[str, str]] = {
    "cpmant": ("'causality'", "its mask lets every token see all later ones"),
    "prophetnet": ("'causality'", "its output depends on how many tokens, or how much padding, come later"),
    "xlm": ("no list of modules", "attention and feed-forward layers lie in separate lists; the parent adds them up"),
    "xlnet": ("'causality'", "its tokens see all later ones unless a permutation is passed"),
}
"""Entries that are rightly refused: what the refusal says, and why."""

if older_than("5.18"):
    _why = "its decoder is given a mask that lets every token see all later ones"
    REFUSED |= dict.fromkeys(("big_bird", "megatron-bert", "rembert", "roformer"), ("'causality'", _why))
if older_than("5.17"):
    _why = "its indexer takes a boolean mask for one that is added to the scores"
    REFUSED |= dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa"), ("'causality'", _why))
if older_than("5.15"):
    _why = "its scan carries the state wrongly between chunks"
    REFUSED |= dict.fromkeys(("nemotron_h", "zamba2"), ("'causality'", _why))


FULL: dict[str, str] = {
    "blt": "blocks run on patches of bytes, so that their positions are not tokens",
    "dory": "the state before the loop is mixed into every pass",
    "gemma3n_text": "blocks write keys and values into a dict that later blocks read",
    "gemma4": "blocks write keys and values into a dict that later blocks read",
    "gemma4_text": "blocks write keys and values into a dict that later blocks read",
    "gemma4_unified": "blocks write keys and values into a dict",
    "gemma4_unified_text": "blocks write keys and values into a dict",
    "hrm_text": "two stacks run in turns, each on the sum of both states",
    "inkling2_loop_text": "blocks and the tail read a history of residuals",
    "inkling2_text": "blocks and the tail read a history of residuals",
    "reformer": "the residual is padded to chunks, and there are two of it",
}
"""Entries that take one whole forward per ablation, and why."""

if older_than("5.14"):
    FULL["deepseek_v4"] = "blocks write keys and values into a cache that is made unasked"

WHOLE = {"blt", "inkling2_loop_text", "inkling2_text", "reformer"}
"""Entries whose tail cannot be replayed on single positions, so that every depth is read by a whole forward."""

UNCHAINED = {"dory", "hrm_text"}
"""Entries whose parent changes the residual between two blocks: handing it on is not the same as ending there."""

NOT_DELETABLE: dict[str, str] = {
    "dory": "the first and last blocks of the loop are found by number",
    "gemma3n_text": "the inputs of all blocks are packed in one tensor, by the number of the block",
    "gemma4": "the inputs of all blocks are packed in one tensor, by the number of the block",
    "gemma4_text": "the inputs of all blocks are packed in one tensor, by the number of the block",
    "hrm_text": "every block is called several times",
    "inkling2_loop_text": "the first and last blocks of the loop are found by number",
    "inkling2_text": "which blocks write to the history is decided by number",
    "mllama": "cross-attention layers are found by number",
    "zamba2": "the weights that blocks share are found by the number of the block",
}
"""Entries of which a block cannot be deleted without changing more than that, and why."""

if older_than("5.14"):
    NOT_DELETABLE["deepseek_v4"] = "the cache that a block writes to is found by its number"

HANDED_ON: dict[str, tuple[int, int | str]] = {
    "glm_moe_dsa": (1, "prev_topk_indices"),
    "hy_v4": (1, "prev_topk_indices"),
    "reformer": (1, "prev_attn_output"),
    "zaya": (1, 1),
}
"""Where in its output and in its arguments a block has what blocks hand on beside the residual."""

MADE_BY_SOME = {"glm_moe_dsa", "hy_v4", "zaya"}
"""Entries in which only some blocks make what is handed on: of several that are discarded, the later ones need it."""

LENGTHS = (9, 6)
BATCH = TokenBatch.from_rows([[30 + (17 * row + 7 * i) % 90 for i in range(n)] for row, n in enumerate(LENGTHS)])
READS = Reads(torch.tensor([0, 0, 1]), torch.tensor([3, 8, 5]))
TOLERANCE = 1e-4


def log_probs(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1)


def forward(model: PreTrainedModel) -> Tensor:
    """Log-probabilities `[reads, vocab]` of an ordinary forward."""
    with torch.no_grad():
        logits = model(input_ids=BATCH.ids, attention_mask=BATCH.mask, use_cache=False).logits
    return log_probs(logits[READS.rows, READS.positions])


@contextmanager
def discarded(model: PreTrainedModel, model_type: str, calls: Sequence[int]) -> Iterator[list[int]]:
    """Run the blocks, but hand on what some of the calls received; yields the blocks in the order of the calls."""
    order: list[int] = []

    def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        order.append(places[module])
        if len(order) - 1 not in calls:
            return None
        received = args[0] if args else kwargs["hidden_states"]
        if isinstance(output, Tensor):
            return received
        parts = list(output)
        parts[0] = received
        if model_type in HANDED_ON and not (len(calls) > 1 and model_type in MADE_BY_SOME):
            place, name = HANDED_ON[model_type]
            parts[place] = args[name] if isinstance(name, int) else kwargs[name]
        if isinstance(output, list):
            return parts
        return type(output)(*parts) if hasattr(output, "_fields") else tuple(parts)

    places = {block: i for i, block in enumerate(block_modules(model))}
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
    """What the lens says of every depth, and the engines about skipping each block; `[.., reads, vocab]`."""

    depths: Tensor
    skipped: Tensor


def swept(adapter: PlainAdapter, engine: str, tail: str) -> Skips:
    n_blocks = adapter.anatomy.n_blocks
    variants = sweep(["zero"], range(n_blocks), 1)
    edits = Edits(adapter, BATCH.mask.bool(), ("a", "b"), LENGTHS)
    with torch.no_grad():
        streams = run(adapter, BATCH, READS, variants, edits, engine=engine)
        lens = open_lens(tail, adapter, BATCH, READS, variants, edits, streams)
        logits = log_probs(lens.logits(range(1 + 2 * n_blocks), range(len(READS))))
    return Skips(logits[: n_blocks + 1], logits[n_blocks + 1 :])


def gap(x: Tensor, y: Tensor) -> float:
    return (x - y).abs().max().item()


def check(model_type: str) -> None:
    """Everything that holds for a model that can be traced."""
    model = build(model_type)
    before, truth = traces(model), forward(model)

    adapter, self_check = open_plain(model, all_depths=True)
    assert self_check.engine == ("full" if model_type in FULL else "onepass"), self_check.reason
    assert self_check.tail == ("whole" if model_type in WHOLE else "replayed"), self_check.reason
    assert adapter.anatomy.n_blocks == blocks(model_type)
    if is_current():
        assert_recorded(model_type, traced(adapter.anatomy, self_check))
    skips = swept(adapter, self_check.engine, self_check.tail)
    if self_check.engine == "onepass":
        assert gap(skips.skipped, swept(adapter, "full", self_check.tail).skipped) <= 1e-5
    assert gap(skips.depths[-1], truth) <= TOLERANCE

    assert traces(model) == before
    assert torch.equal(forward(model), truth)

    effects: list[float] = []
    for call in range(adapter.anatomy.n_blocks):
        if model_type not in UNCHAINED:
            with discarded(model, model_type, range(call, adapter.anatomy.n_blocks)):
                assert gap(skips.depths[call], forward(model)) <= TOLERANCE, f"lens at depth {call}"
        with discarded(model, model_type, [call]) as order:
            expected = forward(model)
        assert gap(skips.skipped[call], expected) <= TOLERANCE, f"call {call}"
        effects.append(gap(expected, truth))
    # What one of many passes adds may be forgotten by the next ones.
    least = max(effects) if model_type in UNCHAINED else min(effects)
    assert least > 1e-2, f"skipping a block changes nothing: the check would be vacuous: {effects}"
    modules = dict(model.named_modules())
    assert [modules[call.module] for call in adapter.anatomy.calls] == [block_modules(model)[i] for i in order]

    if model_type not in NOT_DELETABLE:
        for call, block in enumerate(order):
            with deleted(model, block):
                expected = forward(model)
            assert gap(skips.skipped[call], expected) <= TOLERANCE, f"block {block} deleted"


@pytest.mark.parametrize("model_type", [e for e in ENTRIES if e not in {**UNBUILDABLE, **REFUSED}])
def test_architecture_can_be_traced(model_type):
    check(model_type)


@pytest.mark.parametrize("model_type", [e for e in ENTRIES if e in REFUSED])
def test_architecture_is_refused_and_left_as_it_was(model_type):
    model = build(model_type)
    before, truth = traces(model), forward(model)
    with pytest.raises(ModelRefused, match=REFUSED[model_type][0]) as refusal:
        open_plain(model)
    if is_current():
        assert_recorded(model_type, refused(refusal.value))
    assert traces(model) == before
    assert torch.equal(forward(model), truth)


@pytest.mark.parametrize("model_type", [e for e in ENTRIES if REFUSED.get(e, ("",))[0] == "'causality'"])
def test_outputs_of_models_that_are_refused_as_not_causal_depend_on_later_tokens(model_type):
    model = build(model_type)
    ids = (30 + 7 * torch.arange(13)[None]) % VOCAB
    with torch.no_grad():
        whole, cut = (log_probs(model(input_ids=x, use_cache=False).logits) for x in (ids, ids[:, :-1]))
    assert gap(whole[:, : cut.shape[1]].exp(), cut.exp()) > TOLERANCE


@pytest.mark.parametrize("model_type", [e for e in ENTRIES if e in NOT_DELETABLE])
def test_list_of_models_without_deletion_is_as_short_as_it_can_be(model_type):
    model = build(model_type)
    shorter = copy.deepcopy(model)
    gaps = []
    for block in range(len(block_list(model))):
        with discarded(model, model_type, [block]):
            expected = forward(model)
        try:
            with deleted(shorter, block):
                gaps.append(gap(expected, forward(shorter)))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            gaps.append(float("inf"))
    assert max(gaps) > TOLERANCE


def test_lists_name_entries_once():
    lists = (UNBUILDABLE, REFUSED)
    named = [name for names in lists for name in names]
    assert len(named) == len(set(named))
    if not is_current():
        pytest.skip("the lists are those of the release that the table was measured with, which may have more entries")
    assert set(named) | set(FULL) | WHOLE | set(NOT_DELETABLE) | set(HANDED_ON) <= set(ENTRIES)
