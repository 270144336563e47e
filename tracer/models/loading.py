"""Opening a model: a Hugging Face id, a folder, a GGUF file, a name of the catalogue or the zoo, a live model."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import huggingface_hub.errors as hub_errors
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from tracer.errors import InputError
from tracer.models.cache import file_sha256, one_line, read_manifest
from tracer.models.catalogue import CATALOGUE, cached_folder, suggest_names
from tracer.models.checkpoint import first_few, read_causal_lm, transformers_output
from tracer.models.gguf_file import convert_gguf
from tracer.zoo import shelf

Kind = Literal["hub", "folder", "gguf", "catalogue", "zoo", "live"]

# Names are dtypes in which a model can be computed; a quantised storage format is not one of them.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUB_TIMEOUT_S = 5.0
# What holds a vocabulary; tokenizer_config.json alone does not.
VOCABULARY_FILES = ("tokenizer.json", "*.model", "*vocab*", "tekken.json", "*.tiktoken", "tokenization*.py")


@dataclass(frozen=True)
class OpenedModel:
    """A causal language model of transformers, as it was opened.

    Attributes:
        model: The model, in eval mode unless it was passed live.
        tokenizer: Its tokenizer; None where the checkpoint has none and none was passed.
        name: What it is called in outputs: the id, path or name that was passed.
        kind: Where it came from.
        revision: Commit of the hub, `sha256:...` of a GGUF file or of a zoo model's weights, None for a folder and a
            live model.
        dtype: dtype of the parameters, read from them (`float32`); of most elements where they differ.
        notes: What a reader of results should know about how it was opened.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    kind: Kind
    revision: str | None
    dtype: str
    notes: tuple[str, ...]


