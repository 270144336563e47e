"""The self-check accepts what can be traced exactly, refuses the rest with the reason, and leaves nothing behind."""

import copy

import oracle
import pytest
import torch
import transformers
from planted import planted
from tiny import BLOCKS, FAMILIES, VOCAB, reinitialised, tiny
from torch import nn

import tracer
from tracer.models.plain import PlainAdapter
from tracer.models.selfcheck import open_plain
from tracer.models.streams import read_streams, resume, state_batch_dims
from tracer.models.tokens import TokenBatch

BATCH = TokenBatch.from_rows([[5, 6, 7, 8, 9, 10, 11], [20, 21, 22]])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_at_every_depth(family):
    model = tiny(family)
    adapter, check = open_plain(model, all_depths=True)
    assert check.engine == "onepass"
    assert all(c.passed for c in check.checks)
    assert [c.name for c in check.checks if c.name.startswith("resume")] == [f"resume {d}" for d in range(1, BLOCKS)]
    blocks = oracle.blocks_of(model)
    modules = dict(model.named_modules())
    assert [modules[call.module] for call in adapter.anatomy.calls] == list(blocks)
    assert adapter.anatomy.vocab == VOCAB
    assert adapter.anatomy.d_model == 64


@pytest.mark.parametrize(
    ("family", "mixers"),
    [
        ("llama", ["attention"] * 4),
        ("mamba", ["mamba"] * 4),
        ("mamba2", ["mamba2"] * 4),
        ("qwen3_next", ["gated_deltanet"] * 3 + ["attention"]),
        ("falcon_h1", ["attention+mamba"] * 4),
    ],
)
def test_mixers_are_named(family, mixers):
    adapter, _ = open_plain(tiny(family))
    assert list(adapter.anatomy.mixers) == mixers


def test_ties_are_seen():
    assert open_plain(tiny("gpt2"))[0].anatomy.tied
    assert not open_plain(tiny("gpt_neox"))[0].anatomy.tied


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_are_those_of_hooks_of_our_own(family):
    model = tiny(family)
    adapter, _ = open_plain(model)
    with torch.no_grad():
        streams = read_streams(adapter, BATCH)
    for row, length in enumerate(BATCH.lengths):
        alone = oracle.streams(model, BATCH.ids[row, :length].tolist())
        for depth, stream in enumerate(alone):
            assert torch.allclose(streams.states[depth][0][row, :length], stream, atol=1e-4)
        logits = streams.logits[row, :length].double().log_softmax(-1)
        assert torch.allclose(logits, oracle.forward(model, BATCH.ids[row, :length].tolist()), atol=1e-4)


def test_final_residual_is_not_the_normed_hidden_state():
    """`hidden_states[-1]` of most models is already normed; unembedding it again would norm twice."""
    model = tiny("llama")
    adapter, _ = open_plain(model)
    with torch.no_grad():
        last = read_streams(adapter, BATCH).states[-1][0]
        theirs = model(input_ids=BATCH.ids, use_cache=False, output_hidden_states=True).hidden_states[-1]
    assert not torch.allclose(last, theirs, atol=0.1)
    assert torch.allclose(model.model.norm(last)[0], theirs[0], atol=1e-5)


def test_renamed_norm_makes_no_difference():
    """The lens is the model's own tail: no name is looked up, so none can be missed."""
    model = tiny("llama")
    norm = model.model.norm
    del model.model.norm
    model.model.unusual_name = norm
    forward = type(model.model).forward

    class Renamed(type(model.model)):
        @property
        def norm(self) -> nn.Module:
            return self.unusual_name

    model.model.__class__ = Renamed
    assert forward is Renamed.forward
    adapter, check = open_plain(model)
    assert check.engine == "onepass"
    assert adapter.anatomy.tail == ("model.unusual_name", "lm_head")


class Wrong(PlainAdapter):
    """Scales the output of one block by 1.01, as a faulty re-implementation of a model might."""

    def call(self, module, arguments):
        output = super().call(module, arguments)
        return output * 1.01 if module is self._blocks[1] else output


