"""Recipes: YAML files whose keys and values are checked whole before anything is opened."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from huggingface_hub.dataclasses import type_validator

from tracer.errors import InputError
from tracer.models.cache import one_line


def named(kind: type, where: str, entries: Any) -> dict[str, Any]:
    """Dataclasses by name, from a mapping of mappings."""
    return {_name(where, key): built(kind, f"{where}.{key}", entry) for key, entry in mapping(where, entries).items()}


def built(kind: type, where: str, entry: Any) -> Any:
    """A dataclass from a mapping whose keys and types are checked; what is built already is taken as it is."""
    if isinstance(entry, kind):
        return entry
    data = mapping(where, entry)
    known = {item.name: item for item in fields(kind)}
    check_keys(where, data, known)
    missing = [
        name
        for name, item in known.items()
        if name not in data and item.default is MISSING and item.default_factory is MISSING
    ]
    if missing:
        raise InputError(f"{where}: {missing[0]} is missing")
    hints = get_type_hints(kind)
    values = {
        key: value if _is_built(value) else typed(f"{where}: {key}", value, _plain_hint(hints[key]))
        for key, value in data.items()
    }
    try:
        return kind(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _is_built(value: Any) -> bool:
    """Whether a value is a dataclass already, or a mapping to such."""
    return is_dataclass(value) or (isinstance(value, Mapping) and any(map(is_dataclass, value.values())))


def check_keys(where: str, data: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise InputError for a key that is none of `names`, with the nearest one."""
    known = list(names)
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"{where}: unknown key {key!r}{hint}")


def _name(where: str, key: Any) -> str:
    if not isinstance(key, str):
        raise InputError(f"{where}: the name {key!r} is no text: put it in quotes, or pass another")
    return key


def mapping(where: str, value: Any) -> Mapping[Any, Any]:
    """The value, when it is keys and values."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where} is {value!r}: pass keys and values")
    return value


def _plain_hint(hint: Any) -> Any:
    """A hint without what YAML cannot give: `Mapping[str, Any]` as `dict`."""
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(_plain_hint(part) for part in get_args(hint))]  # noqa: UP007 - made at run time
    return dict if getattr(get_origin(hint), "__name__", "") == "Mapping" else hint


def typed(where: str, value: Any, hint: Any) -> Any:
    """The value, when it has the type of a hint; whole numbers stand for floats."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if isinstance(value, int) and not isinstance(value, bool) and float in parts and int not in parts:
        value = float(value)
    if isinstance(value, bool) and bool not in parts and not {str, Any} & set(parts):
        raise InputError(f"{where} is {value!r}: pass {_spelt(parts)}")
    try:
        type_validator("value", value, hint)
    except TypeError as error:
        raise InputError(f"{where} is {value!r}: pass {_spelt(parts)}") from error
    return value


def _spelt(parts: Iterable[Any]) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "keys and values"}
    names[list] = "a list"
    said = [names.get(part) or names.get(get_origin(part)) for part in parts]
    return " or ".join(dict.fromkeys(word for word in said if word)) or "another value"


class Dumper(yaml.SafeDumper):
    """Writes what `Loader` reads: a text that looks like `1e4` in quotes."""


class Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-4` is a number, and a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Keys and values of a node, with merge keys (`<<`) resolved by PyYAML."""
        keys: list[Any] = []
        for name, _ in node.value:
            if name.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(name, deep=True)
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", name.start_mark)
            keys.append(key)
        return super().construct_mapping(node, deep)


for _kind in (Loader, Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
    )


def yaml_value(text: str) -> Any:
    """One value as a recipe would hold it, from the command line."""
    try:
        return yaml.load(text, Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{text!r} is not YAML: {one_line(error)}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """What a recipe file holds.

    Raises:
        InputError: no such file, it is not YAML, or holds no keys.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader)  # a SafeLoader
    except OSError as error:
        raise InputError(f"cannot read the recipe {str(path)!r}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # an impossible date is a plain ValueError
        raise InputError(f"the recipe {str(path)!r} is not YAML: {one_line(error)}") from error
    if not isinstance(data, dict):
        raise InputError(f"the recipe {str(path)!r} holds no keys: see --example for one")
    return data