def open_model(
    source: object,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> OpenedModel:
    """Opens a causal language model with the weights it was saved with, and says how.

    A model that also sees or hears is opened as it is, or as its language model alone where transformers does so.

    Weights are read from safetensors only. One that the checkpoint lacks is an error, never a random tensor.

    Args:
        source: A live model, a name of the catalogue (fetched before) or of the zoo (`zoo/...`), a folder with
            `config.json`, a `.gguf` file, or a Hugging Face id, looked up in this order. A folder that is called like
            one of these names is reached as `./name`.
        tokenizer: Used instead of the checkpoint's own.
        dtype: `float32`, `bfloat16` or `float16`. None keeps the dtype that the checkpoint is stored in; a model of the
            zoo, which is stored in `float16`, is then opened in `float32`.
        device: Where to put the model, e.g. `cuda:0`. None: the CPU, or what `device_map` says.
        device_map: Passed to transformers, to spread a model over devices and memory.
        revision: Branch, tag or commit of a Hugging Face id.
        trust_remote_code: Run model code that comes with the checkpoint.
        progress: Show progress bars on stderr.

    Raises:
        InputError: There is no such model, it is not a causal language model, its files are incomplete or
            damaged, or the options contradict each other.
    """
    if not isinstance(source, PreTrainedModel | str | os.PathLike):
        raise InputError(
            f"cannot open a {type(source).__name__}: pass a name, a folder, a GGUF file, or a live Hugging Face model"
        )
    if isinstance(source, PreTrainedModel):
        refuse_options_of_live_models(
            dtype=dtype,
            device=device,
            device_map=device_map,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        return _describe_live(source, tokenizer)
    wanted = _parse_dtype(dtype)
    if device is not None and device_map is not None:
        raise InputError(f"device={device!s} and device_map={device_map!r} contradict each other; pass one of them")
    place = _parse_device(device)
    with transformers_output(progress):
        located = _locate(source, revision, progress)
        if wanted is None and located.kind == "zoo":  # stored in half the bytes, which is no dtype to compute in
            wanted = torch.float32
        options: dict[str, Any] = {
            "revision": located.revision if located.kind == "hub" else None,
            "trust_remote_code": trust_remote_code,
            "local_files_only": located.local_files_only,
        }
        try:
            config = AutoConfig.from_pretrained(located.path, **options)
            options_of_weights: dict[str, Any] = {
                "auto_class": _auto_class(config, located.name),
                "config": config,
                "dtype": "auto" if wanted is None else wanted,
                "device_map": device_map if place is None else {"": place},
                "use_safetensors": True,
            }
            model, unplaced = read_causal_lm(located.path, located.name, **options_of_weights, **options)
            if tokenizer is None:
                tokenizer = _read_tokenizer(located, options)
        except InputError:
            raise
        except torch.OutOfMemoryError as error:
            where = place if place is not None else f"the devices of device_map={device_map!r}"
            raise InputError(f"{located.name} does not fit on {where}; pass a smaller dtype=") from error
        except (OSError, ValueError, ImportError, KeyError, SafetensorError, hub_errors.HTTPError) as error:
            reason = one_line(error)
            if "trust_remote_code" in str(error):
                reason = "it needs model code of its own; pass trust_remote_code=True if you trust that code"
            raise InputError(f"{located.name} cannot be opened: {reason}") from error
    name_of_dtype, mixed = read_dtype(model)
    notes = [*located.notes, *mixed, *_other_parts(model)]
    stored, opened = (config.architectures or [None])[0], type(model).__name__
    if text_config(config) is not config and stored not in (None, opened):
        notes.append(f"the language model of a {stored}, opened alone as {opened}")
    if wanted is None and name_of_dtype != "float32":
        notes.append(f"stored dtype {name_of_dtype} kept; pass dtype= to change")
    if tokenizer is None:
        notes.append("no tokenizer in the checkpoint; pass tokenizer= to use text")
    if unplaced:
        notes.append(f"{len(unplaced)} weights of the checkpoint have no place in the model ({first_few(unplaced)})")
    return OpenedModel(model, tokenizer, located.name, located.kind, located.revision, name_of_dtype, tuple(notes))


@dataclass(frozen=True)
class _Located:
    """Where the files of a checkpoint are."""

    path: str
    folder: Path
    name: str
    kind: Kind
    revision: str | None = None
    local_files_only: bool = True
    notes: tuple[str, ...] = ()


def _locate(source: str | os.PathLike[str], revision: str | None, progress: bool) -> _Located:
    """Finds out what `source` names, without reading any weights."""
    name = os.fspath(source)
    if not name:
        raise InputError(f"no model was named; pass a folder, a Hugging Face id or one of {', '.join(CATALOGUE)}")
    path = Path(name).expanduser()
    has_own_name = isinstance(source, str) and (name in CATALOGUE or name.startswith(shelf.PREFIX))
    if isinstance(source, str) and not has_own_name and not path.exists() and not _looks_like_path(name):
        return _locate_on_hub(name, revision)
    if revision is not None:
        raise InputError(f"revision={revision!r} means a commit of the Hugging Face hub, but {name} is not from there")
    if has_own_name and name.startswith(shelf.PREFIX):
        return _from_zoo(name)
    if has_own_name:
        folder = cached_folder(name)
        if folder is None:
            raise InputError(f"{name} is not in the cache yet; run `tracer fetch {name}`")
        return _converted(folder, name, "catalogue")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"the folder {name} has no config.json; pass a folder that save_pretrained wrote")
        return _Located(str(path), path, name, "folder")
    if path.is_file() and path.suffix.lower() != ".gguf":
        raise InputError(f"{name} is a file; pass the folder that holds it, or a .gguf file")
    if path.is_file():
        return _converted(convert_gguf(path, progress=progress), name, "gguf")
    raise InputError(f"no such {'file' if path.suffix.lower() == '.gguf' else 'folder'}: {name}")


def _converted(folder: Path, name: str, kind: Kind) -> _Located:
    return _Located(
        str(folder),
        folder,
        name,
        kind,
        revision=f"sha256:{read_manifest(folder)['gguf_sha256']}",
        notes=("weights of a GGUF file, converted to float32: they keep the rounding of its quantisation",),
    )


def _from_zoo(name: str) -> _Located:
    folder = shelf.zoo_folder(name)
    weights = file_sha256(folder / "model.safetensors")
    return _Located(str(folder), folder, name, "zoo", revision=f"sha256:{weights}")


def _looks_like_path(name: str) -> bool:
    return (
        name.startswith((".", "/", "~"))
        or name.endswith((".gguf", "/"))
        or name.count("/") > 1
        or (os.sep != "/" and os.sep in name)
    )


def _locate_on_hub(name: str, revision: str | None) -> _Located:
    """Asks the hub once, with a short timeout, so that an unreachable one is noticed within seconds.

    Where it cannot be reached, a snapshot of the local Hugging Face cache is as good.
    """
    otherwise = f"{name} is not a local folder, not a name of the catalogue ({suggest_names(name)})"
    try:
        url = huggingface_hub.hf_hub_url(name, "config.json", revision=revision)
        huggingface_hub.get_hf_file_metadata(url, timeout=HUB_TIMEOUT_S)
        config = huggingface_hub.hf_hub_download(name, "config.json", revision=revision)
        return _located_snapshot(Path(config), name, local_files_only=False)
    except hub_errors.HFValidationError as error:
        raise InputError(f"{otherwise}, and cannot be a Hugging Face id") from error
    except hub_errors.GatedRepoError as error:
        raise InputError(f"{name} is gated on the Hugging Face hub; accept its terms there and log in") from error
    except hub_errors.RevisionNotFoundError as error:
        raise InputError(f"{name} has no revision {revision!r} on the Hugging Face hub") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise InputError(f"{otherwise}, and the Hugging Face hub has no such model (or a private one)") from error
    except hub_errors.EntryNotFoundError as error:
        raise InputError(f"{name} has no config.json on the Hugging Face hub; pass a model of transformers") from error
    except (hub_errors.HTTPError, hub_errors.OfflineModeIsEnabled, hub_errors.FileMetadataError) as error:
        cached = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(cached, str):
            reason = f"the Hugging Face hub cannot be reached ({one_line(error)})"
            raise InputError(f"{otherwise}, and {reason}") from error
        note = "the Hugging Face hub could not be reached; opened from the local cache"
        return _located_snapshot(Path(cached), name, local_files_only=True, notes=(note,))


def _located_snapshot(config: Path, name: str, **facts: Any) -> _Located:
    """Of `.../snapshots/<commit>/config.json` in the cache of the hub."""
    return _Located(name, config.parent, name, "hub", revision=config.parent.name, **facts)


def _parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise InputError(f"unknown dtype {dtype!s}; pass one of {', '.join(DTYPES)}, or nothing to keep the stored one")


def _parse_device(device: str | torch.device | None) -> torch.device | None:
    if device is None:
        return None
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device {device!s} cannot be used here: {one_line(error)}") from error
    return place


def refuse_options_of_live_models(**options: Any) -> None:
    """Raise InputError when an option that changes a checkpoint is passed with a live model."""
    given = [name for name, value in options.items() if value not in (None, False)]
    if given:
        raise InputError(
            f"{', '.join(given)} cannot be passed with a live model, which stays as it is; change the model"
        )


def _describe_live(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> OpenedModel:
    name = model.config.name_or_path or type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"{name} is an encoder-decoder; pass a causal language model")
    dtype, notes = read_dtype(model)
    return OpenedModel(model, tokenizer, name, "live", None, dtype, (*notes, *_other_parts(model)))


def _auto_class(config: PreTrainedConfig, name: str) -> Any:
    """The class of transformers that opens the language model of a config, on its own or with a tower beside it."""
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{name} is an encoder-decoder ({config.model_type}); pass a causal language model")
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if own_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    raise InputError(
        f"{name} ({config.model_type}) is not a causal language model: transformers has no such class "
        "for it; pass a model that predicts the next token"
    )


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a config that describes the language model: all of it, unless the model also sees or hears."""
    try:
        return config.get_text_config()
    except ValueError:  # several parts could be meant
        return config


def _other_parts(model: PreTrainedModel) -> list[str]:
    """A note where a model has more than a language model, which is all that tokens run through."""
    if text_config(model.config) is model.config:
        return []
    return [f"traced on text, through the language model of {type(model).__name__}; its other parts do not run"]


def _read_tokenizer(located: _Located, options: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    """The checkpoint's own tokenizer; None where it has no vocabulary."""
    tokenizer: PreTrainedTokenizerBase | None = None
    failure: Exception | None = None
    try:
        tokenizer = AutoTokenizer.from_pretrained(located.path, **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        failure = error
    # Looked for only now, when the files of the hub have been downloaded. Where there are none, transformers fails
    # for some models and makes an empty tokenizer for others.
    if not any(True for pattern in VOCABULARY_FILES for _ in located.folder.glob(pattern)):
        return None
    if failure is not None:
        raise InputError(
            f"the tokenizer of {located.name} cannot be read ({one_line(failure)}); pass tokenizer="
        ) from failure
    return tokenizer


def read_dtype(model: nn.Module) -> tuple[str, list[str]]:
    """Name of the dtype of most parameter elements, and a note where there are others.

    `model.dtype` is not asked: it does not follow `.half()` and reports one parameter for all.
    """
    elements: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            elements[parameter.dtype] += parameter.numel()
    if not elements:
        raise InputError(f"{type(model).__name__} has no floating-point parameters")
    names = [str(dtype).removeprefix("torch.") for dtype, _ in elements.most_common()]
    return names[0], [f"parameters of several dtypes: {', '.join(names)}"] if len(names) > 1 else []
