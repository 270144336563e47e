"""The command line on a tiny saved model: what it prints, what it writes, and how it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from tiny import VOCAB, reinitialised, tiny, word_tokenizer

from tracer import measuring
from tracer.cli import main
from tracer.results import FILES, TraceResult
from tracer.summary import side_by_side


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def probes(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"w{i} w{i + 2}", "target": f" w{i + 1}", "group": f"g{i % 2}"} for i in range(3, 27)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err


def refused(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    """The one line on stderr of a call that exits with 2."""
    status, _, err = run(capsys, *arguments)
    lines = [line for line in err.splitlines() if line.startswith("tracer: ")]
    assert status == 2
    assert len(lines) == 1
    assert "Traceback" not in err
    return lines[0]


def test_trace_writes_a_result_with_figures_and_prints_a_summary(capsys, folder, probes, tmp_path):
    out = tmp_path / "run"
    status, text, _ = run(capsys, "trace", folder, "--probes", probes, "--out", out, "-q", "--ablations", "skip,mean")
    assert status == 0
    assert {path.name for path in out.iterdir()} == {*FILES, "figures"}
    names = {path.name for path in (out / "figures").iterdir()}
    assert names == {f"{n}.{end}" for n in ("joint", "lens", "fragility", "evolution") for end in ("png", "svg")}
    result = TraceResult.load(out)
    assert result.ablations == ("zero", "mean")
    assert len(result.probes) == 24
    for part in ("24 probes in 2 groups", "Task particles", "Fragility under zero", "Fragility under mean", "n = 24"):
        assert part in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("saved in")) <= 120
    top = result.blocks["jsd_zero"].idxmax()
    assert f"{result.blocks.loc[top, 'jsd_zero']:.3f}" in text


def test_limit_groups_and_csv(capsys, folder, tmp_path):
    csv = tmp_path / "mine.csv"
    csv.write_text("prompt,target,group\n" + "".join(f"w{i} w9, w{i + 1},g{i % 3}\n" for i in range(3, 30)))
    arguments = ["--groups", "g0,g2", "--limit", 4, "--out", tmp_path / "run", "-q", "--no-figures"]
    assert run(capsys, "trace", folder, "--probes", csv, *arguments)[0] == 0
    assert TraceResult.load(tmp_path / "run").probes["group"].value_counts().to_dict() == {"g0": 4, "g2": 4}


def test_check_prints_anatomy_and_every_check(capsys, folder):
    status, text, _ = run(capsys, "check", folder, "-q", "--backend", "hooks")
    assert status == 0
    for part in (
        "LlamaForCausalLM",
        "4, called as model.layers.*",
        "0-3 attention",
        "model.norm -> lm_head",
        "float32",
        "backend        hooks",
    ):
        assert part in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("ok")] == [
        *("causality", "streams", "untouched", "chain", "tail"),
        *("resume",) * 3,
    ]
    assert "engine: onepass" in text


def test_check_says_how_the_streams_are_reached_and_why(capsys, folder, tmp_path):
    status, text, _ = run(capsys, "check", folder, "-q")
    assert status == 0
    for part in (
        "TransformerBridge of LlamaForCausalLM",
        "blocks.*",
        "0-3 attention",
        "backend        transformer_lens",
    ):
        assert part in text
    assert "note           booted as TransformerBridge: attention runs in its eager form" in text
    status, text, _ = run(capsys, "check", folder, "-q", "--device-map", "cpu")
    assert status == 0
    assert "backend        hooks" in text
    assert "note           its weights are dispatched over devices: opened by plain hooks" in text


def encoder(tmp_path: Path) -> Path:
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=96
    )
    reinitialised(transformers.BertLMHeadModel(config)).save_pretrained(tmp_path / "encoder")
    word_tokenizer().save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


def test_check_says_no_with_status_one(capsys, tmp_path):
    status, text, _ = run(capsys, "check", encoder(tmp_path), "-q")
    assert status == 1
    assert text.startswith("no: BertLMHeadModel cannot be traced: check 'causality'")
    assert "pass a causal" in text


def test_bad_input_is_one_line_and_leaves_nothing(capsys, folder, probes, tmp_path):
    out = tmp_path / "run"
    empty, broken = tmp_path / "empty.jsonl", tmp_path / "broken.jsonl"
    empty.write_text("")
    broken.write_text('{"prompt": "w1", "target": " w2"}\n{"prompt": "w1", "target": \n')
    no_target = tmp_path / "target.jsonl"
    no_target.write_text('{"prompt": "w1", "target": ""}\n')
    (tmp_path / "hollow").mkdir()
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but not really")

    def trace(model: object, *options: object) -> str:
        return refused(capsys, "trace", model, "--out", out, "-q", *options)

    assert "no-such-model" in trace("no-such-model", "--probes", probes)
    assert "config.json" in trace(tmp_path / "hollow", "--probes", probes)
    assert "bad.gguf" in trace(tmp_path / "bad.gguf", "--probes", probes)
    assert "empty.jsonl" in trace(folder, "--probes", empty)
    assert "broken.jsonl:2" in trace(folder, "--probes", broken).replace(", line ", ":").replace(" line ", ":")
    assert "target" in trace(folder, "--probes", no_target)
    assert "nowhere.jsonl" in trace(folder, "--probes", tmp_path / "nowhere.jsonl")
    assert "'causality'" in trace(encoder(tmp_path), "--probes", probes)
    assert "unknown ablation 'zap'" in trace(folder, "--probes", probes, "--ablations", "zap")
    assert "g7" in trace(folder, "--probes", probes, "--groups", "g7")
    assert "float33" in trace(folder, "--probes", probes, "--dtype", "float33")
    assert "unknown backend" in trace(folder, "--probes", probes, "--backend", "magic")
    assert not out.exists()
    status, _, err = run(capsys, "trace", folder, "--out", out, "--limt", "3")
    assert status == 2
    assert "--limt" in err


def test_skip_bad_counts_the_lines(capsys, folder, probes, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(probes.read_text() + '{"prompt": "w1"}\n{"prompt": "w1 w2", "target": " w3 w4", "group": "g0"}\n')
    refused(capsys, "trace", folder, "--probes", bad, "--out", tmp_path / "run", "-q")
    options = ["--skip-bad", "--no-figures", "-q"]
    status, text, _ = run(capsys, "trace", folder, "--probes", bad, "--out", tmp_path / "run", *options)
    assert status == 0
    assert "2 probes are not usable" in text
    assert len(TraceResult.load(tmp_path / "run").run["skipped"]) == 2


def test_existing_result_is_kept_unless_forced(capsys, folder, probes, tmp_path):
    arguments = ["trace", folder, "--probes", probes, "--out", tmp_path / "run", "-q", "--no-figures"]
    assert run(capsys, *arguments)[0] == 0
    before = (tmp_path / "run" / "run.json").read_bytes()
    assert "already holds a result" in refused(capsys, *arguments)
    assert run(capsys, *arguments, "--resume")[0] == 0
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    assert run(capsys, *arguments, "--force", "--seed", 5)[0] == 0
    assert TraceResult.load(tmp_path / "run").run["arguments"]["seed"] == 5


def test_several_models_are_traced_apart_and_drawn_side_by_side(capsys, folder, probes, tmp_path):
    other = tmp_path / "other"
    tiny("mamba2", seed=1).save_pretrained(other)
    word_tokenizer().save_pretrained(other)
    arguments = ["--probes", probes, "--out", tmp_path / "runs", "-q", "--backend", "hooks"]
    status, text, _ = run(capsys, "trace", folder, other, *arguments, "--ablations", "zero")
    assert status == 0
    results = [TraceResult.load(tmp_path / "runs" / name) for name in (folder.name, "other")]
    assert [result.run["model"]["name"] for result in results] == [str(folder), str(other)]
    assert text.startswith(side_by_side(results))
    assert {path.name for path in (tmp_path / "runs" / "figures").iterdir()} == {"families.png", "families.svg"}
    again = run(capsys, "trace", folder, other, *arguments, "--ablations", "zero", "--resume", "--no-figures")
    assert (again[0], again[1].startswith(side_by_side(results))) == (0, True)
    more = ["--ablations", "none", "--out", tmp_path / "lens"]
    assert run(capsys, "trace", folder, other, "--probes", probes, "-q", "--backend", "hooks", *more)[0] == 0
    assert (tmp_path / "lens" / "figures" / "families.svg").is_file(), "of the particles alone"
    line = refused(capsys, "trace", folder, other, *arguments, "--ablations", "zero")
    assert "already holds a result" in line
    assert "would be saved under one name" in refused(capsys, "trace", folder, folder, *arguments)


def test_interrupt_says_how_to_go_on(capsys, folder, probes, tmp_path, monkeypatch):
    calls = []

    def interrupted(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) in (1, 3):
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    real = measuring.run
    arguments = ["trace", folder, "--probes", probes, "--out", tmp_path / "run", "-q", "--no-figures"]
    arguments += ["--batch-tokens", 128]
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "run", interrupted)
        status, _, err = run(capsys, *arguments)
        assert (status, "nothing is lost" in err) == (130, True)
        status, _, err = run(capsys, *arguments)
    assert status == 130
    assert f"--out {tmp_path / 'run'} --resume" in err
    assert run(capsys, *arguments, "--resume")[0] == 0


def test_help_has_examples_and_loads_no_heavy_module():
    script = "import sys, tracer.cli; print('torch' in sys.modules, 'transformers' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert loaded.split() == ["False", "False"]
    script = "from tracer.cli import main; main(['trace', '--help'])"
    text = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "Examples:" in text
    assert "--ablations" in text


COMMAND = Path(sys.executable).parent / "tracer"


@pytest.mark.skipif(not COMMAND.exists(), reason="needs the installed command")
def test_installed_command_answers():
    text = subprocess.run([COMMAND, "--version"], capture_output=True, text=True, check=True).stdout
    assert text.startswith("tracer, version ")


COMMANDS = [(), ("check",), ("fetch",), ("trace",), ("patch",), ("tuned-lens",), ("eval",), ("zoo",)]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_its_examples_line_by_line(capsys, command):
    status, text, _ = run(capsys, *command, "--help")
    assert status == 0
    examples = [line.strip() for line in text.splitlines() if line.strip().startswith("tracer ")]
    assert examples
    assert all(example.count("tracer ") == 1 for example in examples)
    assert "\\b" not in text
