"""Hook utilities against the plain way: raw PyTorch hooks on blocks that are found by their attribute names."""

import contextlib
import copy
import dataclasses
import doctest
import functools
import gc
import weakref

import accelerate
import every_model
import oracle
import pytest
import torch
from tiny import CORE, FAMILIES, tiny
from torch import nn
from transformers import PreTrainedModel

import tracer
from tracer import hooks
from tracer.errors import HookError, InputError, ModelRefused
from tracer.models.streams import read_streams, resume
from tracer.models.tokens import TokenBatch
from tracer.models.transformer_lens import booted_bridge

IDS = torch.tensor([[5, 17, 33, 8, 91, 64, 12]])
PAIR = torch.tensor([[5, 17, 33, 8, 91, 64, 12], [7, 41, 19, 100, 3, 55, 28]])
BLOCKS = 4


@functools.cache
def shared(family: str) -> PreTrainedModel:
    """One model per family for the tests that leave it as it was."""
    return tiny(family)


@contextlib.contextmanager
def raw_hook(module: nn.Module, hook, *, pre: bool = False):
    handle = (
        module.register_forward_pre_hook(hook, with_kwargs=True)
        if pre
        else module.register_forward_hook(hook, with_kwargs=True)
    )
    try:
        yield
    finally:
        handle.remove()


def swapped(output, new):
    """An output with its first tensor replaced."""
    return (new, *output[1:]) if isinstance(output, tuple) else new


def skipping(model: nn.Module, block: int):
    """A block whose output is its input, by a raw hook."""
    return raw_hook(
        oracle.blocks_of(model)[block],
        lambda module, args, kwargs, output: swapped(output, args[0] if args else kwargs["hidden_states"]),
    )


def silenced(module: nn.Module):
    """A sub-layer whose output is zero, by a raw hook."""
    return raw_hook(module, lambda m, args, kwargs, output: swapped(output, torch.zeros_like(oracle.hidden(output))))


def edited(model: nn.Module, depth: int, edit):
    """The stream at a depth edited by a raw hook on the input of a block, or on the output of the last."""
    blocks = oracle.blocks_of(model)
    if depth == len(blocks):
        return raw_hook(blocks[-1], lambda m, a, k, output: swapped(output, edit(oracle.hidden(output))))
    return raw_hook(blocks[depth], lambda m, args, kwargs: ((edit(args[0]), *args[1:]), kwargs), pre=True)


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor = IDS, **arguments) -> torch.Tensor:
    return model(input_ids=ids, **{"use_cache": False, **arguments}).logits


def counts(model: nn.Module) -> dict[str, tuple[int, int, bool]]:
    return {
        name: (len(m._forward_hooks), len(m._forward_pre_hooks), "_call_impl" in m.__dict__)
        for name, m in model.named_modules()
    }


# Reading


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_are_those_of_raw_hooks_and_reading_changes_nothing(family):
    model = shared(family)
    clean = logits(model)
    with hooks.read(model) as reading:
        assert torch.equal(logits(model), clean)
    expected = oracle.streams(model, IDS[0].tolist())
    assert sorted(reading.streams) == list(range(BLOCKS + 1))
    for depth, stream in enumerate(expected):
        assert torch.equal(reading.streams[depth][0], stream), depth
    assert all(stream.grad_fn is None and not stream.requires_grad for stream in reading.streams.values())


def test_positions_are_columns_in_the_order_asked_for():
    model = shared("llama")
    with hooks.read(model) as full, hooks.read(model, depths=[2, 4], positions=[3, 1]) as some:
        logits(model, PAIR)
    for depth in (2, 4):
        assert torch.equal(some.streams[depth], full.streams[depth][:, [3, 1]])


def test_what_was_read_is_not_changed_by_later_edits_in_place():
    model = shared("llama")
    with hooks.read(model, depths=[0, 1]) as before:
        logits(model)

    def zeroes_in_place(module, args, kwargs):
        args[0][:, -1] = 0

    with raw_hook(oracle.blocks_of(model)[1], zeroes_in_place, pre=True):
        with hooks.read(model, depths=[0, 1]) as after:
            logits(model)
        with hooks.read(model, depths=[0, 1], detach=False) as attached:
            model(input_ids=IDS, use_cache=False)
        value = torch.ones(1, 7, 64)
        for context in (
            hooks.replace(model, 1, value),
            hooks.resume(model, 1, value),
            hooks.replace(model, 1, value[0, 0]),
        ):
            with context:
                logits(model)
    for depth in (0, 1):
        assert torch.equal(before.streams[depth], after.streams[depth])
        assert torch.equal(before.streams[depth], attached.streams[depth])
    assert torch.equal(value, torch.ones(1, 7, 64))


def test_gradients_of_outputs_reach_the_streams_of_a_frozen_model():
    model = tiny("llama")
    for parameter in model.parameters():
        parameter.requires_grad = False
    with hooks.read(model, depths=[2, 4], positions=[-1, 2], detach=False) as reading:
        output = model(input_ids=IDS, use_cache=False).logits
        assert torch.equal(output.detach(), logits(model))
    reading_grads = torch.autograd.grad(output[0, -1, 9], [reading.all[d][0] for d in (2, 4)])
    leaf = None

    def as_leaf(stream):
        nonlocal leaf
        leaf = stream.detach().clone().requires_grad_()
        return leaf

    for depth, grad in zip((2, 4), reading_grads, strict=True):
        with edited(model, depth, as_leaf):
            by_hand = torch.autograd.grad(model(input_ids=IDS, use_cache=False).logits[0, -1, 9], leaf)[0]
        assert torch.allclose(grad, by_hand[:, [-1, 2]], atol=1e-6)
        assert grad[0, 0].abs().max() > 1e-3


# Ablating


@pytest.mark.parametrize("family", FAMILIES)
def test_a_skipped_block_hands_on_its_input_in_every_row(family):
    """Whatever a block returns, tensor or tuple: identical rows stay identical, and differ from the clean run."""
    model = shared(family)
    twice = IDS.repeat(2, 1)
    clean = logits(model, twice)
    for block in (1, 3):
        with hooks.ablate(model, block), hooks.read(model, depths=[block, block + 1]) as reading:
            ours = logits(model, twice)
        with skipping(model, block):
            assert torch.equal(ours, logits(model, twice))
        assert torch.equal(reading.streams[block], reading.streams[block + 1])
        assert reading.streams[block].shape == (2, 7, reading.streams[block].shape[-1])
        # Some kernels round rows of one batch differently, also without hooks.
        assert (ours[0] - ours[1]).abs().max() <= 2 * (clean[0] - clean[1]).abs().max()
        assert (ours - clean).abs().amax((1, 2)).min() > 1e-3


