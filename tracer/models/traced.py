"""`load`: a causal language model, opened at its residual stream and proven to be traceable."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tracer.errors import one_of
from tracer.models.anatomy import Anatomy
from tracer.models.loading import OpenedModel, open_model
from tracer.models.plain import Adapter
from tracer.models.selfcheck import Engine, SelfCheck, open_plain

BACKENDS = ("auto", "hooks")

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
    def model(self) -> PreTrainedModel:
        """The Hugging Face model."""
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

    def fingerprint(self) -> str:
        """A hash of the configuration and of every weight; equal for equal models.

        Weights count by exact sums over their bits, row by row, and by scattered samples, which costs one pass over the
        memory. Tensors that are offloaded count by name and shape only.
        """
        digest = hashlib.sha256()
        config = {k: v for k, v in self.model.config.to_dict().items() if not k.startswith(("_", "transformers"))}
        digest.update(json.dumps(config, sort_keys=True, default=str).encode())
        for name, tensor in self.model.state_dict().items():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            if tensor.device.type == "meta" or not tensor.numel() or tensor.dtype.is_complex:
                continue
            bits = tensor.detach().contiguous().view(_BITS.get(tensor.element_size(), torch.uint8))
            flat = bits.reshape(-1)
            places = torch.arange(64, device=flat.device) * 7_919_999 % flat.numel()
            rows = bits.reshape(len(bits), -1) if bits.dim() > 1 else bits[None]
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
        source: a catalogue name, a local folder, a GGUF file, a live Hugging Face model, or a Hugging Face id.
        tokenizer: only with a live model.
        backend: how to reach the residual stream: `hooks`, or `auto`.
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
    opened = open_model(
        source,
        tokenizer,
        dtype=dtype,
        device=device,
        device_map=device_map,
        revision=revision,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    adapter, check = open_plain(opened.model, all_depths=all_checks)
    return TracedModel(opened, adapter, check, "hooks")
