"""Training of the zoo, a few steps of it: it can be repeated, interrupted, and leaves a whole model behind."""

import json
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import PreTrainedTokenizerFast
from transformers.models.mamba import modeling_mamba

from tracer import load
from tracer.errors import InputError
from tracer.zoo import build as building
from tracer.zoo import documents, mamba_scan, questions, shelf, training
from tracer.zoo.build import UNFINISHED, build, build_all, main
from tracer.zoo.families import FAMILIES, RUNS, Run, untrained
from tracer.zoo.mamba_scan import linear_backward, selective_scan
from tracer.zoo.tokenizer import make_tokenizer
from tracer.zoo.world import make_world

SHORT = Run(replace(FAMILIES["transformer"], steps=6), blocks=2)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(make_world())


@pytest.fixture(autouse=True)
def _quickly(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here changes what is trained: few probes, and one tokenizer for all."""
    monkeypatch.setattr(training, "EVALUATE_EVERY", 3)
    monkeypatch.setattr(questions, "PER_RELATION", 2)
    monkeypatch.setattr(building, "make_tokenizer", lambda _world: tokenizer)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_an_interrupted_training_goes_on_to_the_same_weights(tokenizer, tmp_path, monkeypatch):
    world = make_world()
    whole = training.train(SHORT, world, tokenizer, tmp_path / "whole")
    assert whole.tokens == 6 * training.BATCH * training.WINDOW
    assert [entry["step"] for entry in whole.curve] == [3, 6]

    on_log = training._Held.on_log

    def interrupted(self, args, state, control, **kwargs):
        on_log(self, args, state, control, **kwargs)
        if state.global_step == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training._Held, "on_log", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.train(SHORT, world, tokenizer, tmp_path / "halves")
    again = training.train(SHORT, world, tokenizer, tmp_path / "halves")
    assert again.curve[-1] == whole.curve[-1]
    expected = weights(whole.model)
    for name, value in weights(again.model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_a_seed_fixes_the_model_and_its_data(tokenizer):
    world = make_world()
    first, again, other = (untrained(replace(SHORT, seed=seed), len(tokenizer), 0) for seed in (0, 0, 1))
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)
    assert 0.97 < first.get_input_embeddings().weight.std() < 1.03
    small = untrained(replace(SHORT, embedding_std=0.02), len(tokenizer), 0)
    assert small.get_input_embeddings().weight.std() < 0.021
    data = [training.windows(world, tokenizer, seed, 20) for seed in (0, 0, 1)]
    assert torch.equal(data[0], data[1])
    assert not torch.equal(data[0], data[2])


def test_windows_are_the_documents_one_after_the_other(tokenizer):
    world = make_world()
    stream = training.windows(world, tokenizer, 0, 50).flatten().tolist()
    assert stream[0] == tokenizer.bos_token_id
    first = tokenizer.decode(stream).split("<s>")[1:-1]
    documents = training.documents(world, 0)
    assert [text.strip() for text in first] == [next(documents) for _ in first]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_built_model_is_whole_and_left_alone(family, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "EVALUATE_EVERY", 1)
    run = Run(replace(FAMILIES[family], steps=1), blocks=4)
    card = build(run, tmp_path / "model")
    assert f"{family}-4: step" in capsys.readouterr().err
    assert not (tmp_path / "model" / UNFINISHED).exists()
    assert card["parameters"] == load(str(tmp_path / "model"), backend="hooks", progress=False).model.num_parameters()
    assert json.loads((tmp_path / "model" / "card.json").read_text()) == json.loads(json.dumps(card))
    assert (tmp_path / "model" / "README.md").read_text().startswith(f"# zoo/{family}-4\n")
    monkeypatch.setattr(training, "train", None)
    assert build(run, tmp_path / "model") == json.loads(json.dumps(card))
    with pytest.raises(InputError, match="was trained with other settings: delete it"):
        build(replace(run, seed=1), tmp_path / "model")


def test_half_a_training_is_not_taken_for_another(tmp_path, monkeypatch):
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build(SHORT, tmp_path / "model")
    monkeypatch.setattr(documents, "ZH_SHARE", 0.2)
    with pytest.raises(InputError, match="was trained with other settings"):
        build(SHORT, tmp_path / "model")
    assert not (tmp_path / "model" / "card.json").exists()


def test_mamba1_is_trained_by_the_linear_scan(tokenizer, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(mamba_scan, "selective_scan", lambda *a, **k: calls.append(1) or selective_scan(*a, **k))
    monkeypatch.setattr(training, "EVALUATE_EVERY", 1)
    world = make_world()
    training.train(Run(replace(FAMILIES["mamba1"], steps=1), blocks=2), world, tokenizer, tmp_path)
    assert len(calls) >= 2, "once a block in the step itself"


def test_the_model_is_the_same_with_the_linear_scan():
    model = untrained(Run(FAMILIES["mamba1"], blocks=2), 100, 0).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with linear_backward():
            found = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_linear_scan_is_that_of_transformers():
    generator = torch.Generator().manual_seed(0)
    batch, d_inner, pos, d_state = 2, 6, 17, 4
    shapes = {"hidden_states": (batch, d_inner, pos), "dt": (batch, d_inner, pos), "A": (d_inner, d_state)}
    shapes |= {"B": (batch, d_state, pos), "C": (batch, d_state, pos), "D": (d_inner,), "z": (batch, d_inner, pos)}
    shapes |= {"delta_bias": (d_inner,)}
    outputs, gradients = [], []
    for scan in (modeling_mamba.mamba_selective_scan, selective_scan):
        generator.manual_seed(0)
        tensors = {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}
        tensors["A"] = -tensors["A"].abs()
        leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        output = scan(**leaves, delta_softplus=True)
        output.square().sum().backward()
        outputs.append(output.detach())
        gradients.append({name: leaf.grad for name, leaf in leaves.items()})
    # The loop of transformers keeps its state in float32 steps at places.
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradient, gradients[0][name], rtol=1e-4, atol=1e-4)


def test_the_scan_of_transformers_comes_back():
    original = modeling_mamba.mamba_selective_scan
    with linear_backward():
        assert modeling_mamba.mamba_selective_scan is selective_scan
    assert modeling_mamba.mamba_selective_scan is original


def test_the_shipped_runs_cover_every_family_and_three_sizes():
    shipped = [run for run in RUNS.values() if run.shipped]
    assert {run.family.name for run in shipped} == set(FAMILIES)
    assert {run.blocks for run in shipped if run.family.name == "transformer"} == {4, 8, 12}
    seeds = {name: {run.seed for run in RUNS.values() if run.family.name == name} for name in FAMILIES}
    assert [name for name, found in seeds.items() if len(found) == 3] == ["transformer", "mamba2", "gdn-attention"]


def test_make_zoo_trains_what_is_named_and_puts_it_on_the_shelf(tmp_path: Path, monkeypatch):
    result = CliRunner().invoke(main, ["transformer-9"])
    assert result.exit_code == 2
    assert "no model 'transformer-9'" in result.output
    monkeypatch.setattr(shelf, "SHELF", tmp_path / "shelf")
    monkeypatch.setattr(building, "SHELF", tmp_path / "shelf")
    monkeypatch.setattr(building, "PROBES", tmp_path / "probes" / "zoo")
    (tmp_path / "probes").mkdir()
    build(SHORT, tmp_path / "zoo" / SHORT.name)
    monkeypatch.setitem(RUNS, SHORT.name, SHORT)
    result = CliRunner().invoke(main, [SHORT.name, "--out", str(tmp_path / "zoo"), "--jobs", "1"])
    assert result.exit_code == 0, result.output
    assert shelf.zoo_names() == (f"zoo/{SHORT.name}",)
    assert load(f"zoo/{SHORT.name}", progress=False).n_blocks == 2
    assert len(list((tmp_path / "probes" / "zoo").glob("*.jsonl"))) == 7
    monkeypatch.setattr(building, "PROBES", tmp_path / "nowhere" / "zoo")
    result = CliRunner().invoke(main, [SHORT.name])
    assert result.exit_code == 2
    assert "not in an installed package" in result.output


def test_a_failed_training_does_not_stop_the_others(tmp_path: Path):
    for name in ("broken", "whole"):
        (tmp_path / name).mkdir()
    runs = [replace(SHORT, seed=seed) for seed in (1, 2)]
    (tmp_path / runs[0].name).write_text("a file in the way")
    build(runs[1], tmp_path / runs[1].name)
    finished: list[Run] = []
    assert build_all(runs, tmp_path, 2, finished.append) == [runs[0].name]
    assert finished == [runs[1]]


def test_an_interrupt_ends_every_process(tmp_path: Path):
    def interrupted(run: Run) -> None:
        raise KeyboardInterrupt

    build(SHORT, tmp_path / SHORT.name)
    long = Run(replace(FAMILIES["gdn"], steps=100_000))
    with pytest.raises(KeyboardInterrupt):
        build_all([SHORT, long], tmp_path, 2, interrupted)
    for child in active_children():
        child.join(timeout=20)
    assert not active_children()