SUBLAYERS = {
    "llama": ("self_attn", "mlp"),
    "gpt2": ("attn", "mlp"),
    "gpt_neox": ("attention", "mlp"),
    "mixtral": ("self_attn", "mlp"),
    "qwen3_next": ("linear_attn", "mlp"),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "granite": ("self_attn", "mlp"),
    "mamba2": ("mixer", None),
}


@pytest.mark.parametrize("family", SUBLAYERS)
def test_a_silenced_sublayer_is_that_of_a_raw_hook(family):
    model = shared(family)
    block = oracle.blocks_of(model)[1]
    for part, name in zip(("mixer", "mlp"), SUBLAYERS[family], strict=True):
        if name is None:
            with pytest.raises(InputError, match=r"block 1 \(backbone.layers.1\) has no mlp"):
                hooks.ablate(model, 1, part).__enter__()
            continue
        with silenced(getattr(block, name)):
            expected = logits(model, PAIR)
        with hooks.ablate(model, 1, part):
            ours = logits(model, PAIR)
        assert torch.allclose(ours, expected, atol=1e-5), part
        assert (ours - logits(model, PAIR)).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["bloom", "falcon_h1", "gptj", "gemma2"])
def test_without_mixer_and_mlp_nothing_of_the_block_is_left(family):
    model = shared(family)
    with hooks.ablate(model, [1, 2], "mixer"), hooks.ablate(model, [1, 2], "mlp"), hooks.read(model) as reading:
        logits(model, PAIR)
    for block in (1, 2):
        assert torch.allclose(reading.streams[block], reading.streams[block + 1], atol=1e-5)
        assert not torch.equal(reading.streams[0], reading.streams[1])


@pytest.mark.parametrize("part", ["block", "mixer"])
def test_a_contribution_takes_the_place_of_the_blocks_own(part):
    model, torch_rng = shared("llama"), torch.Generator().manual_seed(3)
    value = torch.randn(2, 2, 64, generator=torch_rng)
    block = oracle.blocks_of(model)[1]
    module = block if part == "block" else block.self_attn

    def by_hand(m, args, kwargs, output):
        new = oracle.hidden(output).clone()
        new[:, [4, 2]] = value + (args[0][:, [4, 2]] if part == "block" else 0)
        return swapped(output, new)

    with raw_hook(module, by_hand):
        expected = logits(model, PAIR)
    with hooks.ablate(model, 1, part, contribution=value, positions=[4, 2]), hooks.read(model, depths=2) as reading:
        ours = logits(model, PAIR)
    assert torch.allclose(ours, expected, atol=1e-5)
    with hooks.read(model, depths=2) as clean:
        logits(model, PAIR)
    others = [0, 1, 3, 5, 6]
    assert torch.equal(reading.streams[2][:, others[:2]], clean.streams[2][:, others[:2]])  # bit by bit


def test_other_positions_keep_their_contribution_bit_by_bit():
    model = shared("granite")  # its blocks scale by 0.3 what a sub-layer returns
    for part, name in (("mixer", "self_attn"), ("mlp", "mlp")):
        outputs = []

        def record(module, args, kwargs, output, outputs=outputs):
            outputs.append(oracle.hidden(output))

        module = getattr(oracle.blocks_of(model)[1], name)
        with raw_hook(module, record):
            clean = logits(model)
            with hooks.ablate(model, 1, part, positions=[3, 6]):
                assert not torch.equal(logits(model), clean)
        same = (outputs[0] == outputs[-1]).all(-1)[0].tolist()
        assert same == [True, True, True, False, True, True, False]


@pytest.mark.parametrize("length", [5, 64])  # 64: as many positions as the stream is wide
@pytest.mark.parametrize(
    ("positions", "shape"),
    [(None, None), (3, None), ([-1, 2], None), (None, (64,)), ([4, 0], (64,)), ([4, 0], (2, 2, 64)), (None, "whole")],
)
def test_a_sublayer_that_folds_batch_and_positions_is_ablated_where_asked(length, positions, shape):
    model = shared("opt")  # its fc2 returns [batch * pos, d_model]
    ids = torch.randint(3, 100, (2, length), generator=torch.Generator().manual_seed(length))
    shape = (2, length, 64) if shape == "whole" else shape
    value = None if shape is None else torch.randn(shape, generator=torch.Generator().manual_seed(1))
    folded = []

    def by_hand(module, args, kwargs, output):
        folded.append(output.dim() == 2)
        new = output.clone().view(2, length, 64)
        new[:, slice(None) if positions is None else positions] = 0.0 if value is None else value
        return new.view(output.shape)

    with raw_hook(oracle.blocks_of(model)[1].fc2, by_hand):
        expected = logits(model, ids)
    assert folded == [True]
    with hooks.ablate(model, 1, "mlp", contribution=value, positions=positions):
        ours = logits(model, ids)
    assert torch.equal(ours, expected)
    assert (ours - logits(model, ids)).abs().max() > 1e-3


def test_a_block_that_is_not_an_exact_sum_of_its_parts_is_refused_with_the_gap():
    class Gated(nn.Module):
        """Multiplies where others add."""

        def __init__(self):
            super().__init__()
            self.attn, self.mlp = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return x + self.attn(x) * self.mlp(x)

    model = Stack(Gated() for _ in range(3))
    x = torch.randn(2, 5, 16)
    with pytest.raises(InputError, match=r"not the exact sum.*off by [\d.]+"):
        hooks.ablate(hooks.blocks(model, x), 1, "mlp").__enter__()


# Replacing, adding, resuming


@pytest.mark.parametrize("family", ["llama", "bloom", "falcon_h1", "mamba2"])
@pytest.mark.parametrize("depth", [0, 2, 4])
def test_replace_and_add_are_edits_of_raw_hooks(family, depth):
    model, generator = shared(family), torch.Generator().manual_seed(1)
    each = torch.randn(2, 2, 64, generator=generator)
    one = torch.randn(64, generator=generator, dtype=torch.float64)  # brought to the dtype of the stream

    def replaced(stream):
        stream = stream.clone()
        stream[:, [5, 1]] = each
        return stream

    with edited(model, depth, replaced):
        expected = logits(model, PAIR)
    with hooks.replace(model, depth, each, positions=[5, 1]):
        assert torch.equal(logits(model, PAIR), expected)
    with edited(model, depth, lambda stream: stream + one.float()):
        expected = logits(model, PAIR)
    with hooks.add(model, depth, one):
        assert torch.equal(logits(model, PAIR), expected)
    with edited(model, depth, lambda stream: one.float().expand(stream.shape)):
        expected = logits(model, PAIR)
    with hooks.replace(model, depth, one):
        assert torch.equal(logits(model, PAIR), expected)


