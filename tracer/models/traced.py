"""`load`: a causal language model, opened at its residual stream and proven to be traceable."""

import gc
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tracer.errors import InputError, ModelRefused, TracerError, one_of
from tracer.models.anatomy import Anatomy
from tracer.models.cache import one_line
from tracer.models.checkpoint import transformers_output
from tracer.models.fingerprint import weights_digest
from tracer.models.loading import OpenedModel, open_model, read_dtype, refuse_options_of_live_models, text_config
from tracer.models.parts import Parts, parts_of
from tracer.models.plain import Adapter, evaluating, forward_logits
from tracer.models.selfcheck import Engine, SelfCheck, open_plain, token_count
from tracer.models.tokens import TokenBatch
from tracer.models.transformer_lens import (
    booted_bridge,
    bridge_weights,
    bridged_model,
    is_transformer_lens,
    transformer_lens_logits,
    why_no_bridge,
)

TRANSFORMER_LENS = "transformer_lens"
BACKENDS = ("auto", "hooks", TRANSFORMER_LENS)


@dataclass(frozen=True)
class TracedModel:
    """An opened model; all tracing goes through `adapter`. A live Hugging Face model is not changed by it.

    Attributes:
        opened: the model, its tokenizer, and where they come from.
        adapter: runs the model block by block.
        self_check: the checks that it passed and the engine that they allow.
        backend: how its streams are reached.
        before_bridge: the parts of the Hugging Face model around which a bridge was booted.
    """

    opened: OpenedModel
    adapter: Adapter
    self_check: SelfCheck
    backend: str
    before_bridge: Parts | None = None

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
    def blocks(self) -> tuple[nn.Module, ...]:
        """The block modules by depth; where a block lies between modules, the first of them."""
        return tuple(self.adapter.modules[call.module] for call in self.anatomy.calls)

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
        model = self._hugging_face
        return self.model.cfg.d_vocab if model is None else token_count(model)

    @property
    def positions(self) -> int | None:
        """Number of positions that the model is made for; None where it says nothing."""
        model = self._hugging_face
        if model is None:
            return self.model.cfg.n_ctx
        found = getattr(text_config(model.config), "max_position_embeddings", None)
        return found if isinstance(found, int) else None

    @property
    def _hugging_face(self) -> Any:
        """The Hugging Face model that runs, on its own or under a bridge; None for a hooked transformer."""
        return bridged_model(self.model) if self.backend == TRANSFORMER_LENS else self.model

    def fingerprint(self) -> str:
        """A hash of the configuration and of every weight; equal for equal models, with a bridge around them or not.

        Weights count by exact sums over their bits, row by row, and by scattered samples, which costs one pass over the
        memory. Tensors that are offloaded count by name and shape only. Where a bridge computes with copies of fused
        projections (GPT-NeoX, BLOOM), these count too, so that its fingerprint is one of its own.
        """
        config = {k: v for k, v in self._made_with.items() if not k.startswith(("_", "transformers"))}
        return weights_digest(config, self._weights.items())

    def tail_fingerprint(self) -> str:
        """A hash of what turns the last residual into logits; equal where streams are unembedded alike.

        It covers the weights of the tail's modules and of the unembedding, the numbers of the configuration that scale,
        cap or norm, and the class, blocks, width and vocabulary of the model. The blocks' weights do not count, so that
        a checkpoint whose tail has stayed the same is not another model. As in `fingerprint`, a bridge makes no
        difference, and the data type of the weights does.
        """
        anatomy, model = self.anatomy, self._hugging_face
        parts = [name for name in (*anatomy.tail, anatomy.head) if name is not None]
        own = [tensor for name in parts for tensor in self.adapter.modules[name].state_dict().values()]
        # A bridge has other names for the parts; the memory is the same. Offloaded tensors have none.
        places = {tensor.data_ptr() for tensor in own} - {0}
        inside = tuple(f"{name}." for name in parts)
        weights = [
            (name, tensor)
            for name, tensor in self._weights.items()
            if tensor.data_ptr() in places or name.startswith(inside)
        ]
        config = self._made_with if model is None else model.config.get_text_config().to_dict()
        numbers = {
            key: value
            for key, value in config.items()
            if isinstance(value, int | float) and re.search("norm|logit|cap|scal|multiplier", key)
        }
        shape = (type(model or self.model).__name__, self.n_blocks, anatomy.stream_shape, anatomy.vocab)
        return weights_digest([shape, numbers], weights)

    @property
    def _made_with(self) -> dict[str, Any]:
        model = self._hugging_face
        return vars(self.model.cfg) if model is None else model.config.to_dict()

    @property
    def _weights(self) -> dict[str, Tensor]:
        """The weights, by the names that they have without a bridge."""
        bridged = self._hugging_face not in (None, self.model)
        return bridge_weights(self.model) if bridged else self.model.state_dict()

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
            "parts": None if self.parts is None else self.parts.as_dict(),
        }

    @cached_property
    def parts(self) -> Parts | None:
        """Which parameters belong to which block, to the embeddings, the final norm and the head.

        Asking for it the first time runs the model on its probe. None where blocks have no parameters of their own,
        and for a model of TransformerLens, whose parameters have other names than those of the model that is trained.
        """
        if self.backend == TRANSFORMER_LENS:
            return self.before_bridge
        with suppress(InputError):
            return parts_of(self.model, self.adapter)
        return None

    def __str__(self) -> str:
        notes = "".join(f"\nnote           {note}" for note in self.opened.notes)
        head = f"model          {self.name} ({self.opened.kind}, {self.opened.dtype}, on {self.device})"
        return f"{head}\nbackend        {self.backend}\n{self.anatomy}{notes}\n\n{self.self_check}"


