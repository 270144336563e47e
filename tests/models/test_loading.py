"""Opening models: from folders that the test saves, live, and from a small server that speaks the hub's protocol."""

import hashlib
import http.server
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import tiny, word_tokenizer
from transformers import PreTrainedModel

from tracer.errors import InputError
from tracer.models.loading import OpenedModel, open_model

CPU_ONLY = not torch.cuda.is_available()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERTRACER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def llama() -> PreTrainedModel:
    return tiny("llama", tie_word_embeddings=False)


@pytest.fixture
def folder(llama: PreTrainedModel, tmp_path: Path) -> Path:
    """A whole checkpoint, in float32, with a tokenizer."""
    llama.save_pretrained(tmp_path / "llama")
    word_tokenizer().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def refused(source: Any, pattern: str, **options: Any) -> str:
    with pytest.raises(InputError, match=pattern) as caught:
        open_model(source, progress=False, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def equal_weights(a: PreTrainedModel, b: PreTrainedModel) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- folders --------------------------------------------------------------------------------------------------------


def test_folder_opens_with_its_weights_and_tokenizer(folder: Path, llama: PreTrainedModel) -> None:
    opened = open_model(folder, progress=False)
    assert equal_weights(opened.model, llama)
    assert not opened.model.training
    assert opened.tokenizer is not None
    assert opened.tokenizer("w5 w7")["input_ids"] == [5, 7]
    assert opened == OpenedModel(
        opened.model, opened.tokenizer, name=str(folder), kind="folder", revision=None, dtype="float32", notes=()
    )


def test_stored_bfloat16_is_kept_and_said(folder: Path, llama: PreTrainedModel) -> None:
    llama.to(torch.bfloat16).save_pretrained(folder)
    opened = open_model(str(folder), progress=False)
    assert opened.dtype == "bfloat16"
    assert {parameter.dtype for parameter in opened.model.parameters()} == {torch.bfloat16}
    assert opened.notes == ("stored dtype bfloat16 kept; pass dtype= to change",)


@pytest.mark.parametrize("dtype", ["float32", torch.float32, "float16"])
def test_dtype_is_what_is_asked_for(folder: Path, llama: PreTrainedModel, dtype: str | torch.dtype) -> None:
    llama.to(torch.bfloat16).save_pretrained(folder)
    opened = open_model(folder, dtype=dtype, progress=False)
    assert opened.dtype == str(dtype).removeprefix("torch.")
    assert next(opened.model.parameters()).dtype == getattr(torch, opened.dtype)
    assert opened.notes == ()


def test_dtype_is_read_from_the_parameters(llama: PreTrainedModel) -> None:
    model = llama.half()
    model.config.dtype = torch.float32
    model.lm_head.float()
    opened = open_model(model)
    assert opened.dtype == "float16"
    assert opened.notes == ("parameters of several dtypes: float16, float32",)


def test_own_tokenizer_is_preferred(folder: Path) -> None:
    own = word_tokenizer(10)
    assert open_model(folder, own, progress=False).tokenizer is own


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # transformers fails, or makes an empty tokenizer
def test_folder_without_tokenizer_opens_without_one(family: str, tmp_path: Path) -> None:
    tiny(family).save_pretrained(tmp_path / "bare")
    opened = open_model(tmp_path / "bare", progress=False)
    assert opened.tokenizer is None
    assert opened.notes == ("no tokenizer in the checkpoint; pass tokenizer= to use text",)


def test_broken_tokenizer_is_refused_unless_another_is_passed(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    refused(folder, r"the tokenizer of .* pass tokenizer=")
    assert open_model(folder, word_tokenizer(), progress=False).tokenizer is not None


def test_tied_weights_stored_once_are_not_missing(tmp_path: Path) -> None:
    model = tiny("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    assert equal_weights(open_model(tmp_path / "tied", progress=False).model, model)


def test_missing_weights_are_refused(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    refused(folder, r"lacks 1 weights .*model\.layers\.1\.mlp\.up_proj\.weight")


def test_base_model_without_a_head_is_refused(folder: Path, llama: PreTrainedModel) -> None:
    llama.model.save_pretrained(folder)
    refused(folder, r"lacks 1 weights .*lm_head\.weight")


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    edit_config(folder, intermediate_size=80)
    refused(folder, r"12 weights of another shape .*\(64, 96\) instead of \(64, 80\)")


def test_weights_without_a_place_are_noted(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)
    (note,) = open_model(folder, progress=False).notes
    assert note.startswith("9 weights of the checkpoint have no place in the model (model.layers.3.")


def test_pickled_weights_are_refused(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(folder, "model.safetensors")


def test_truncated_weights_are_refused(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    refused(folder, "cannot be opened")


def test_broken_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')
    refused(folder, "cannot be opened")
    (folder / "config.json").write_text('{"model_type": "no_such_type"}')
    refused(folder, "no_such_type")


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, r"has no config\.json")


@pytest.mark.parametrize("name", ["./nothing", "/no/such/folder", "~/nothing-here", "a/b/c", "nothing/", Path("x")])
def test_missing_folder_is_not_looked_for_elsewhere(name: str | Path) -> None:
    refused(name, f"no such folder: {name}")


def test_missing_gguf_and_other_files_are_refused(folder: Path) -> None:
    refused("nothing.gguf", r"no such file: nothing\.gguf")
    refused(folder / "model.safetensors", "is a file; pass the folder")


def test_model_code_of_the_checkpoint_is_not_run_unasked(folder: Path, tmp_path: Path) -> None:
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    refused(folder, "trust_remote_code")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("class_name", "config_name", "pattern"),
    [
        ("T5ForConditionalGeneration", "T5Config", r"encoder-decoder \(t5\)"),
        ("ViTForImageClassification", "ViTConfig", r"\(vit\) is not a causal language model"),
    ],
)
def test_other_kinds_of_models_are_refused(tmp_path: Path, class_name: str, config_name: str, pattern: str) -> None:
    config = getattr(transformers, config_name)(
        vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    )  # fmt: skip
    getattr(transformers, class_name)(config).save_pretrained(tmp_path / "other")
    refused(tmp_path / "other", pattern)


def test_nothing_is_printed_without_progress(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    open_model(folder, progress=False)
    assert capfd.readouterr() == ("", "")


def test_logging_of_transformers_is_as_before(folder: Path) -> None:
    logging = transformers.utils.logging
    logging.set_verbosity_info()
    try:
        open_model(folder, progress=False)
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float8", "int8", torch.int32, "torch.float32"])
def test_unknown_dtype_is_refused(folder: Path, dtype: str | torch.dtype) -> None:
    refused(folder, r"unknown dtype .*float32, bfloat16, float16", dtype=dtype)


def test_contradicting_options_are_refused(folder: Path) -> None:
    refused(folder, "contradict each other", device="cpu", device_map="auto")
    refused(folder, "not from there", revision="main")


def test_unusable_device_is_refused(folder: Path) -> None:
    refused(folder, "device nowhere cannot be used", device="nowhere")
    if CPU_ONLY:
        refused(folder, "device cuda:0 cannot be used", device="cuda:0")


def test_device_and_device_map(folder: Path, llama: PreTrainedModel) -> None:
    for options in ({"device": "cpu"}, {"device_map": "cpu"}, {"device_map": "auto"}):
        assert equal_weights(open_model(folder, progress=False, **options).model.cpu(), llama)
    refused(folder, "nonsense", device_map="nonsense")


@pytest.mark.gpu
def test_model_goes_to_the_gpu(folder: Path) -> None:
    opened = open_model(folder, device="cuda", progress=False)
    assert {parameter.device.type for parameter in opened.model.parameters()} == {"cuda"}


def test_live_model_stays_as_it_is(llama: PreTrainedModel) -> None:
    llama.train()
    tokenizer = word_tokenizer()
    opened = open_model(llama, tokenizer)
    assert opened.model is llama
    assert opened.tokenizer is tokenizer
    assert (opened.kind, opened.name, opened.revision) == ("live", "LlamaForCausalLM", None)
    assert llama.training


@pytest.mark.parametrize("option", [{"dtype": "float32"}, {"device": "cpu"}, {"device_map": "auto"}, {"revision": "x"}])
def test_live_model_takes_no_options_of_loading(llama: PreTrainedModel, option: dict[str, str]) -> None:
    refused(llama, f"{next(iter(option))} cannot be passed with a live model", **option)


# --- the hub --------------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def serve(handler: type[http.server.BaseHTTPRequestHandler]) -> http.server.ThreadingHTTPServer:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def point_hub_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # it remembers its endpoint


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[http.server.ThreadingHTTPServer, list[str]]]:
    """A server of the folder as `org/llama`, beside a gated model, and the paths that it was asked for."""

    asked: list[str] = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            asked.append(self.path)
            repository, _, rest = self.path.partition("/resolve/")
            revision, _, name = rest.partition("?")[0].partition("/")
            if self.path.startswith("/api/models/org/llama/tree/"):
                self.answer(404, {"X-Error-Code": "EntryNotFound"})  # asked for a folder of chat templates
            elif repository == "/org/gated":
                self.answer(403, {"X-Error-Code": "GatedRepo"})
            elif repository != "/org/llama":
                self.answer(401, {"X-Error-Code": "RepoNotFound"})
            elif revision not in ("main", COMMIT):
                self.answer(404, {"X-Error-Code": "RevisionNotFound"})
            elif not (folder / name).is_file():
                self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            else:
                content = (folder / name).read_bytes()
                etag = hashlib.sha256(content).hexdigest()
                self.answer(200, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}, content)

        def answer(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = serve(Hub)
    point_hub_to(f"http://127.0.0.1:{server.server_port}", monkeypatch)
    yield server, asked
    server.shutdown()
    server.server_close()


@pytest.mark.hub
def test_hub_model_opens_and_later_from_the_local_cache(
    hub: tuple[http.server.ThreadingHTTPServer, list[str]], llama: PreTrainedModel
) -> None:
    server, asked = hub
    opened = open_model("org/llama", progress=False)
    assert equal_weights(opened.model, llama)
    assert (opened.kind, opened.name, opened.revision, opened.notes) == ("hub", "org/llama", COMMIT, ())
    assert opened.tokenizer is not None
    assert {path.split("/")[4] for path in asked if path.endswith("model.safetensors")} == {COMMIT}
    assert open_model("org/llama", revision=COMMIT, progress=False).revision == COMMIT

    server.shutdown()
    server.server_close()
    start = time.monotonic()
    offline = open_model("org/llama", progress=False)
    assert time.monotonic() - start < 5
    assert equal_weights(offline.model, llama)
    assert offline.revision == COMMIT
    assert offline.tokenizer is not None
    assert offline.notes == ("the Hugging Face hub could not be reached; opened from the local cache",)


@pytest.mark.hub
@pytest.mark.usefixtures("hub")
def test_hub_model_without_tokenizer_opens_without_one(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    opened = open_model("org/llama", progress=False)
    assert opened.tokenizer is None
    assert opened.notes == ("no tokenizer in the checkpoint; pass tokenizer= to use text",)


@pytest.mark.hub
@pytest.mark.usefixtures("hub")
def test_what_the_hub_refuses_is_said() -> None:
    refused("org/nothing", r"org/nothing is not a local folder.* the Hugging Face hub has no such model")
    refused("org/gated", "org/gated is gated")
    refused("org/llama", "org/llama has no revision 'v2'", revision="v2")


@pytest.mark.hub
@pytest.mark.usefixtures("hub")
def test_hub_model_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused("org/llama", r"org/llama has no config\.json")


@pytest.mark.hub
def test_unreachable_hub_is_noticed_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port, seconds in ((silent.getsockname()[1], 12), (9, 3)):
            point_hub_to(f"http://127.0.0.1:{port}", monkeypatch)
            start = time.monotonic()
            message = refused("gemma3-270m", "the Hugging Face hub cannot be reached")
            assert time.monotonic() - start < seconds
            assert "gemma3-270m is not a local folder" in message
            assert "did you mean gemma3-270m-q4_k_m?" in message


def test_offline_mode_is_not_disturbed() -> None:
    refused("org/model", "the Hugging Face hub cannot be reached")


def test_what_cannot_be_an_id_is_refused() -> None:
    refused("not an id", "cannot be a Hugging Face id")
    refused("", "no model was named")


def test_folder_named_like_a_model_of_the_catalogue(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "smollm2-135m-instruct-q4_1"
    shutil.copytree(folder, folder.parent / name)
    monkeypatch.chdir(folder.parent)
    refused(name, f"run `tracer fetch {name}`")
    assert open_model(f"./{name}", progress=False).kind == "folder"