def test_gradients_flow_into_a_value():
    model = shared("llama")
    value = torch.zeros(64, requires_grad=True)
    with hooks.add(model, 2, value, positions=-1):
        model(input_ids=IDS, use_cache=False).logits[0, -1, 3].backward()
    assert value.grad is not None
    assert value.grad.abs().max() > 1e-3
    model.zero_grad()


@pytest.mark.parametrize("family", [*CORE, "bloom", "falcon_h1"])
def test_resume_is_exact_from_every_depth(family):
    model = shared(family)
    clean = logits(model, PAIR)
    with hooks.read(model) as reading:
        logits(model, PAIR)
    other = PAIR.flip(1)
    for depth in range(BLOCKS + 1):
        with hooks.resume(model, depth, reading.streams[depth]), torch.no_grad():
            output = model(input_ids=other)  # what comes before the stream does not matter
        assert torch.equal(output.logits, clean), depth
        assert all(output.get(name) is None for name in output if name != "logits")  # no cache with holes
    assert torch.equal(logits(model, PAIR), clean)


def test_resume_does_not_run_the_blocks_before():
    model = shared("llama")
    with hooks.read(model, depths=[3]) as reading:
        logits(model)
    ran = []
    with contextlib.ExitStack() as stack:
        for i, block in enumerate(oracle.blocks_of(model)):
            stack.enter_context(raw_hook(block.mlp, lambda m, a, k, o, i=i: ran.append(i)))
        with hooks.resume(model, 3, reading.streams[3]):
            logits(model)
    assert ran == [3]


@pytest.mark.parametrize("writer", [0, 2])
def test_resume_runs_blocks_whose_side_effects_are_needed(writer):
    class Remembering(nn.Module):
        """Later blocks need what one of them left in a shared list."""

        def __init__(self, index, memory):
            super().__init__()
            self.index, self.memory, self.linear = index, memory, nn.Linear(16, 16)

        def forward(self, x):
            if self.index == writer:
                self.memory[:] = [x.cos()]
            return x + self.linear(x) + (self.memory[0] if self.index >= writer else 0)

    memory: list[torch.Tensor] = []
    model = Stack(Remembering(i, memory) for i in range(4))
    x, other = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    with torch.no_grad():
        chain = hooks.blocks(model, x)
        assert not chain.resumable
        with hooks.read(chain) as reading:
            clean = model(x)
        with hooks.resume(chain, 3, reading.streams[3]):
            assert torch.equal(model(x), clean)
            assert not torch.equal(model(other), clean)  # the writer ran on it


def test_resume_refuses_a_cache_and_another_resume():
    model = shared("llama")
    stream = torch.zeros(1, 7, 64)
    with hooks.resume(model, 2, stream):
        with pytest.raises(InputError, match="resume runs without a cache.*use_cache=True"):
            model(input_ids=IDS, use_cache=True)
        with pytest.raises(InputError, match="resume runs without a cache"):
            model.generate(IDS, max_new_tokens=2, do_sample=False)
        with pytest.raises(InputError, match="resume inside another resume"):
            hooks.resume(model, 1, stream).__enter__()
        logits(model)
        with pytest.raises(InputError, match=r"\[1, 7, 64\].*\[1, 6, 64\]"):
            logits(model, IDS[:, :6])


# Shapes


@pytest.mark.parametrize(
    ("shape", "positions"),
    [((63,), None), ((1, 64), None), ((7, 64), None), ((2, 3, 64), [1, 2]), ((2, 64, 7), None), ((1, 1, 1, 64), None)],
)
def test_values_of_other_shapes_are_refused_before_any_forward(shape, positions):
    model = shared("llama")
    for context in (
        hooks.replace(model, 1, torch.zeros(shape), positions),
        hooks.add(model, 1, torch.zeros(shape), positions),
        hooks.ablate(model, 1, contribution=torch.zeros(shape), positions=positions),
    ):
        with pytest.raises(InputError, match=r"shape \[.*takes \[64\] or \[batch, (pos|2), 64\]"):
            context.__enter__()
    assert counts(model) == counts(tiny("llama"))


def test_values_for_another_batch_are_never_broadcast():
    model = shared("llama")
    with pytest.raises(InputError, match=r"resume at depth 1: the value has shape \[64\].*takes \[batch, pos, 64\]$"):
        hooks.resume(model, 1, torch.zeros(64)).__enter__()
    with hooks.replace(model, 1, torch.zeros(1, 7, 64)):
        with pytest.raises(InputError, match=r"shape \[1, 7, 64\].*\[64\] or \[2, 7, 64\]"):
            logits(model, PAIR)
        logits(model, IDS)


@pytest.mark.parametrize(
    ("enter", "message"),
    [
        (lambda m: hooks.read(m, depths=5), "depths 5: pass distinct ones from 0 to 4"),
        (lambda m: hooks.read(m, depths=[1, 1]), "distinct"),
        (lambda m: hooks.read(m, depths=[]), "distinct"),
        (lambda m: hooks.read(m, positions=[1, 1]), "distinct ints"),
        (lambda m: hooks.read(m, positions=[]), "distinct ints"),
        (lambda m: hooks.ablate(m, 4), "from 0 to 3"),
        (lambda m: hooks.ablate(m, -1), "from 0 to 3"),
        (lambda m: hooks.replace(m, 5, torch.zeros(64)), "from 0 to 4"),
        (lambda m: hooks.resume(m, 5, torch.zeros(1, 7, 64)), "from 0 to 4"),
    ],
)
def test_what_does_not_exist_is_refused_on_entering(enter, message):
    with pytest.raises(InputError, match=message):
        enter(shared("llama")).__enter__()


# Positions


