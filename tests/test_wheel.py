"""The wheel holds everything that a user needs, and works away from the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tracer.zoo.shelf import CHECKSUMS, SHELF

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_zoo_and_probes_are_in_the_wheel(wheel):
    members = set(zipfile.ZipFile(wheel).namelist())
    models = {line.split(maxsplit=1)[1] for line in (SHELF / CHECKSUMS).read_text().splitlines()}
    assert {f"tracer/zoo/models/{path}" for path in (*models, CHECKSUMS)} <= members
    sets = {path.relative_to(ROOT / "probes").as_posix() for path in (ROOT / "probes").rglob("*.jsonl")}
    assert sets
    assert {f"tracer/probe_sets/{path}" for path in sets} <= members
    assert not [name for name in members if name.startswith(("tests/", "figures/"))]


def test_the_unpacked_wheel_traces_a_model_of_the_zoo_elsewhere(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    work = tmp_path / "work"
    work.mkdir()
    script = (
        "import tracer, tracer.cli; assert tracer.__file__.startswith({!r}); "
        "tracer.cli.main(['trace', 'zoo/mamba2-8', '--limit', '2', '--out', 'run', '-q', '--no-figures'])"
    ).format(str(tmp_path / "site"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", script], cwd=work, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "34 probes in 17 groups (zoo/held)" in done.stdout
    assert (work / "run" / "run.json").is_file()
