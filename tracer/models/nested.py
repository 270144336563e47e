"""Tensors inside nested arguments and outputs, addressed by path.

A block of a Hugging Face model takes and returns tensors, tuples, lists, named tuples, dicts or ModelOutputs of them.
A path is the tuple of keys that leads to one tensor; the empty path is the object itself.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

Path = tuple[int | str, ...]


def leaves(tree: Any, prefix: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield `(path, tensor)` for every tensor in `tree`, in a fixed order."""
    if isinstance(tree, Tensor):
        yield prefix, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*prefix, key))
    elif isinstance(tree, tuple | list):
        for key, value in enumerate(tree):
            yield from leaves(value, (*prefix, key))


def get(tree: Any, path: Path) -> Any:
    """The object at `path`; None where the path leads nowhere."""
    for key in path:
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        elif isinstance(tree, tuple | list) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree


def replaced(tree: Any, values: Mapping[Path, Any], prefix: Path = ()) -> Any:
    """A copy of `tree` with the objects at the given paths replaced; containers keep their type.

    Containers without a replaced object inside are returned as they are, so that state which blocks share by
    reference stays shared.
    """
    if prefix in values:
        return values[prefix]
    if not any(path[: len(prefix)] == prefix for path in values):
        return tree
    if isinstance(tree, Mapping):
        items = {key: replaced(value, values, (*prefix, key)) for key, value in tree.items()}
        return type(tree)(**items) if hasattr(tree, "to_tuple") else type(tree)(items)  # type: ignore[call-arg]
    if isinstance(tree, tuple | list):
        items_ = [replaced(value, values, (*prefix, key)) for key, value in enumerate(tree)]
        return type(tree)(*items_) if hasattr(tree, "_fields") else type(tree)(items_)
    return tree