def test_rows_that_are_padded_on_the_right_are_read_at_their_last_token():
    model = shared("llama")
    ids = torch.tensor([[5, 17, 33, 8, 91], [7, 41, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    with hooks.read(model, positions=[-1, -2]) as batch:
        logits(model, ids, attention_mask=mask)
    for row, length in enumerate((5, 2)):
        with hooks.read(model) as alone:
            logits(model, ids[row : row + 1, :length])
        for depth in range(BLOCKS + 1):
            expected = alone.streams[depth][0, [-1, -2]]
            assert torch.allclose(batch.streams[depth][row], expected, atol=1e-5)


def test_edits_at_negative_positions_are_each_rows_own():
    model, value = shared("llama"), torch.randn(64)
    ids = torch.tensor([[5, 17, 33, 8, 91], [7, 41, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    for edit in (
        lambda: hooks.add(model, 2, value, positions=-1),
        lambda: hooks.ablate(model, 1, positions=-1),
        lambda: hooks.ablate(model, 1, "mlp", positions=-1),
    ):
        with edit():
            ours = logits(model, ids, attention_mask=mask)
            alone = logits(model, ids[1:, :2])
        assert torch.allclose(ours[1, :2], alone[0], atol=1e-5)
        assert (alone - logits(model, ids[1:, :2])).abs().max() > 1e-3


def test_positions_in_the_padding_or_beyond_the_row_are_refused():
    model = shared("llama")
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])
    for positions, message in (
        (1, "position 1 is padding in row 1"),
        (-6, "position -6 does not exist in row 1, which has 5 tokens"),
        ([6, -1], "two of them are the same token"),
    ):
        with pytest.raises(InputError, match=message), hooks.read(model, positions=positions):
            logits(model, PAIR, attention_mask=mask)
    with (
        pytest.raises(InputError, match="position -8 does not exist in rows of 7 tokens"),
        hooks.read(model, positions=-8),
    ):
        logits(model)
    four = torch.zeros(1, 1, 7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), torch.finfo(torch.float32).min)
    with (
        pytest.raises(InputError, match="negative positions need a 2-D attention_mask"),
        hooks.read(model, positions=-1),
    ):
        logits(model, attention_mask=four)


@pytest.mark.parametrize("family", ["llama", "mamba2", "qwen3_next"])
@pytest.mark.parametrize("masked", [True, False])
def test_positions_with_a_cache_are_those_of_the_whole_sequence(family, masked):
    model = shared(family)
    whole = PAIR
    with hooks.read(model) as full:
        logits(model, whole)
    with hooks.read(model, depths=[2], positions=[1, 5]) as reading:
        cache = None
        for start, stop in ((0, 3), (3, 4), (4, 5), (5, 6), (6, 7)):
            arguments = {"attention_mask": torch.ones(2, stop, dtype=torch.int64)} if masked else {}
            if family == "mamba2" and start:
                arguments = {}
            with torch.no_grad():
                output = model(input_ids=whole[:, start:stop], cache=cache, use_cache=True, **arguments)
            cache = output.cache
    assert [t.shape[1] for t in reading.all[2]] == [1, 1]
    value = torch.randn(2, 2, 64)
    with hooks.replace(model, 1, value, positions=[5, 1]), torch.no_grad():
        expected = logits(model, whole)
        cache = model(input_ids=whole[:, :3], use_cache=True).cache
        for position in range(3, 7):
            step = model(input_ids=whole[:, position : position + 1], cache=cache, use_cache=True)
            assert torch.allclose(step.logits[:, 0], expected[:, position], atol=2e-4)
    assert (expected - logits(model, whole)).abs().max() > 0.1
    assert torch.allclose(torch.cat(reading.all[2], 1), full.streams[2][:, [1, 5]], atol=1e-4)


def generated(model, ids, steps=4, **arguments):
    return model.generate(
        ids,
        max_new_tokens=steps,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **arguments,
    )


def test_negative_positions_are_fixed_by_the_prompt():
    model, value = shared("llama"), 5 * torch.randn(64)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])
    with hooks.add(model, 2, value, positions=-1), hooks.read(model, depths=[3], positions=-1) as reading:
        output = generated(model, PAIR, attention_mask=mask)
    assert len(reading.all[3]) == 1
    # The same position by its number, in whole forwards.
    with hooks.add(model, 2, value, positions=6):
        assert_steps_equal(model, output, PAIR.shape[1], mask)
    # One context manager over two prompts, the second with a cache of its own.
    with hooks.read(model, depths=[3], positions=-1) as reading:
        generated(model, PAIR)
        generated(model, PAIR[:, :4])
    assert len(reading.all[3]) == 2


@pytest.mark.parametrize("family", ["llama", "mamba2", "gpt2"])
def test_positions_are_reached_during_generation(family):
    model = shared(family)
    with hooks.read(model, depths=[2], positions=[8, 1]) as reading:
        output = generated(model, PAIR)
    with hooks.read(model, depths=[2]) as full:
        logits(model, output.sequences)
    assert torch.allclose(torch.cat(reading.all[2], 1), full.streams[2][:, [1, 8]], atol=1e-4)


def test_a_cached_prefix_is_not_the_prompt():
    """Where the first forward inside goes on from a cache that was filled outside, -1 is its own last token."""
    model = shared("llama")
    with torch.no_grad():
        prefix = model(input_ids=IDS[:, :4], use_cache=True).cache
    with hooks.read(model, depths=[2]) as full:
        logits(model)
    with hooks.read(model, depths=[2], positions=-1) as last, hooks.read(model, depths=[2], positions=4) as fourth:
        for stop in (6, 7):  # two prompts with the same prefix
            with torch.no_grad():
                model(input_ids=IDS[:, 4:stop], cache=copy.deepcopy(prefix))
    assert torch.allclose(torch.cat(last.all[2], 1), full.streams[2][:, [5, 6]], atol=1e-5)
    assert torch.allclose(torch.cat(fourth.all[2], 1), full.streams[2][:, [4, 4]], atol=1e-5)
    with pytest.raises(InputError, match="before this forward, in the cache"), hooks.read(model, positions=-3):
        model(input_ids=IDS[:, 4:6], cache=copy.deepcopy(prefix))


def test_a_mask_that_contradicts_the_cache_is_refused():
    model = shared("llama")
    with torch.no_grad():
        cache = model(input_ids=IDS[:, :4], use_cache=True).cache
    with (
        pytest.raises(InputError, match="covers 6 positions, but the cache holds 4 and the forward has 1"),
        hooks.read(model, positions=-1),
    ):
        model(input_ids=IDS[:, 4:5], cache=cache, attention_mask=torch.ones(1, 6, dtype=torch.int64))


def test_a_stream_whose_positions_are_not_tokens_has_no_positions():
    model = shared("llama")
    opened = tracer.load(model)
    anatomy = dataclasses.replace(opened.anatomy, position_dim=None)
    opened.adapter.anatomy = anatomy
    with pytest.raises(InputError, match="LlamaForCausalLM are not tokens: pass positions=None"):
        hooks.read(opened, positions=-1).__enter__()
    with hooks.ablate(opened, 1), hooks.add(opened, 1, torch.ones(64)), hooks.read(opened) as reading:
        logits(model)
    assert torch.equal(reading.streams[2], reading.streams[1] + 0)


# Generation


def assert_steps_equal(model, output, prompt_length, mask=None, atol=2e-4):
    """Greedy steps by whole forwards without a cache give the same tokens and logits."""
    ids = output.sequences
    for step, ours in enumerate(output.logits):
        length = prompt_length + step
        arguments = {}
        if mask is not None:
            grown = torch.cat([mask, torch.ones(len(ids), step, dtype=torch.int64)], 1)
            arguments = {"attention_mask": grown, "position_ids": (grown.cumsum(1) - 1).clamp_min(0)}
        whole = logits(model, ids[:, :length], **arguments)[:, -1]
        assert torch.allclose(whole, ours, atol=atol), (step, (whole - ours).abs().max())
        assert torch.equal(whole.argmax(-1), ids[:, length]), step


@pytest.mark.parametrize("family", ["llama", "mamba2", "qwen3_next", "gpt2"])
@pytest.mark.parametrize("part", ["block", "mixer", "mlp"])
def test_generation_under_an_ablation_is_whole_forwards_under_it(family, part):
    if (family, part) == ("mamba2", "mlp"):
        pytest.skip("a Mamba block has no MLP")
    model = shared(family)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]]) if family == "llama" else None
    arguments = {} if mask is None else {"attention_mask": mask}
    before = counts(model)
    with hooks.ablate(model, 1, part):
        cached = generated(model, PAIR, **arguments)
        assert_steps_equal(model, cached, PAIR.shape[1], mask)
        assert torch.equal(generated(model, PAIR, use_cache=False, **arguments).sequences, cached.sequences)
    assert counts(model) == before
    # An ablation that is lost after the prompt would show.
    with torch.no_grad():
        with hooks.ablate(model, 1, part):
            output = model(input_ids=PAIR, use_cache=True, **arguments)
        step = {"attention_mask": torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], 1)} if mask is not None else {}
        lost = model(input_ids=cached.sequences[:, 7:8], cache=output.cache, **step).logits[:, -1]
    assert (lost - cached.logits[1]).abs().max() > 1e-2


