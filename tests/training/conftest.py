"""What holds for every test of training: `datasets` converts into a folder of the tests, and leaves nothing at home."""

from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest


@pytest.fixture(scope="session", autouse=True)
def datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        patch.setenv("HF_DATASETS_CACHE", str(folder))  # for processes that a test starts
        yield folder