def test_wrong_wrapper_is_refused_with_the_first_bad_depth(monkeypatch):
    monkeypatch.setattr("tracer.models.selfcheck.PlainAdapter", Wrong)
    with pytest.raises(tracer.ModelRefused, match=r"check 'streams'.*differ first at depth 2"):
        open_plain(tiny("llama"))


def test_encoder_is_refused_as_not_causal():
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=96
    )
    config.is_decoder = False
    model = transformers.BertLMHeadModel(config).eval()
    with pytest.raises(tracer.ModelRefused, match=r"'causality'.*pass a causal"):
        open_plain(reinitialised(model))
    config.is_decoder = True
    assert open_plain(reinitialised(transformers.BertLMHeadModel(config).eval()))[1].engine == "onepass"


class History(nn.Module):
    """Wraps a block so that it also sees the output of an earlier one, as models with looks back in depth do."""

    def __init__(self, block: nn.Module, memory: list):
        super().__init__()
        self.block, self.memory = block, memory

    def forward(self, hidden, *args, **kwargs):
        out = self.block(hidden, *args, **kwargs)
        if self.memory and self.memory[-1].shape == out.shape:
            out = out + 0.5 * self.memory[-1]
        self.memory.append(hidden)
        return out


def test_model_with_a_memory_of_earlier_residuals_falls_back_to_full():
    model = planted(2)
    memory: list = []
    for i, block in enumerate(model.blocks):
        model.blocks[i] = History(block, memory)
    forward = model.forward

    def with_fresh_memory(input_ids, attention_mask=None):
        memory.clear()
        return forward(input_ids, attention_mask)

    model.forward = with_fresh_memory
    _, check = open_plain(model)
    assert check.engine == "full"
    assert "more than the residual" in check.reason


def test_no_blocks_is_refused():
    class Flat(type(planted(0))):
        def __init__(self, config):
            super().__init__(config)
            self.only, self.blocks = self.blocks[0], nn.ModuleList()

        def forward(self, input_ids, attention_mask=None):
            return transformers.modeling_outputs.CausalLMOutput(logits=self.head(self.only(self.embedding(input_ids))))

    with pytest.raises(tracer.ModelRefused, match="no blocks"):
        open_plain(Flat(planted(0).config))


def hook_counts(model: nn.Module) -> list[tuple[int, int, bool]]:
    return [
        (len(m._forward_hooks), len(m._forward_pre_hooks), "_call_impl" in m.__dict__ or "forward" in m.__dict__)
        for m in model.modules()
    ]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("family", ["llama", "bloom", "mamba2"])
def test_nothing_is_left_behind_even_by_an_error_in_the_middle(family, error):
    model = tiny(family).train()
    model.get_submodule(next(name for name, _ in model.named_modules() if name)).eval()
    modes = [module.training for module in model.modules()]
    fired = []
    oracle.blocks_of(model)[1].register_forward_hook(lambda module, args, output: fired.append(1))
    before = hook_counts(model)
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(input_ids=BATCH.ids, use_cache=False).logits
    adapter, _ = open_plain(model)

    def fails(site):
        if site.index == 2:
            raise error("in the middle of a sweep")
        return site.run()

    with pytest.raises(error):
        adapter.run(BATCH, fails)
    assert hook_counts(model) == before
    assert [module.training for module in model.modules()] == modes
    fired.clear()
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=BATCH.ids, use_cache=False).logits, logits)
    assert fired == [1]


def test_users_hook_on_a_block_is_part_of_the_model():
    """It runs on the clean rows and on every variant, and is not run for blocks that are passed through."""
    model = tiny("llama")
    plain = tiny("llama")
    shift = torch.randn(64, generator=torch.Generator().manual_seed(0))
    oracle.blocks_of(model)[1].register_forward_hook(lambda module, args, output: output + shift)
    adapter, check = open_plain(model, all_depths=True)
    assert check.engine == "onepass"
    with torch.no_grad():
        steered, untouched = (read_streams(a, BATCH) for a in (adapter, open_plain(plain)[0]))
    assert torch.equal(steered.states[1][0], untouched.states[1][0])
    assert torch.allclose(steered.states[2][0], untouched.states[2][0] + shift)