def test_beam_search_under_an_ablation():
    model = shared("llama")
    with hooks.ablate(model, 2):
        found = [generated(model, PAIR, num_beams=3, use_cache=cache).sequences for cache in (True, False)]
    assert torch.equal(*found)


def test_every_step_of_generation_is_read():
    model = shared("gpt2")
    with hooks.read(model, depths=4) as reading:
        output = generated(model, PAIR)
    assert [tuple(t.shape[:2]) for t in reading.all[4]] == [(2, 7), (2, 1), (2, 1), (2, 1)]
    with hooks.read(model, depths=4) as full:
        logits(model, output.sequences[:, :-1])
    assert torch.allclose(torch.cat(reading.all[4], 1), full.streams[4], atol=1e-4)
    assert torch.equal(reading.streams[4], reading.all[4][-1])


# Nesting and order


def test_at_one_depth_the_outermost_acts_first():
    model, value = shared("llama"), torch.randn(64)
    for depth in (2, 4):
        with (
            hooks.read(model, depths=depth) as before,
            hooks.replace(model, depth, value),
            hooks.read(model, depths=depth) as between,
            hooks.add(model, depth, value),
            hooks.read(model, depths=depth) as after,
        ):
            logits(model)
        assert not torch.allclose(before.streams[depth][0, 0], value)
        assert torch.equal(between.streams[depth], value.expand(1, 7, 64))
        assert torch.equal(after.streams[depth], 2 * value.expand(1, 7, 64))


def test_the_last_block_is_ablated_before_its_output_is_read():
    model = shared("llama")
    with hooks.read(model, depths=[3, 4]) as reading, hooks.ablate(model, 3):
        logits(model)
    assert torch.equal(reading.streams[3], reading.streams[4])


def test_hooks_of_the_owner_see_what_flows_and_still_act():
    model = shared("llama")
    block, last = oracle.blocks_of(model)[1], oracle.blocks_of(model)[3]
    with hooks.read(model) as clean:
        logits(model)
    seen = {}

    def steers(module, args, kwargs):
        return (args[0] + 1, *args[1:]), kwargs

    def steers_too(module, args, kwargs, output):
        seen[module] = output.clone()
        return output + 2

    with raw_hook(block, steers, pre=True), raw_hook(block, steers_too), raw_hook(last, steers_too):
        with hooks.read(model) as reading:
            steered = logits(model)
        assert torch.equal(reading.streams[1], clean.streams[1])
        assert torch.equal(reading.streams[2], seen[block] + 2)
        assert torch.equal(reading.streams[4], seen[last] + 2)
        with hooks.ablate(model, 1), hooks.read(model) as skipped:
            logits(model)
        assert torch.equal(seen[block], clean.streams[1])
        assert torch.equal(skipped.streams[2], clean.streams[1] + 2)
        assert torch.equal(logits(model), steered)


def test_hidden_states_of_transformers_show_an_ablation():
    model = tiny("llama")
    for _ in range(2):  # it installs its own hooks in the first of these forwards
        with hooks.ablate(model, 1), hooks.read(model) as reading, torch.no_grad():
            states = model(input_ids=IDS, output_hidden_states=True).hidden_states
        for depth in range(BLOCKS):
            assert torch.equal(states[depth], reading.streams[depth])


def test_contexts_may_be_left_in_any_order():
    model = shared("llama")
    clean, before = logits(model), counts(model)
    first, second = hooks.ablate(model, 1), hooks.ablate(model, 2)
    first.__enter__()
    second.__enter__()
    logits(model)
    first.__exit__(None, None, None)
    with skipping(model, 2):
        expected = logits(model)
    assert torch.equal(logits(model), expected)
    second.__exit__(None, None, None)
    assert counts(model) == before
    assert torch.equal(logits(model), clean)


def test_sublayers_are_looked_for_outside_of_open_contexts():
    model = tiny("llama")
    with (
        hooks.read(model, depths=2) as reading,
        hooks.resume(model, 1, torch.randn(1, 7, 64)),
        hooks.ablate(model, 2, "mlp"),
    ):
        logits(model)
    assert len(reading.all[2]) == 1


