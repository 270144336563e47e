"""A trial of two arms on a tiny model, for the tests of this folder."""

import json
from pathlib import Path
from typing import Any

from small_training import model_folder, text_file


def probe_file(path: Path, number: int = 12) -> Path:
    """Words that follow each other as in `text_file`, in two groups."""
    rows = [
        {"prompt": f"w{word}", "target": f" w{3 + word * 7 % 57}", "group": f"g{word % 2}"}
        for word in range(3, 3 + number)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def small(folder: Path, **changes: Any) -> dict[str, Any]:
    """The recipe of a trial in `folder`, whose model, texts and probes it writes."""
    folder.mkdir(exist_ok=True)
    held = folder / "held.jsonl"
    lines = text_file(folder / "held.txt", 7, seed=2).read_text("utf-8").splitlines()
    held.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    data: dict[str, Any] = {
        "model": str(model_folder(folder / "model")),
        "text": {"new": {"path": str(text_file(folder / "new.txt")), "documents": "line"}},
        "block_size": 16,
        "per_device_train_batch_size": 4,
        "max_loss_rise": 5.0,
        "use_cpu": True,
        "arms": {"full": {"rule": "full"}, "shallow": {"rule": "shallow:2", "head": "freeze"}},
        "rates": [5e-3, 2e-2],
        "seeds": 2,
        "budgets": [2, 4],
        "every": 2,
        "acquisition": {"suite": str(probe_file(folder / "new.jsonl")), "score": "log_p"},
        "retention": {"old": {"suite": str(held)}},
        "claims": [{"better": "shallow", "than": "full"}],
        "output_dir": str(folder / "trial"),
    }
    return data | changes
