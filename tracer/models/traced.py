"""`load`: a causal language model, opened at its residual stream and proven to be traceable."""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tracer.errors import InputError, one_of
from tracer.models.anatomy import Anatomy
from tracer.models.loading import OpenedModel, open_model, read_dtype, refuse_options_of_live_models
from tracer.models.plain import Adapter
from tracer.models.selfcheck import Engine, SelfCheck, open_plain, token_count
from tracer.models.transformer_lens import (
    booted_bridge,
    is_transformer_lens,
    transformer_lens_config,
    transformer_lens_logits,
)

TRANSFORMER_LENS = "transformer_lens"
BACKENDS = ("auto", "hooks", TRANSFORMER_LENS)

# Integers of the size of a weight, whose sums do not depend on the order of summation.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TracedModel:
    """An opened model. Nothing about the model itself is changed; all tracing goes through `adapter`.

    Attributes:
        opened: the model, its tokenizer, and where they come from.
        adapter: runs the model block by block.
        self_check: the checks that it passed and the engine that they allow.
        backend: how its streams are reached.
    """

    opened: OpenedModel
    adapter: Adapter
    self_check: SelfCheck
    backend: str

    @property
    def model(self) -> Any:
        """The model itself: a Hugging Face model, or a bridge or hooked transformer of TransformerLens."""
        return self.opened.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Its tokenizer, if it has one."""
        return self.opened.tokenizer

    @property
    def name(self) -> str:
        """What the model is called in outputs."""
        return self.opened.name

    @property
    def anatomy(self) -> Anatomy:
        """How the residual stream runs through it."""
        return self.adapter.anatomy

    @property
    def n_blocks(self) -> int:
        """Number of blocks, L."""
        return self.anatomy.n_blocks

    @property
    def engine(self) -> Engine:
        """The engine that the self-check allows."""
        return self.self_check.engine

    @property
    def device(self) -> str:
        """Where the weights are; several names when the model is dispatched over devices."""
        return ", ".join(sorted({str(parameter.device) for parameter in self.model.parameters()}))

    @property
    def embeddings(self) -> int:
        """Number of tokens that the model has embeddings for."""
        return self.model.cfg.d_vocab if self.backend == TRANSFORMER_LENS else token_count(self.model)

    @property
    def positions(self) -> int | None:
        """Number of positions that the model is made for; None where it says nothing."""
        if self.backend == TRANSFORMER_LENS:
            return self.model.cfg.n_ctx
        found = getattr(self.model.config, "max_position_embeddings", None)
        return found if isinstance(found, int) else None

    def fingerprint(self) -> str:
        """A hash of the configuration and of every weight; equal for equal models.

        Weights count by exact sums over their bits, row by row, and by scattered samples, which costs one pass over the
        memory. Tensors that are offloaded count by name and shape only.
        """
        digest = hashlib.sha256()
        made_with = (
            transformer_lens_config(self.model) if self.backend == TRANSFORMER_LENS else self.model.config.to_dict()
        )
        config = {k: v for k, v in made_with.items() if not k.startswith(("_", "transformers"))}
        digest.update(json.dumps(config, sort_keys=True, default=str).encode())
        for name, tensor in self.model.state_dict().items():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            if tensor.device.type == "meta" or not tensor.numel() or tensor.dtype.is_complex:
                continue
            bits = tensor.detach().contiguous().view(_BITS.get(tensor.element_size(), torch.uint8))
            flat = bits.reshape(-1)
            places = torch.arange(64, device=flat.device) * 7_919_999 % flat.numel()
            rows = bits.reshape(len(bits) if bits.dim() > 1 else 1, -1)
            for part in (flat[places].long(), rows.sum(1, dtype=torch.int64)):
                digest.update(part.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """Plain data for `run.json`; without the fingerprint, which costs a pass over the weights."""
        return {
            "name": self.name,
            "kind": self.opened.kind,
            "revision": self.opened.revision,
            "dtype": self.opened.dtype,
            "device": self.device,
            "backend": self.backend,
            "notes": list(self.opened.notes),
            "anatomy": self.anatomy.as_dict(),
            "self_check": self.self_check.as_dict(),
        }

    def __str__(self) -> str:
        notes = "".join(f"\nnote           {note}" for note in self.opened.notes)
        head = f"model          {self.name} ({self.opened.kind}, {self.opened.dtype}, on {self.device})"
        return f"{head}\nbackend        {self.backend}\n{self.anatomy}{notes}\n\n{self.self_check}"


def load(
    source: object,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    backend: str = "auto",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    all_checks: bool = False,
    progress: bool = True,
) -> TracedModel:
    """Open a model and check that it can be traced exactly.

    Args:
        source: a catalogue name, a local folder, a GGUF file, a live Hugging Face model, a live `TransformerBridge` or
            `HookedTransformer` of TransformerLens, or a Hugging Face id.
        tokenizer: only with a live model.
        backend: how to reach the residual stream. `hooks`: the model's own block calls. `transformer_lens`: those of a
            `TransformerBridge`, which is booted around the model and takes it over. `auto`: a model of TransformerLens
            as it is, any other one by `hooks`.
        dtype: `float32`, `bfloat16`, `float16` or a torch dtype; None keeps what the checkpoint stores.
        device: e.g. `cpu` or `cuda`.
        device_map: as in transformers, e.g. `auto`; not together with `device`.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run model code that comes with the checkpoint.
        all_checks: resume from every depth instead of three.
        progress: show progress bars.

    Raises:
        InputError: nothing can be opened with these arguments.
        ModelRefused: a check failed; names it, with the measured gap.

    Example:
        >>> import tracer
        >>> model = tracer.load("smollm2-135m-instruct-q4_1", dtype="float32")  # doctest: +SKIP
        >>> print(model.anatomy)  # doctest: +SKIP
    """
    one_of("backend", backend, BACKENDS)
    options = {
        "dtype": dtype,
        "device": device,
        "device_map": device_map,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
    }
    if is_transformer_lens(source):
        refuse_options_of_live_models(**options)
        return _opened_transformer_lens(source, tokenizer, backend, all_checks)
    opened = open_model(source, tokenizer, progress=progress, **options)
    if backend == TRANSFORMER_LENS:
        if opened.kind == "live":
            raise InputError(
                "a bridge takes a live model over: boot it yourself and pass the bridge, or backend='hooks'"
            )
        bridge = booted_bridge(opened.model, opened.name)
        return _opened_transformer_lens(bridge, opened.tokenizer, backend, all_checks, opened)
    adapter, check = open_plain(opened.model, all_depths=all_checks)
    return TracedModel(opened, adapter, check, "hooks")


def _opened_transformer_lens(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    backend: str,
    all_checks: bool,
    opened: OpenedModel | None = None,
) -> TracedModel:
    if backend == "hooks":
        raise InputError("a model of TransformerLens is read through its own blocks: pass backend='auto'")
    dtype, notes = read_dtype(model)
    if opened is None:
        tokenizer = tokenizer or getattr(model, "tokenizer", None)
        opened = OpenedModel(model, tokenizer, model.cfg.model_name, "live", None, dtype, tuple(notes))
    opened = replace(opened, model=model, notes=(*opened.notes, f"opened as {type(model).__name__}"))
    adapter, check = open_plain(
        model, partial(transformer_lens_logits, model), embeddings=model.cfg.d_vocab, all_depths=all_checks
    )
    return TracedModel(opened, adapter, check, TRANSFORMER_LENS)
