"""The blocks of any module, found by running it once on its owner's example."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tracer.errors import InputError, ModelRefused
from tracer.hooks.active import acting, paused
from tracer.hooks.chain import Blocks, Known, refuse_compiled
from tracer.hooks.operations import Edit, Read, resuming
from tracer.models.anatomy import Anatomy, BlockCall
from tracer.models.locating import block_calls, carried_paths, recorded_calls, residual_paths
from tracer.models.mixers import mixer_kind
from tracer.models.nested import get, leaves
from tracer.models.plain import PlainAdapter, evaluating
from tracer.models.tokens import TokenBatch


def blocks_of_example(
    root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_dim: int, position_dim: int
) -> Blocks:
    """Find the blocks of a module; see `tracer.hooks.blocks`."""
    refuse_compiled(root)
    modules = {name: module for name, module in root.named_modules() if name}
    with paused(root), evaluating(root):
        with recorded_calls(modules) as calls:
            root(*args, **kwargs)
        try:
            chain, pairs = block_calls(root, calls)
        except ModelRefused as error:
            raise InputError(f"no blocks in {type(root).__name__}: {error}") from error
        output_path, input_path = residual_paths(pairs)
        stream = get(chain[0].arguments, input_path)
        if batch_dim == position_dim or not all(0 <= dim < stream.dim() - 1 for dim in (batch_dim, position_dim)):
            raise InputError(
                f"batch_dim={batch_dim}, position_dim={position_dim}: the residual stream of {type(root).__name__} has "
                f"shape {list(stream.shape)} for this example, the last dimension being its width"
            )
        anatomy = Anatomy(
            model_class=type(root).__name__,
            calls=tuple(
                BlockCall(i, call.name, mixer_kind(call.module) or type(call.module).__name__, {})
                for i, call in enumerate(chain)
            ),
            input_path=input_path,
            output_path=output_path,
            carried=carried_paths(chain, output_path, input_path),
            batch_dim=batch_dim,
            position_dim=position_dim,
            stream_shape=tuple(stream.shape),
            shared_state=tuple(dict.fromkeys(name for call in chain for name in call.written)),
            tail=(),
            head=None,
            tied=False,
            vocab=0,
        )

        def forward(batch: TokenBatch) -> Any:
            return root(*args, **kwargs)

        adapter = PlainAdapter(root, anatomy, [call.output for call in chain], forward, TokenBatch.from_rows([[0]]))
        blocks = Blocks(root, adapter, Known(resumable=True))
        blocks.known.resumable = not anatomy.carried and _resumes(blocks, args, kwargs)
    return blocks


def _resumes(blocks: Blocks, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the example's output comes out bit by bit when the blocks before three depths are not run."""
    depths = sorted({1, blocks.n_blocks // 2, blocks.n_blocks - 1} - {0})
    reading = Read(blocks, [0, *depths], None, detach=True)
    with acting(reading):
        truth = blocks.root(*args, **kwargs)
    streams = {depth: tensors[0] for depth, tensors in reading.tensors.items()}
    try:
        # What blocks remember of the example must not stand in for running them. From the last depth to the first, so
        # that those before a depth still remember this instead.
        with acting(Edit("replace", blocks, 0, streams[0].roll(1, 1).neg(), None, add=False)):
            blocks.root(*args, **kwargs)
        for depth in reversed(depths):
            with resuming(blocks, depth, streams[depth]):
                again = blocks.root(*args, **kwargs)
            if not _equal(truth, again):
                return False
    except Exception:  # whatever goes wrong without the earlier blocks does not go wrong with them
        return False
    return True


def _equal(x: Any, y: Any) -> bool:
    a, b = dict(leaves(x)), dict(leaves(y))
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[path], b[path]) for path in a)
