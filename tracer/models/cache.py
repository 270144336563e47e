"""The cache of converted models: checkpoint folders that are whole, as their manifest says, or not there."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock
from safetensors import SafetensorError

from tracer.errors import InputError

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
VERIFIED = ".verified.json"


def cache_folder() -> Path:
    """Where fetched and converted models lie.

    `$LAYERTRACER_CACHE`, else `layertracer` in the user's cache folder (`$XDG_CACHE_HOME`, else `~/.cache`).
    """
    own = os.environ.get("LAYERTRACER_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "layertracer"


def cached_or_built(key: str, build: Callable[[Path, Path], Mapping[str, Any]], *, force: bool = False) -> Path:
    """The folder `key` of the cache, built anew if it is absent or damaged.

    It is built beside its place and moved there when it is complete, so that no other process ever sees half
    of it, and one process at a time builds it.

    Args:
        key: Name of the folder.
        build: Called with a folder for its own work, deleted afterwards, and the folder to fill; returns the
            facts for the manifest: name, source, licence, gguf_sha256.
        force: Build even where the cache is whole.

    Raises:
        InputError: The cache cannot be written.
    """
    cache = cache_folder()
    target = cache / key
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{key}.lock"):
            if not force and target.exists() and find_fault(target) is None:
                return target
            # We hold the lock, so whatever a killed process left behind is nobody's.
            for stale in cache.glob(f".{key}.part-*"):
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{key}.part-", dir=cache) as work:
                built = Path(work, "model")
                built.mkdir()
                _write_manifest(built, build(Path(work), built))
                if target.exists():
                    os.replace(target, Path(work, "old"))
                os.replace(built, target)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"could not write {key} into the cache folder {cache} ({one_line(error)}); "
            "free space there or point LAYERTRACER_CACHE to another folder"
        ) from error
    return target


def find_fault(folder: Path) -> str | None:
    """What is wrong with a folder of the cache; None where every file of its manifest is there unchanged.

    Every file is compared with the SHA-256 of the manifest. A digest is computed anew only where size, inode
    or time of change differ from those of the last comparison: hashing at each load would cost up to a second
    per gigabyte.
    """
    try:
        manifest = read_manifest(folder)
        files = manifest["files"]
        if manifest["format"] != MANIFEST_FORMAT:
            return f"{MANIFEST} has format {manifest['format']} instead of {MANIFEST_FORMAT}"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} is not readable"
    try:
        verified = json.loads((folder / VERIFIED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        verified = {}
    signatures = {}
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["size"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['size']}"
        signatures[name] = _signature(path)
        if verified.get(name) != signatures[name] and file_sha256(path) != expected["sha256"]:
            return f"{name} has another SHA-256 than {MANIFEST} says"
    if signatures != verified:
        with suppress(OSError):  # a cache that is read-only is hashed at each load
            (folder / VERIFIED).write_text(json.dumps(signatures), encoding="utf-8")
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Manifest of a folder of the cache: format, name, source, licence, gguf_sha256, transformers, files."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def file_sha256(path: Path) -> str:
    """SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def one_line(error: BaseException) -> str:
    """The message of somebody else's exception on one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    signatures = {name: _signature(folder / name) for name in files}
    (folder / VERIFIED).write_text(json.dumps(signatures), encoding="utf-8")
    manifest = {"format": MANIFEST_FORMAT, **facts, "transformers": version("transformers"), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _signature(path: Path) -> list[int]:
    """Changes whenever the file is written or replaced."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]
