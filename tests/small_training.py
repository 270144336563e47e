"""Small models as folders, and texts to train them on, for the tests of training."""

import random
from pathlib import Path
from typing import Any

from tiny import tiny, word_tokenizer
from transformers import PreTrainedModel


def model_folder(path: Path, family: str = "llama", **overrides: Any) -> Path:
    """A tiny model with a tokenizer of words `w0`..., of which `w127` ends a text."""
    return save(tiny(family, **overrides), path)


def save(model: PreTrainedModel, path: Path) -> Path:
    """A live tiny model as a folder with its tokenizer."""
    model.save_pretrained(path)
    tokenizer = word_tokenizer()
    tokenizer.eos_token = "w127"
    tokenizer.save_pretrained(path)
    return path


def text_file(path: Path, documents: int = 60, seed: int = 0) -> Path:
    """Lines in which every word follows from the one before, so that there is something to learn."""
    draw = random.Random(seed)
    lines = []
    for _ in range(documents):
        word = draw.randrange(3, 60)
        words = []
        for _ in range(draw.randrange(5, 20)):
            words.append(f"w{word}")
            word = 3 + (word * 7 + seed) % 57
        lines.append(" ".join(words))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def recipe(folder: Path, model: Path | str, **changes: Any) -> dict[str, Any]:
    """A recipe of six steps in `folder`, whose texts it writes."""
    data: dict[str, Any] = {
        "model": str(model),
        "plan": {"rule": "shallow:2"},
        "text": {"new": {"path": str(text_file(folder / "new.txt")), "documents": "line", "held_out": 0.1}},
        "evaluate": {"old": {"path": str(text_file(folder / "old.txt", 20, seed=1)), "documents": "line"}},
        "block_size": 16,
        "output_dir": str(folder / "out"),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "max_loss_rise": 5.0,  # six steps of a model of nothing jump
        "weight_decay": 0.1,
        "logging_steps": 1,
        "eval_steps": 3,
        "save_steps": 3,
        "seed": 0,
        "use_cpu": True,
    }
    return data | changes