def test_a_trace_inside_sees_the_edited_model():
    model = shared("llama")
    opened = tracer.load(model)
    with skipping(model, 2):
        expected = oracle.streams(model, IDS[0].tolist())
    batch = TokenBatch.from_rows(IDS.tolist())
    with hooks.ablate(opened, 2), torch.no_grad():
        states = read_streams(opened.adapter, batch).states
        end = resume(opened.adapter, batch, 1, (states[1][0].repeat(2, 1, 1),), copies=2)
    for depth, stream in enumerate(expected):
        assert torch.equal(states[depth][0][0], stream)
    assert torch.allclose(end[0], states[-1][0].expand(2, 7, 64), atol=1e-5)

    def twice(site):
        copies = (torch.cat([site.resid] * 2),)
        assert torch.allclose(site.run(copies, 2)[0][1], expected[site.index + 1], atol=1e-5)
        return site.run()

    with hooks.ablate(opened, 2), torch.no_grad():
        opened.adapter.run(batch, twice)


# Hygiene


def test_nothing_is_left_behind_whatever_happens(monkeypatch):
    model = shared("llama")
    clean, before = logits(model), counts(model)
    fired = []
    own = lambda module, args, kwargs, output: fired.append(1)  # noqa: E731
    with raw_hook(oracle.blocks_of(model)[1], own):
        with_own = counts(model)

        def explodes(error):
            def hook(module, args, kwargs):
                raise error

            return raw_hook(oracle.blocks_of(model)[2].mlp, hook, pre=True)

        for error in (ValueError("in the forward"), KeyboardInterrupt()):
            with (
                pytest.raises(type(error)),
                explodes(error),
                hooks.ablate(model, 2, "mixer"),
                hooks.read(model),
                hooks.ablate(model, 0),
            ):
                logits(model)
            assert counts(model) == with_own

        # An error inside, caught inside: the next forward is as if nothing had happened.
        with hooks.read(model, depths=[4], positions=-1) as reading, torch.no_grad():
            for error in (KeyboardInterrupt(), ValueError("in the forward")):
                with pytest.raises(type(error)), explodes(error):
                    logits(model, PAIR)
                assert torch.equal(logits(model), clean)
            with pytest.raises(ValueError, match="in the forward"), explodes(error):
                logits(model, PAIR)
            model.model(input_ids=IDS, use_cache=False)
        assert [tuple(t.shape) for t in reading.all[4]] == [(1, 1, 64)] * 3

        with pytest.raises(InputError), hooks.read(model), hooks.replace(model, 1, torch.zeros(3)):
            pass
        assert counts(model) == with_own

        registered = 0
        register = nn.Module.register_forward_hook

        def failing(self, *arguments, **options):
            nonlocal registered
            registered += 1
            if registered == 4:
                raise MemoryError
            return register(self, *arguments, **options)

        monkeypatch.setattr(nn.Module, "register_forward_hook", failing)
        with pytest.raises(MemoryError):
            hooks.read(model).__enter__()
        monkeypatch.undo()
        assert counts(model) == with_own

        fired.clear()
        with hooks.read(model):
            assert torch.equal(logits(model), clean)
        assert torch.equal(logits(model), clean)
        assert fired == [1, 1]
    assert counts(model) == before


def test_a_model_that_was_hooked_can_be_forgotten():
    model = tiny("llama")
    with hooks.ablate(model, 1, "mlp"), hooks.read(model) as reading:
        logits(model)
    stream = weakref.ref(reading.all[4][0])
    reference = weakref.ref(model)
    del model, reading
    gc.collect()
    assert reference() is None
    assert stream() is None


def test_a_model_is_probed_once_and_anew_when_it_is_rebuilt():
    model = tiny("llama")
    forwards = []
    with raw_hook(model, lambda *call: forwards.append(1)):
        with hooks.read(model):
            logits(model)
        first = len(forwards)
        with hooks.read(model), hooks.ablate(model, 1):
            logits(model)
        assert len(forwards) == first + 1
        del oracle.blocks_of(model)[3]
        with hooks.read(model) as reading:
            logits(model)
    assert sorted(reading.streams) == [0, 1, 2, 3]


# Something did not fire


def test_what_did_not_fire_is_an_error_on_leaving():
    model = shared("llama")
    with (
        pytest.raises(HookError, match="ablate did nothing: no forward of LlamaForCausalLM ran inside it"),
        hooks.ablate(model, 1),
    ):
        pass
    with (
        pytest.raises(HookError, match=r"read did not fire at depth 3 \(input of model.layers.3\): not called"),
        hooks.read(model, depths=[1, 3]),
        hooks.replace(model, 1, torch.ones(64)),
    ):
        model.model.layers[1](torch.ones(1, 7, 64), position_embeddings=(torch.ones(1, 7, 16), torch.ones(1, 7, 16)))
    with (
        pytest.raises(HookError, match=r"add did not fire at depth 2 .*, position 9: .* positions below 7"),
        hooks.add(model, 2, torch.ones(64), positions=[1, 9]),
    ):
        logits(model)
    with (
        pytest.raises(HookError, match=r"read did not fire at depth 1 .*: not called"),
        hooks.resume(model, 2, torch.ones(1, 7, 64)),
        hooks.read(model, depths=1),
    ):
        logits(model)
    with pytest.raises(ZeroDivisionError), hooks.ablate(model, 1):  # another error is not hidden by ours
        raise ZeroDivisionError


