"""GGUF files as ordinary checkpoints: dequantised once to float32 safetensors."""

import importlib.util
import io
import mmap
import os
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers

from tracer.errors import InputError
from tracer.models.cache import cached_or_built, file_sha256, one_line
from tracer.models.checkpoint import read_causal_lm, transformers_output


def convert_gguf(path: str | os.PathLike[str], *, progress: bool = True) -> Path:
    """Converts a GGUF file once into a safetensors checkpoint (float32) in the cache; returns its folder.

    The folder is found again by the SHA-256 of the file, wherever the file lies.

    Args:
        path: The file.
        progress: Show progress bars on stderr.

    Raises:
        InputError: Not a readable GGUF file, an architecture that transformers does not read, the extra
            `gguf` is not installed, or the cache cannot be written.
    """
    source = Path(path).expanduser().resolve()
    if not source.is_file():
        raise InputError(f"no such file: {path}")
    try:
        with source.open("rb") as file:
            magic = file.read(4)
        digest = file_sha256(source)
    except OSError as error:
        raise InputError(f"cannot read {path} ({one_line(error)})") from error
    if magic != b"GGUF":
        raise InputError(f"{path} is not a GGUF file: it does not start with the bytes 'GGUF'")

    def build(_: Path, folder: Path) -> dict[str, Any]:
        write_checkpoint(source, folder, what=str(path), progress=progress)
        return {"name": source.name, "source": [str(source)], "licence": None, "gguf_sha256": digest}

    return cached_or_built(f"gguf-{digest[:32]}", build)


def write_checkpoint(gguf: Path, folder: Path, *, what: str, progress: bool) -> None:
    """Writes the model and, where the file holds one, the tokenizer of a GGUF file to a folder.

    Args:
        gguf: The file.
        folder: An empty folder.
        what: The file, for messages.
        progress: Show progress bars on stderr.

    Raises:
        InputError: The file cannot be read, or the extra `gguf` is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f'reading {what} needs the package gguf: pip install "layertracer[gguf]"')
    options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    dequantised: dict[str, Any] = {"dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # releases without it dequantise everything anyway
        dequantised["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # The bar of the dequantisation does not know of transformers' switch for bars.
    silence = nullcontext() if progress else redirect_stderr(io.StringIO())
    with transformers_output(progress), silence:
        try:
            model, _ = read_causal_lm(gguf.parent, what, **options, **dequantised)
            tokenizer = (
                transformers.AutoTokenizer.from_pretrained(gguf.parent, **options) if _has_tokenizer(gguf) else None
            )
        except InputError:
            raise
        except Exception as error:
            # The parsers meet arbitrary bytes here and fail in any way (struct.error, KeyError, MemoryError, ...).
            raise InputError(
                f"{what} cannot be read as a GGUF file of a causal language model ({one_line(error)}); pass "
                "a whole GGUF file of an architecture that transformers reads, or a folder with safetensors"
            ) from error
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def _has_tokenizer(gguf: Path) -> bool:
    """Looks for the key of the metadata as bytes: the parser of gguf takes seconds for a vocabulary."""
    with gguf.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b"tokenizer.ggml.model") >= 0
