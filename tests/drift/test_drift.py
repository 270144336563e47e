"""Two checkpoints compared: against plain forwards and a model with one block exchanged."""

import copy

import numpy as np
import oracle
import pytest
import torch
from tiny import tiny, word_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tracer
from tracer.cli import main
from tracer.errors import InputError

PROBES = [tracer.Probe(f"w{i} w{(3 * i) % 90 + 3}", f" w{i % 9 + 3}", f"g{i % 2}", f"p{i}") for i in range(60)]


def later(model: torch.nn.Module, blocks: tuple[int, ...], scale: float = 0.05) -> torch.nn.Module:
    """A copy of a model with noise on the weights of some blocks."""
    torch.manual_seed(1)
    other = copy.deepcopy(model)
    opened = tracer.load(other)
    with torch.no_grad():
        for block in blocks:
            for parameter in opened.blocks[block].parameters():
                parameter.add_(scale * torch.randn_like(parameter))
    return other


def block_inputs(model: torch.nn.Module, ids: list[int]) -> list[torch.Tensor]:
    """What every block is handed at the last token, by plain hooks."""
    seen: list[torch.Tensor] = []

    def keep(_module, args, kwargs):
        seen.append((args[0] if args else kwargs["hidden_states"])[0, -1].double())

    handles = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in tracer.load(model).blocks]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("family", ["llama", "mamba2", "qwen3_next"])
def test_drift_equals_plain_forwards(family):
    live = tiny(family)
    other = later(live, (1, 2))
    result = tracer.drift(
        tracer.load(live, word_tokenizer()), tracer.load(other, word_tokenizer()), PROBES, progress=False
    )
    tokenizer = word_tokenizer()
    mixed = copy.deepcopy(live)
    name = tracer.load(live).anatomy.calls[1].module
    dict(mixed.named_modules())[name].load_state_dict(dict(other.named_modules())[name].state_dict())
    for row, probe in enumerate(PROBES[:12]):
        ids = tokenizer(probe.prompt)["input_ids"]
        mine, others, one = (oracle.forward(model, ids)[-1] for model in (live, other, mixed))
        assert result.probes["jsd"][row] == pytest.approx(oracle.jsd(mine, others), abs=2e-5)
        assert result.arrays["jsd_swap_weights"][1, row] == pytest.approx(oracle.jsd(mine, one), abs=2e-5)
        streams = [block_inputs(model, ids) for model in (live, other)]
        for depth in range(4):
            x, y = (stream[depth] for stream in streams)
            cosine = torch.nn.functional.cosine_similarity(x, y, dim=0).item()
            assert result.arrays["cosine"][depth, row] == pytest.approx(cosine, abs=1e-5)
    table = result.depths
    assert table["cosine"][:2].to_numpy() == pytest.approx(1.0, abs=1e-6)
    assert table["cosine"][2] < 0.9999
    weights = table.dropna(subset=["block"]).set_index("block")["weights"]
    assert weights[[0, 3]].max() == 0
    own, new = (dict(model.named_modules())[name].parameters() for model in (live, other))
    pairs = list(zip(own, new, strict=True))
    change = sum((b - a).double().square().sum() for a, b in pairs) / sum(a.double().square().sum() for a, _ in pairs)
    assert weights[1] == pytest.approx(change.sqrt().item(), rel=1e-9)
    assert table["jsd"].to_numpy()[[1, 4]].max() < 1e-9
    assert table["cka"][0] == pytest.approx(1.0, abs=1e-6)


def test_it_reloads_and_is_drawn(tmp_path):
    live = tiny("llama")
    pair = [tracer.load(model, word_tokenizer()) for model in (live, later(live, (3,)))]
    result = tracer.drift(*pair, PROBES, out=tmp_path / "drift", progress=False)
    again = tracer.DriftResult.load(tmp_path / "drift")
    assert again.summary() == result.summary()
    assert again.depths["block"].tolist() == result.depths["block"].tolist()
    np.testing.assert_array_equal(again.arrays["cosine"], result.arrays["cosine"])
    assert again.probes["particle_base"].dtype == "Int64"
    again.plot()
    assert "not told apart: 3" in result.summary()
    with pytest.raises(InputError, match="already holds a result"):
        tracer.drift(*pair, PROBES, out=tmp_path / "drift", progress=False)


def test_what_is_no_later_checkpoint_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["drift", "zoo/transformer-4", "zoo/transformer-8", "-q"])
    assert stopped.value.code == 2
    assert "differ in their number of blocks (4, 8)" in capsys.readouterr().err
    swapped = {f"w{i}": i for i in range(128)} | {"w7": 9, "w9": 7}
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(swapped, unk_token="w0")), unk_token="w0", pad_token="w0"
    )
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    probes = [tracer.Probe("w5 w6", " w8", "g", "a"), tracer.Probe("w7 w6", " w8", "g", "b")]
    pair = tracer.load(tiny("llama"), word_tokenizer()), tracer.load(tiny("llama", seed=1), other)
    with pytest.raises(InputError, match="tokenizers of .* disagree on probe b"):
        tracer.drift(*pair, probes, progress=False)