class Stack(nn.Module):
    """Chained blocks in a list."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, repeats=1):
        for _ in range(repeats):
            for layer in self.layers:
                x = layer(x)
        return x


class Sum(nn.Module):
    """A mixer and an MLP; the mixer is bypassed when a fused kernel takes its weights."""

    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.Linear(16, 16), nn.Linear(16, 16)
        self.fused = False

    def forward(self, x):
        x = x + (nn.functional.linear(x, self.attn.weight, self.attn.bias) if self.fused else self.attn(x))
        return x + self.mlp(x.relu())


def test_a_sublayer_that_is_bypassed_is_an_error():
    model, x = Stack(Sum() for _ in range(3)), torch.randn(2, 5, 16)
    chain = hooks.blocks(model, x)
    with torch.no_grad():
        whole = model(x)
    with torch.no_grad(), hooks.ablate(chain, 1, "mixer"):
        ablated = model(x)
        assert not torch.equal(ablated, whole)
        model.layers[1].fused = True
        message = r"ablate did not fire: layers.1.attn, the mixer of block 1, was called 0 times in this forward"
        with pytest.raises(HookError, match=message):
            model(x)


# Modules that are no language models


def test_any_chain_of_blocks_is_a_target():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    x = torch.randn(5, 2, 16)  # positions first
    chain = hooks.blocks(encoder, x, batch_dim=1, position_dim=0)
    assert chain.resumable
    value = torch.randn(2, 1, 16)

    def by_hand(module, args, kwargs, output):
        output = output.clone()
        output[3] = value[:, 0]
        return output

    with torch.no_grad():
        with raw_hook(encoder.layers[1], by_hand):
            expected = encoder(x)
        with hooks.replace(chain, 2, value, positions=3), hooks.read(chain, positions=[3, 0]) as reading:
            assert torch.equal(encoder(x), expected)
    assert torch.equal(reading.streams[0], x[[3, 0]].transpose(0, 1))
    assert torch.equal(reading.streams[2][:, :1], value)


def test_a_skipped_block_hands_on_what_is_carried_beside_the_stream():
    class Carrying(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.state = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x, state):
            return x + self.linear(x) + state, self.state(state).tanh()

    class Pairs(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x):
            state = x.sin()
            for layer in self.layers:
                x, state = layer(x, state)
            return x + state

    model, x = Pairs(Carrying() for _ in range(4)), torch.randn(2, 5, 16)
    chain = hooks.blocks(model, x)
    assert not chain.resumable
    with torch.no_grad():
        clean = model(x)
        with hooks.ablate(chain, 1), hooks.read(chain) as reading:
            ours = model(x)
        assert torch.equal(ours, Pairs([model.layers[i] for i in (0, 2, 3)])(x))
        assert torch.equal(reading.streams[1], reading.streams[2])
        with hooks.ablate(chain, 1, positions=[0, 1, 2, 3, 4]):  # only the stream, where positions are named
            assert not torch.equal(model(x), ours)
        with hooks.read(chain) as reading:
            model(x)
        with hooks.resume(chain, 3, reading.streams[3]):
            assert torch.equal(model(x), clean)


def test_blocks_that_are_called_twice_count_twice():
    model, x = Stack(Sum() for _ in range(2)), torch.randn(2, 5, 16)
    chain = hooks.blocks(model, x, repeats=2)
    assert chain.names == ("layers.0", "layers.1", "layers.0", "layers.1")
    a, b = model.layers
    with torch.no_grad():
        for _ in range(2):
            with hooks.read(chain) as reading, hooks.ablate(chain, 2):
                assert torch.equal(model(x, repeats=2), b(b(a(x))))
            assert torch.equal(reading.streams[2], b(a(x)))
        with hooks.resume(chain, 3, x):
            resumed = model(torch.zeros_like(x), repeats=2)
        assert torch.equal(resumed, b(x))
        with (
            pytest.raises(HookError, match=r"block 0 \(layers.0\) was called more often in one forward than the 2"),
            hooks.read(chain),
        ):
            model(x, repeats=3)


def test_inner_modules_and_blocks_may_be_called_by_hand():
    model = shared("llama")
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
    with torch.no_grad():
        with hooks.ablate(model, 1), hooks.read(model, depths=4, positions=-1) as reading:
            for _ in range(2):
                inner = model.model(input_ids=PAIR, attention_mask=mask, use_cache=False).last_hidden_state
        with skipping(model, 1):
            expected = model.model(input_ids=PAIR, attention_mask=mask, use_cache=False).last_hidden_state
    assert torch.equal(inner, expected)
    assert len(reading.all[4]) == 2
    assert torch.equal(model.model.norm(reading.streams[4])[1, 0], expected[1, 4])
    stack, x = Stack(Sum() for _ in range(3)), torch.randn(2, 5, 16)
    chain, middle = hooks.blocks(stack, x), copy.deepcopy(stack.layers[1])
    with torch.no_grad(), hooks.ablate(chain, [0, 2]), hooks.read(chain, depths=0, positions=-2) as reading:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            stack(x[..., :3])
        reading.all[0].clear()
        for start in (x, 2 * x):
            y = start
            for layer in stack.layers:
                y = layer(y)
            assert torch.equal(y, middle(start))
    assert [t.shape for t in reading.all[0]] == [(2, 1, 16)] * 2


def test_what_has_no_blocks_is_refused():
    x = torch.randn(2, 5, 16)
    with pytest.raises(InputError, match="no blocks in Linear"):
        hooks.blocks(nn.Linear(16, 16), x)
    with pytest.raises(InputError, match=r"batch_dim=2.*shape \[2, 5, 16\]"):
        hooks.blocks(Stack(Sum() for _ in range(3)), x, batch_dim=2)
    with pytest.raises(InputError, match=r"hooks on a Stack: pass .*hooks.blocks\(module"):
        hooks.read(Stack(Sum() for _ in range(3))).__enter__()
    with pytest.raises(ModelRefused, match=r"hooks.blocks\(model, \*example_inputs\) takes any chain"):
        hooks.read(shared("llama").model).__enter__()
    body = shared("llama").model
    chain = hooks.blocks(body, input_ids=IDS)
    with hooks.ablate(chain, 1, "mlp"), torch.no_grad():
        ours = body(input_ids=IDS).last_hidden_state
    with silenced(body.layers[1].mlp), torch.no_grad():
        assert torch.allclose(ours, body(input_ids=IDS).last_hidden_state, atol=1e-6)


# Compiled, checkpointed, offloaded


def test_compiled_models_are_refused():
    wrapped = torch.compile(tiny("llama"), backend="eager")
    with pytest.raises(InputError, match="the model is wrapped by torch.compile.*_orig_mod"):
        hooks.read(wrapped).__enter__()
    in_place = tiny("llama")
    in_place.compile(backend="eager")
    with pytest.raises(InputError, match=r"the model was compiled in place \(LlamaForCausalLM.compile\(\)\)"):
        hooks.ablate(in_place, 1).__enter__()
    inside = tiny("llama")
    opened = tracer.load(inside)
    inside.model.layers[1].mlp.compile(backend="eager")
    for target in (inside, opened):
        with pytest.raises(InputError, match="module 'model.layers.1.mlp' of the model was compiled in place"):
            hooks.read(target).__enter__()
    for usable in (wrapped._orig_mod, copy.deepcopy(in_place), copy.deepcopy(inside)):  # what the messages advise
        with hooks.ablate(usable, 1), hooks.read(usable, depths=[1, 2]) as reading:
            logits(usable)
        assert torch.equal(reading.streams[1], reading.streams[2])


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_compiled_functions_around_a_model_never_pass_silently():
    model, x = Stack(Sum() for _ in range(3)), torch.randn(2, 5, 16)
    chain = hooks.blocks(model, x)
    with torch.no_grad():
        clean = model(x)
        with hooks.ablate(chain, 1):
            expected = model(x)
        early, late = (torch.compile(lambda y: model(y), backend="eager") for _ in range(2))
        assert torch.equal(early(x), clean)
        with pytest.raises(HookError, match="ablate did nothing: no forward of Stack"), hooks.ablate(chain, 1):
            early(x)
        torch.compiler.reset()
        with hooks.ablate(chain, 1):
            assert torch.equal(late(x), expected)
        assert torch.equal(late(x), clean)
        torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradient_checkpointing_is_refused():
    model = tiny("llama").train()
    model.gradient_checkpointing_enable()
    with pytest.raises(HookError, match="gradient checkpointing runs blocks a second time"), hooks.ablate(model, 1):
        model(input_ids=IDS)
    with hooks.ablate(model.eval(), 1):  # not in use in eval mode
        logits(model)
    stack, x = Stack(Sum() for _ in range(3)), torch.randn(2, 5, 16, requires_grad=True)
    chain = hooks.blocks(stack, x)
    with hooks.ablate(chain, 1):
        output = torch.utils.checkpoint.checkpoint(stack, x, use_reentrant=False)
        with pytest.raises(HookError, match="gradient checkpointing"):
            output.sum().backward()


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "bloom"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_models_give_the_numbers_of_plain_ones(family, where, tmp_path):
    plain, offloaded = shared(family), tiny(family)
    if where == "cpu":
        accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(offloaded, tmp_path, execution_device=torch.device("cpu"))
    assert oracle.blocks_of(offloaded)[1].mlp is not None
    assert any(parameter.device.type == "meta" for parameter in offloaded.parameters())
    value = torch.randn(2, 1, 64)
    with hooks.read(plain) as reading:
        logits(plain, PAIR)
    for context in (
        lambda model: hooks.read(model, positions=[-1]),
        lambda model: hooks.ablate(model, 1),
        lambda model: hooks.ablate(model, 2, "mixer"),
        lambda model: hooks.ablate(model, 2, "mlp"),
        lambda model: hooks.replace(model, 3, value, positions=[-1]),
        lambda model: hooks.resume(model, 2, reading.streams[2]),
    ):
        results = []
        for model in (plain, offloaded):
            before = counts(model)
            with context(model) as read:
                results.append([logits(model, PAIR)])
            if read is not None:
                results[-1] += read.streams.values()
            assert counts(model) == before
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


# Other targets


def test_a_bridge_of_transformer_lens_is_a_target():
    bridge = tracer.load(booted_bridge(tiny("llama"), "tiny"))
    model = shared("llama")
    with hooks.ablate(bridge, 1), hooks.read(bridge, positions=-1) as ours, torch.no_grad():
        output = bridge.model(IDS)
    with hooks.ablate(model, 1), hooks.read(model, positions=-1) as expected:
        assert torch.allclose(output, logits(model), atol=1e-4)
    for depth in range(BLOCKS + 1):
        assert torch.allclose(ours.streams[depth], expected.streams[depth], atol=1e-5)


def test_a_traced_model_and_the_model_itself_nest():
    model = shared("llama")
    opened = tracer.load(model)
    with hooks.replace(opened, 2, torch.ones(64)), hooks.read(model, depths=2) as reading:
        logits(model)
    assert torch.equal(reading.streams[2], torch.ones(1, 7, 64))


def test_models_opened_at_other_blocks_do_not_mix():
    model = tiny("llama")
    with hooks.ablate(model, 0, "mlp"):
        logits(model)
    inner = tracer.load(model, blocks=[f"model.layers.{i}" for i in (1, 2, 3)])
    for target, block in ((inner, 1), (model, 0)):
        with hooks.ablate(target, 0, "mlp"):
            ours = logits(model)
        with silenced(model.model.layers[block].mlp):
            assert torch.allclose(ours, logits(model), atol=1e-5)
    # Nor does what one of them allows.
    opened = tracer.load(model)
    careful = dataclasses.replace(opened, self_check=dataclasses.replace(opened.self_check, engine="full"))
    stream, ran = torch.randn(1, 7, 64), []
    with contextlib.ExitStack() as stack:
        for i, layer in enumerate(model.model.layers):
            stack.enter_context(raw_hook(layer.mlp, lambda m, a, k, o, i=i: ran.append(i)))
        for target, expected in ((careful, [0, 1, 2, 3]), (model, [3])):
            ran.clear()
            with hooks.resume(target, 3, stream):
                logits(model)
            assert ran == expected


def test_blocks_that_are_no_modules_are_refused():
    model = every_model.build("xlm")
    names = [f"transformer.attentions.{i}:transformer.layer_norm2.{i}" for i in range(4)]
    opened = tracer.load(model, blocks=names)
    before = counts(model)
    stream = torch.zeros(1, 7, opened.anatomy.d_model)
    for context in (
        hooks.read(opened),
        hooks.ablate(opened, 1),
        hooks.ablate(opened, 1, "mlp"),
        hooks.replace(opened, 1, stream),
        hooks.add(opened, 1, stream),
        hooks.resume(opened, 1, stream),
    ):
        message = r"block 0 \(transformer.attentions.0:transformer.layer_norm2.0\), which is no module.*: pass [^\n]*$"
        with pytest.raises(InputError, match=message):
            context.__enter__()
    assert counts(model) == before


# Memory and examples


def test_repeated_readings_do_not_pile_up():
    model = shared("llama")
    ids = torch.randint(3, 100, (8, 200))

    def alive() -> int:
        gc.collect()
        return sum(x.numel() for x in gc.get_objects() if type(x) is torch.Tensor)

    def once() -> None:
        with hooks.read(model) as reading, hooks.ablate(model, 1, "mlp"):
            model(input_ids=ids, use_cache=False)  # with gradients
        assert all(stream.grad_fn is None for stream in reading.streams.values())

    once()
    before = alive()
    for _ in range(5):
        once()
    assert alive() - before < 8 * 200 * 64


@pytest.mark.parametrize("thing", [hooks, *(getattr(hooks, name) for name in hooks.__all__)])
def test_examples_run(thing):
    found = [test for test in doctest.DocTestFinder(recurse=False).find(thing, "hooks", globs={}) if test.examples]
    if thing in (hooks.Blocks, hooks.Reading):
        return
    assert len(found) == 1
    assert doctest.DocTestRunner().run(found[0]) == doctest.TestResults(0, len(found[0].examples))
    lines = found[0].docstring.split("Example:")[1].strip().splitlines()
    assert len(lines) <= 14