def load(
    source: object,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    backend: str = "auto",
    blocks: Sequence[str] | None = None,
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
        source: a name of the catalogue or of the zoo (`zoo/mamba2-8`), a local folder, a GGUF file, a live Hugging Face
            model, a live `TransformerBridge` or `HookedTransformer` of TransformerLens, or a Hugging Face id. A model
            that also sees or hears is traced on text, through its language model.
        tokenizer: of a live model, or in place of the checkpoint's own. A model without one is traced on probes that
            are token ids.
        backend: how to reach the residual stream; the numbers are the same up to rounding. `hooks`: the model's own
            block calls. `transformer_lens`: those of a `TransformerBridge`, which is booted around the model and takes
            it over, so that its hook points are at hand. `auto`: a model of TransformerLens as it is; a live Hugging
            Face model by `hooks`; one that is opened by name, folder or file as a bridge, where TransformerLens lists
            its class and the bridge gives the model's own outputs, passes the self-check and needs no slower engine,
            else by `hooks`. Dispatched or quantised weights, model code of the checkpoint's own, and the models of the
            zoo, which are to open at once, stay with `hooks`.
            A note says which was used and why.
        blocks: names of the modules that are the blocks, for a model in which they are not found; by `hooks` only.
        dtype: `float32`, `bfloat16`, `float16` or a torch dtype; None keeps what the checkpoint stores, and is
            `float32` for a model of the zoo.
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
    if blocks is not None and (backend == TRANSFORMER_LENS or is_transformer_lens(source)):
        raise InputError("blocks= names modules for plain hooks; a model of TransformerLens has its own blocks")
    if is_transformer_lens(source):
        refuse_options_of_live_models(**options)
        if backend == "hooks":
            raise InputError("a model of TransformerLens is read through its own blocks: pass backend='auto'")
        return _by_transformer_lens(
            _described(source, tokenizer), source, all_checks, f"opened as {type(source).__name__}"
        )
    read = partial(open_model, source, tokenizer, progress=progress, **options)
    opened = read()
    _refuse_without_text(opened.model)
    if backend == TRANSFORMER_LENS:
        if opened.kind == "live":
            raise InputError(
                "a bridge takes a live model over: boot it yourself and pass the bridge, or backend='hooks'"
            )
        try:
            with transformers_output(progress):
                return _booted(opened, all_checks)[0]
        except (InputError, ModelRefused) as error:
            raise type(error)(f"{error}; pass backend='hooks'") from error
    reason = None
    if backend == "auto":
        reason = _why_by_hooks(opened, device_map, trust_remote_code, blocks) or why_no_bridge(opened.model)
        if reason is None:
            with transformers_output(progress):
                outcome = _bridged(opened, all_checks)
            if isinstance(outcome, TracedModel):
                return outcome
            # What the bridge has taken over goes first, so that two copies are never in memory.
            reason = outcome
            del opened
            gc.collect()
            opened = read()
    with transformers_output(progress):  # also silences its remarks on kernels that are not installed
        return _by_hooks(opened, blocks, all_checks, reason)


def _refuse_without_text(model: Any) -> None:
    """Refuse a model with other parts beside its language model that does not run on tokens alone."""
    if text_config(model.config) is model.config:
        return
    size = token_count(model)
    try:
        with evaluating(model):
            forward_logits(model, TokenBatch.from_rows([[size - 2, size - 1]]))
    except Exception as error:  # whatever it wants beside tokens
        if isinstance(error, TracerError):
            raise
        raise ModelRefused(
            f"{type(model).__name__} cannot be run on text alone ({type(error).__name__}: {one_line(error)}): pass a "
            "model whose language model needs no image or sound"
        ) from error


def _why_by_hooks(
    opened: OpenedModel, device_map: Any, trust_remote_code: bool, blocks: Sequence[str] | None
) -> str | None:
    """Why no bridge shall take a model over; None where one may."""
    if opened.kind == "live":
        return "a live model is left as it is"
    if opened.kind == "zoo":
        return "a bridge takes longer to boot than a model of the zoo to trace"
    if blocks is not None:
        return "its blocks are named"
    if trust_remote_code:
        return "it may run model code of its own"
    if getattr(opened.model, "hf_quantizer", None) is not None:
        return "its weights are quantised"
    if device_map is not None or any(hasattr(module, "_hf_hook") for module in opened.model.modules()):
        return "its weights are dispatched over devices"
    return None


def _bridged(opened: OpenedModel, all_checks: bool) -> TracedModel | str:
    """The model with a bridge around it, or why none can be used; the model may be taken over in either case."""
    try:
        bridged, without = _booted(opened, all_checks)
    except Exception as error:  # whatever fails in a bridge, plain hooks remain
        return one_line(error)
    if (bridged.engine, without) == ("full", "onepass"):
        return f"a TransformerBridge allows the slower engine 'full' only ({bridged.self_check.reason})"
    return bridged


def _booted(opened: OpenedModel, all_checks: bool) -> tuple[TracedModel, Engine | None]:
    """The model with a bridge booted around it, and the engine that it allows without one, if it can be traced so."""
    eager = getattr(opened.model.config, "_attn_implementation", "eager") == "eager"
    note = "booted as TransformerBridge" + ("" if eager else ": attention runs in its eager form")
    anatomy = engine = parts = None
    with suppress(ModelRefused):  # perhaps the bridge has what the model itself lacks
        plain, check = open_plain(opened.model)
        anatomy, engine, parts = plain.anatomy, check.engine, parts_of(opened.model, plain)
    bridge = booted_bridge(opened.model, opened.name)
    bridged = _by_transformer_lens(opened, bridge, all_checks, note, anatomy)
    return replace(bridged, before_bridge=parts), engine


def _by_hooks(opened: OpenedModel, blocks: Sequence[str] | None, all_checks: bool, reason: str | None) -> TracedModel:
    if reason is not None:
        opened = replace(opened, notes=(*opened.notes, f"{reason}: opened by plain hooks"))
    adapter, check = open_plain(opened.model, blocks=blocks, all_depths=all_checks)
    return TracedModel(opened, adapter, check, "hooks")


def _described(model: Any, tokenizer: PreTrainedTokenizerBase | None) -> OpenedModel:
    """A live model of TransformerLens."""
    dtype, notes = read_dtype(model)
    tokenizer = tokenizer or getattr(model, "tokenizer", None)
    return OpenedModel(model, tokenizer, model.cfg.model_name, "live", None, dtype, tuple(notes))


def _by_transformer_lens(
    opened: OpenedModel, model: Any, all_checks: bool, note: str, plain: Anatomy | None = None
) -> TracedModel:
    """A model of TransformerLens, live or booted around the opened one.

    Args:
        opened: where it comes from.
        model: the bridge or hooked transformer.
        all_checks: resume from every depth instead of three.
        note: what a reader of results should know about it.
        plain: anatomy of the model without the bridge, whose own names say what its parts are.
    """
    adapter, check = open_plain(
        model, partial(transformer_lens_logits, model), embeddings=model.cfg.d_vocab, all_depths=all_checks
    )
    if plain is not None:
        adapter.anatomy = _labelled(adapter.anatomy, plain)
    return TracedModel(replace(opened, model=model, notes=(*opened.notes, note)), adapter, check, TRANSFORMER_LENS)


def _labelled(anatomy: Anatomy, plain: Anatomy) -> Anatomy:
    """The anatomy of a bridge with the names that the model under it gives to its parts."""
    if plain.n_blocks != anatomy.n_blocks:
        return anatomy
    calls = (replace(call, mixer=own.mixer) for call, own in zip(anatomy.calls, plain.calls, strict=True))
    model_class = f"{anatomy.model_class} of {plain.model_class}"
    return replace(anatomy, calls=tuple(calls), model_class=model_class, tied=plain.tied)


def check_same_architecture(model: TracedModel, other: TracedModel) -> None:
    """Refuse two models that are not checkpoints of one architecture.

    Raises:
        InputError: names the first difference: class, number of blocks, width, vocabulary, or a weight of a block.
    """
    facts = (
        ("class", lambda m: m.anatomy.model_class),
        ("number of blocks", lambda m: m.n_blocks),
        ("width", lambda m: m.anatomy.d_model),
        ("vocabulary", lambda m: m.anatomy.vocab),
    )
    for what, of in facts:
        if of(model) != of(other):
            raise InputError(
                f"{model.name} and {other.name} differ in their {what} ({of(model)}, {of(other)}): pass two "
                "checkpoints of one architecture"
            )
    for number, (own, others) in enumerate(zip(model.blocks, other.blocks, strict=True)):
        shapes, wanted = ({name: tuple(p.shape) for name, p in block.named_parameters()} for block in (others, own))
        if shapes != wanted:
            name = min(name for name in wanted.keys() | shapes.keys() if wanted.get(name) != shapes.get(name))
            raise InputError(
                f"block {number} of {model.name} and of {other.name} differ in {name} ({wanted.get(name)}, "
                f"{shapes.get(name)}): pass two checkpoints of one architecture"
            )