def test_a_block_that_is_not_called_is_an_error():
    model = tiny("llama")
    adapter, _ = open_plain(model)
    model.config.num_hidden_layers = 3  # the parent now runs three of its four blocks
    if len(list(model.model.layers[: model.config.num_hidden_layers])) == 3:
        with pytest.raises(tracer.HookError, match="3 of 4 block calls"):
            adapter.run(BATCH, lambda site: site.run())


@pytest.mark.parametrize("family", ["bloom", "qwen3_next", "gpt2"])
def test_resume_runs_any_number_of_copies(family):
    """Masks, positions and folded ALiBi biases are repeated along the right dimension."""
    model = tiny(family)
    adapter, _ = open_plain(model)
    dims = state_batch_dims(adapter.anatomy)
    with torch.no_grad():
        states = read_streams(adapter, BATCH).states
        tripled = tuple(None if x is None else torch.cat([x, x, x], d) for d, x in zip(dims, states[1], strict=True))
        final = resume(adapter, BATCH, 1, tripled, copies=3)[0]
    for copy_ in final.chunk(3):
        for row, length in enumerate(BATCH.lengths):
            assert torch.allclose(copy_[row, :length], states[-1][0][row, :length], atol=1e-4)


def test_offloaded_weights_give_the_same_streams():
    from accelerate import cpu_offload

    model, plain = tiny("llama"), tiny("llama")
    cpu_offload(model, execution_device="cpu")
    assert model.model.layers[0].mlp.gate_proj.weight.device.type == "meta"
    adapter, check = open_plain(model)
    assert check.engine == "onepass"
    with torch.no_grad():
        ours, theirs = read_streams(adapter, BATCH), read_streams(open_plain(plain)[0], BATCH)
    assert torch.equal(ours.logits, theirs.logits)


def test_low_precision_is_judged_by_its_own_rounding():
    for dtype in (torch.bfloat16, torch.float16):
        _, check = open_plain(tiny("llama").to(dtype))
        assert check.engine == "onepass"
        assert all(c.passed for c in check.checks)
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=96
    )
    config.is_decoder = False
    encoder = reinitialised(transformers.BertLMHeadModel(config).eval()).to(torch.bfloat16)
    with pytest.raises(tracer.ModelRefused, match="causality"):
        open_plain(encoder)


def test_opening_costs_at_most_six_forwards():
    """Counted in block-runs on tokens, as the model's own blocks see them."""
    model = tiny("llama")
    tokens = [0]
    for block in oracle.blocks_of(model):
        block.register_forward_hook(
            lambda module, args, output: tokens.__setitem__(0, tokens[0] + output[..., 0].numel())
        )
    open_plain(model)
    assert tokens[0] <= 6 * BLOCKS * 3 * 11


class Board(nn.Module):
    """Leaves something on itself in block 0 that block 1 reads: state that no argument shows."""

    def __init__(self, block: nn.Module, index: int, board: dict):
        super().__init__()
        self.block, self.index, self.board = block, index, board

    def forward(self, hidden):
        if self.index == 0:
            self.board["left"] = hidden.flip(-1)
        if self.index == 1:
            hidden = hidden + self.board["left"]
        return self.block(hidden)


@pytest.mark.parametrize("n_blocks", [2, 4])
def test_what_blocks_remember_does_not_stand_in_for_running_them(n_blocks):
    """Resumed at once after a run on the same tokens, such a model would look as if its residual were all."""
    model = planted(1, n_blocks=n_blocks)
    board: dict = {}
    model.blocks = nn.ModuleList(Board(block, index, board) for index, block in enumerate(model.blocks))
    _, check = open_plain(model)
    assert check.engine == "full"
    assert "resume 1" in check.reason
