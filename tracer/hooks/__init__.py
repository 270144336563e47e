"""Hooks to import: read, replace, ablate and resume the residual stream of a model while you run it yourself.

Context managers for any causal language model of Hugging Face, a `tracer.TracedModel`, or any module with chained
blocks (`blocks`). Inside them you call `model(...)`, `model.generate(...)` or an inner module as always, with or
without a cache, with or without gradients. `resid[0]`, the stream at depth 0, is the input of block 0, and `resid[d]`
the output of block d - 1, up to depth L.

They nest: at one depth they act in the order in which they were entered, the outermost first. They leave no hook
behind, also after an exception, and touch none of your own, which see what flows through the model: streams are taken
and edited before your pre-hooks, outputs before your forward hooks, and depth L is read after all of these. On leaving,
something that was asked for and did not fire is an error. Compiled models, gradient checkpointing, and a `TracedModel`
whose blocks are no modules (`FIRST:LAST`) are refused; models that accelerate has offloaded or dispatched work as they
are.

The first use on a Hugging Face model runs it about six times on a 3 x 11-token probe, to find its blocks and to prove
that they are what they seem; your own hooks fire in these runs too. Pass a `TracedModel` to do this beforehand.

Positions: None for all; otherwise ints, columns of the tokens as they are given. Negative ones count from the last real
token of each row when the forward gets a 2-D `attention_mask`, else from the last column. With a cache, positions are
those of the whole sequence, as if there were no cache, and negative ones are fixed by the forward of the prompt: later
steps are touched only where positions >= 0 say so, or by None.

Example:
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from tracer import hooks
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
    ...                      num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    >>> model, ids = LlamaForCausalLM(config).eval(), torch.tensor([[1, 7, 8, 9]])
    >>> with hooks.ablate(model, block=1), hooks.read(model, depths=[1, 2]) as resid:
    ...     output = model(ids)
    >>> torch.equal(resid.streams[1], resid.streams[2])  # block 1 adds nothing
    True
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor, nn

from tracer.errors import InputError, one_of
from tracer.hooks.active import acting, opened
from tracer.hooks.chain import Blocks
from tracer.hooks.example import blocks_of_example
from tracer.hooks.operations import Ablate, Edit, Read, integers, numbers, resuming

__all__ = ["Blocks", "Reading", "ablate", "add", "blocks", "read", "replace", "resume"]

Target = Any
"""A `tracer.TracedModel`, a causal language model of Hugging Face, or a `Blocks`."""


@dataclass(frozen=True)
class Reading:
    """What `read` has read so far.

    Attributes:
        all: per depth one `[batch, n_positions, d_model]` tensor for each forward that reached an asked position (a
            step of generation is a forward), in order.
    """

    all: dict[int, list[Tensor]]

    @property
    def streams(self) -> dict[int, Tensor]:
        """Per depth the stream of the last forward, `[batch, n_positions, d_model]`; depths not yet read are absent."""
        return {depth: tensors[-1] for depth, tensors in self.all.items() if tensors}


def blocks(
    module: nn.Module, *example_args: Any, batch_dim: int = 0, position_dim: int = 1, **example_kwargs: Any
) -> Blocks:
    """Find the chained blocks of any module by running it on an example; the result is a target for the others.

    The module runs at most six times, in eval mode and without gradients. Its blocks are the modules of one container
    whose calls hand a float tensor from one to the next; a block that is called n times counts n times, in order.

    Args:
        module: what you will run.
        *example_args: example inputs.
        batch_dim: batch dimension of the stream between the blocks.
        position_dim: its position dimension; `batch_dim=1, position_dim=0` for a `nn.TransformerEncoder` as it is by
            default.
        **example_kwargs: more of them.

    Raises:
        InputError: no chain of blocks was called, or the module is compiled.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tracer import hooks
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> encoder, x = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval(), torch.randn(2, 5, 16)
        >>> chain = hooks.blocks(encoder, x)
        >>> print(chain)
        3 blocks of TransformerEncoder: layers.0, layers.1, layers.2
        >>> with torch.no_grad(), hooks.ablate(chain, block=[0, 1, 2]):
        ...     print(torch.equal(encoder(x), x))
        True
    """
    return blocks_of_example(module, example_args, example_kwargs, batch_dim, position_dim)


@contextmanager
def read(
    target: Target,
    depths: int | Iterable[int] | None = None,
    positions: int | Iterable[int] | None = None,
    *,
    detach: bool = True,
) -> Iterator[Reading]:
    """Read the residual stream at some depths and positions in every forward inside.

    Nothing is changed: outputs are the same, bit by bit. What was read is a copy, which no later edit in place changes.

    Args:
        target: the model.
        depths: from 0 (input of block 0) to L (output of the last block); None for all L + 1.
        positions: see the top of the module; None for all.
        detach: False keeps the gradients: the copy takes the stream's place in the model, so that both a loss on it and
            `torch.autograd.grad(output, reading.streams[d])` work, also where no parameter needs a gradient.

    Yields:
        A `Reading`; `reading.streams[d]` is `[batch, n_positions, d_model]`, with positions in the order given. In a
        forward that has only some of them (with a cache), these only.

    Raises:
        InputError: no such depth, or positions that cannot be told.
        HookError: on leaving, when a depth or position was never reached.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from tracer import hooks
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        ...                      num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        >>> model, ids = LlamaForCausalLM(config).eval(), torch.tensor([[1, 7, 8, 9]])
        >>> with hooks.read(model, depths=[0, 3], positions=-1, detach=False) as reading:
        ...     best = model(ids).logits[0, -1].max()
        >>> torch.autograd.grad(best, reading.streams[3])[0].shape  # [batch, n_positions, d_model]
        torch.Size([1, 1, 16])
    """
    found = opened(target)
    chosen = list(range(found.n_blocks + 1)) if depths is None else numbers("depths", depths, found.n_blocks)
    operation = Read(found, chosen, _positions(found, positions), detach)
    with acting(operation):
        yield Reading(operation.tensors)


@contextmanager
def ablate(
    target: Target,
    block: int | Iterable[int],
    part: Literal["block", "mixer", "mlp"] = "block",
    *,
    contribution: Float[Tensor, "..."] | None = None,
    positions: int | Iterable[int] | None = None,
) -> Iterator[None]:
    """Replace what blocks, or their mixers or MLPs, add to the residual stream in every forward inside.

    A block adds `c_b = resid[b + 1] - resid[b]`. It still runs, so that a cache stays whole and generation under an
    ablation equals whole forwards under it; only what it adds is replaced. Where c_b is zero at all positions, the
    block hands on all that it received, the stream and what some models carry beside it.

    Args:
        target: the model.
        block: one 0-based block or several.
        part: `block`, or the sub-layer: `mixer` (attention, Mamba, ...) or `mlp`, where the block is their exact sum.
        contribution: what is added instead, `[d_model]` or `[batch, n_positions, d_model]`; None for zero.
        positions: see the top of the module; None for all.

    Raises:
        InputError: no such block or part; the block is not the exact sum of its parts (with the measured gap); a
            contribution of another shape.
        HookError: on leaving, when something never fired; at once, when a sub-layer is bypassed (a fused kernel that
            reads its weights).

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from tracer import hooks
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        ...                      num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        >>> model, ids = LlamaForCausalLM(config).eval(), torch.tensor([[1, 7, 8, 9]])
        >>> with hooks.ablate(model, block=[0, 2], part="mlp"):
        ...     tokens = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
        >>> tokens.shape
        torch.Size([1, 9])
    """
    one_of("part", part, ("block", "mixer", "mlp"))
    found = opened(target)
    chosen = numbers("block", block, found.n_blocks - 1)
    role = None if part == "block" else part
    with acting(Ablate(found, chosen, role, contribution, _positions(found, positions))):
        yield


@contextmanager
def replace(
    target: Target, depth: int, value: Float[Tensor, "..."], positions: int | Iterable[int] | None = None
) -> Iterator[None]:
    """Replace the residual stream at a depth, in every forward inside.

    Args:
        target: the model.
        depth: from 0 to L.
        value: `[d_model]`, the same everywhere, or `[batch, n_positions, d_model]`; moved to the stream's device and
            dtype. Gradients flow into it.
        positions: see the top of the module; None for all.

    Raises:
        InputError: no such depth; a value of another shape, which is never broadcast; positions that cannot be told.
        HookError: on leaving, when the depth or a position was never reached.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from tracer import hooks
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        ...                      num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        >>> model, ids = LlamaForCausalLM(config).eval(), torch.tensor([[1, 7, 8, 9], [1, 5, 8, 9]])
        >>> with hooks.read(model, depths=2, positions=-1) as clean:  # patch row 0 into row 1
        ...     output = model(ids[:1])
        >>> with hooks.replace(model, 2, clean.streams[2], positions=-1):
        ...     patched = model(ids[1:])
    """
    found = opened(target)
    [depth] = numbers("depth", [depth], found.n_blocks)
    with acting(Edit("replace", found, depth, value, _positions(found, positions), add=False)):
        yield


@contextmanager
def add(
    target: Target, depth: int, value: Float[Tensor, "..."], positions: int | Iterable[int] | None = None
) -> Iterator[None]:
    """Add to the residual stream at a depth, in every forward inside; arguments and errors are those of `replace`.

    Args:
        target: the model.
        depth: from 0 to L.
        value: `[d_model]` or `[batch, n_positions, d_model]`.
        positions: see the top of the module; None for all.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from tracer import hooks
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        ...                      num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        >>> model, ids = LlamaForCausalLM(config).eval(), torch.tensor([[1, 7, 8, 9]])
        >>> steering = torch.randn(16)
        >>> with hooks.add(model, 1, steering), hooks.read(model, depths=1) as after:  # after it: entered later
        ...     tokens = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        >>> len(after.all[1])  # the prompt and two steps
        3
    """
    found = opened(target)
    [depth] = numbers("depth", [depth], found.n_blocks)
    with acting(Edit("add", found, depth, value, _positions(found, positions), add=True)):
        yield


@contextmanager
def resume(target: Target, depth: int, stream: Float[Tensor, "..."]) -> Iterator[None]:
    """Let every forward inside start from a residual stream: what runs before `depth` does not matter.

    Where the self-check has shown that blocks need nothing but the stream before them, the blocks before `depth` are
    not run and cost nothing; other models (shared keys and values, states beside the stream) run them and discard the
    result, at the price of a whole forward. A read or ablation of a block that is not run did not fire. Forwards run
    without a cache: `use_cache=False` is passed where it is accepted, and asking for one is refused, since the blocks
    that are not run would leave holes in it.

    Args:
        target: the model.
        depth: from 0 to L.
        stream: `resid[depth]`, `[batch, pos, d_model]`, for all tokens of the forward.

    Raises:
        InputError: no such depth; a stream of another shape; a cache is asked for; inside another `resume`.
        HookError: on leaving, when no forward ran.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from tracer import hooks
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        ...                      num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        >>> model, ids = LlamaForCausalLM(config).eval(), torch.tensor([[1, 7, 8, 9]])
        >>> with torch.no_grad(), hooks.read(model, depths=2) as reading:
        ...     logits = model(ids).logits
        >>> with torch.no_grad(), hooks.resume(model, 2, reading.streams[2]):  # runs block 2 alone
        ...     print(torch.equal(model(ids).logits, logits))
        True
    """
    found = opened(target)
    [depth] = numbers("depth", [depth], found.n_blocks)
    with resuming(found, depth, stream):
        yield


def _positions(found: Blocks, positions: int | Iterable[int] | None) -> Sequence[int] | None:
    if positions is None:
        return None
    if found.anatomy.position_dim is None:
        raise InputError(
            f"the positions of the residual stream of {found.anatomy.model_class} are not tokens: pass positions=None"
        )
    return integers("positions", positions)
