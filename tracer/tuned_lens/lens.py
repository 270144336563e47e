"""The tuned lens: an affine translator per depth, saved with the hash of the tail that it belongs to."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear

from tracer.errors import InputError
from tracer.models.anatomy import Anatomy
from tracer.models.cache import one_line
from tracer.models.traced import TracedModel
from tracer.statistics import Interval

SCHEMA = 1
FORMAT = "layertracer-tuned-lens"


@dataclass(frozen=True, eq=False)
class TunedLens:
    """Affine translators of the residual stream at depths 0..L-1 into that at depth L, for the model's own tail.

    The translated stream is `h + weight[d] h + bias[d]`, so that zeros are the plain logit lens. Depth L is left as it
    is. Source: Belrose et al. (2023), "Eliciting Latent Predictions from Transformers with the Tuned Lens", section 3
    (arXiv 2303.08112).

    Attributes:
        weight: `[depths, d, d]` float32; d is the width of the stream, all of its inner dimensions taken together.
        bias: `[depths, d]` float32.
        tail_hash: `TracedModel.tail_fingerprint` of the model that it was trained on.
        model: what that model was called.
        record: how it was trained (text, tokens, positions, steps, seed, dtype, versions, time) and, under `depths`,
            what `to_frame` returns.
    """

    weight: Float[Tensor, "depths d d"]
    bias: Float[Tensor, "depths d"]
    tail_hash: str
    model: str
    record: Mapping[str, Any]

    @property
    def n_depths(self) -> int:
        """Number of translators, L."""
        return len(self.bias)

    def translate(self, anatomy: Anatomy, depth: int, stream: Tensor) -> Tensor:
        """The stream at single positions as it would stand at the last depth.

        Args:
            anatomy: of the model that `check` has accepted.
            depth: 0..L; depth L, and a stream that the translator leaves as it is, come back unchanged.
            stream: sequences of one position in the model's layout, as `positions_of` gives them; of any data type,
                which the result has too.

        Raises:
            InputError: there is no such depth.
        """
        if not 0 <= depth <= self.n_depths:
            raise InputError(f"no depth {depth}: this tuned lens has depths 0 to {self.n_depths}")
        if depth == self.n_depths:
            return stream
        return translated(anatomy, stream, self.weight[depth], self.bias[depth])

    def check(self, model: TracedModel) -> None:
        """Refuse a model that this lens does not belong to.

        Raises:
            InputError: another number of blocks, another width, or another tail.
        """
        width = stream_width(model.anatomy)
        made = f"this tuned lens was trained on {self.model}"
        advice = f"train one for {model.name}: tracer tuned-lens"
        if (self.n_depths, self.bias.shape[1]) != (model.n_blocks, width):
            raise InputError(
                f"{made} with {self.n_depths} blocks and a stream of width {self.bias.shape[1]}, but {model.name} has "
                f"{model.n_blocks} blocks and width {width}: {advice}"
            )
        found = model.tail_fingerprint()
        if found != self.tail_hash:
            raise InputError(
                f"{made} ({self.record['dtype']}) with the tail {self.tail_hash}, but {model.name} "
                f"({model.opened.dtype}) has the tail {found}: {advice}, or open the model that it was trained on in "
                "the same data type"
            )

    @property
    def lowered(self) -> tuple[bool, ...]:
        """Per depth whether the mean KL on held-out text is lower than that of the plain lens."""
        return tuple(row["drop"] > 0 for row in self.record["depths"])

    def to_frame(self) -> pd.DataFrame:
        """One row per depth 0..L-1, on held-out text.

        Columns: `depth`; `kl_plain`, `kl_tuned` and their paired difference `drop`, each with `_low` and `_high`
        (95 %): mean KL(output || lens) in nats; `n` (positions), `n_units` (documents or sequences that they come
        from), `start` (`regression` or `identity`), `ridge` (penalty of the regression) and `steps` (gradient steps
        of the translator that was kept).
        """
        return pd.DataFrame(list(self.record["depths"]))

    def summary(self) -> str:
        """The lens as text for a terminal: KL before and after by depth, and whether every depth was lowered."""
        record, table = self.record, self.to_frame()
        held_out = f"{table['n'].iloc[0]} positions of {table['n_units'].iloc[0]} held-out {record['unit']}s"
        lines = [
            f"Tuned lens of {self.model} ({record['dtype']}), depths 0 to {self.n_depths - 1}, tail {self.tail_hash}",
            f"trained on {record['positions']} positions of {record['text']} ({record['tokens']} tokens), "
            f"{record['steps']} steps of {record['batch']} positions, seed {record['seed']}, {record['seconds']:.0f} s",
            f"Mean KL(output || lens) in nats with 95 % intervals, on {held_out}:",
            f"{'depth':>5}  {'plain lens':<27}{'tuned lens':<27}lower by",
        ]
        for row in self.record["depths"]:
            cells = (str(Interval(row[k], row[f"{k}_low"], row[f"{k}_high"], row["n"])) for k in MEASURES)
            lines.append(f"{row['depth']:>5}  " + "".join(f"{cell:<27}" for cell in cells).rstrip())
        missed = [depth for depth, lower in enumerate(self.lowered) if not lower]
        unsure = [row["depth"] for row in self.record["depths"] if row["drop"] > 0 >= (row["drop_low"] or 0.0)]
        if missed:
            lines.append(f"NOT lower at depth {', '.join(map(str, missed))}")
        else:
            lines.append("Lower at every depth below the last")
        if unsure:
            lines.append(f"Lower by less than the interval tells at depth {', '.join(map(str, unsure))}")
        return "\n".join(lines)

    def plot(self) -> Figure:
        """KL to the output by depth, plain against tuned, with intervals."""
        from tracer.plots.tuned_lens import draw_tuned_lens

        return draw_tuned_lens(self)

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write one safetensors file, whole or not at all.

        Args:
            path: of the file.
            force: replace it where it is there.

        Raises:
            InputError: it is there already, or cannot be written.
        """
        target = Path(path)
        check_lens_path(target, force=force)
        metadata = {
            "format": FORMAT,
            "schema": str(SCHEMA),
            "tail_hash": self.tail_hash,
            "model": self.model,
            "record": json.dumps(self.record, ensure_ascii=False),
        }
        tensors = {"weight": self.weight.contiguous().cpu(), "bias": self.bias.contiguous().cpu()}
        staged = target.with_name(f".{target.name}.writing")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, staged, metadata)
            os.replace(staged, target)
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot write {str(target)!r}: {one_line(error)}") from error
        finally:
            with suppress(OSError):
                staged.unlink(missing_ok=True)
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TunedLens":
        """Read a saved lens.

        Raises:
            InputError: there is none, it is damaged or something else, or a later version wrote it.
        """
        source = Path(path)
        if not source.is_file():
            raise InputError(f"no tuned lens {str(source)!r}: pass the --out file of tracer tuned-lens")
        try:
            with safe_open(source, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise InputError(f"{str(source)!r} is not a tuned lens: pass the --out file of tracer tuned-lens")
                if metadata["schema"] != str(SCHEMA):
                    raise InputError(
                        f"{str(source)!r} has tuned-lens schema {metadata['schema']}, this version reads {SCHEMA}: "
                        "train again"
                    )
                weight, bias = file.get_tensor("weight"), file.get_tensor("bias")
            return cls(weight, bias, metadata["tail_hash"], metadata["model"], json.loads(metadata["record"]))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{str(source)!r} is damaged ({one_line(error)}): train again with --force") from error


MEASURES = ("kl_plain", "kl_tuned", "drop")
"""What is measured per depth on held-out text, in nats."""


def translated(anatomy: Anatomy, stream: Tensor, weight: Float[Tensor, "d d"], bias: Float[Tensor, " d"]) -> Tensor:
    """`stream + weight stream + bias` for single positions in the model's layout, in the stream's own data type."""
    rows = anatomy.rows_first(stream)
    h = rows.flatten(2)
    # Not below float32, and not below the stream's own type: a translator of zeros changes nothing.
    precise = h.to(torch.promote_types(h.dtype, weight.dtype))
    moved = precise + linear(precise, weight.to(precise), bias.to(precise))
    return anatomy.as_model(moved.to(stream.dtype).view(rows.shape))


def stream_width(anatomy: Anatomy) -> int:
    """Numbers per position of the residual stream, all of its inner dimensions taken together."""
    outer = {anatomy.batch_dim, anatomy.position_dim}
    return torch.Size(size for dim, size in enumerate(anatomy.stream_shape) if dim not in outer).numel()


def check_lens_path(path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Raise InputError when no lens can be written to `path`: in use (unless `force`), a folder, or out of reach."""
    target = Path(path)
    if target.is_dir():
        raise InputError(f"{str(target)!r} is a folder: pass a file, e.g. {str(target / 'lens.safetensors')!r}")
    if target.exists() and not force:
        raise InputError(f"{str(target)!r} is there already: pass another file, or force to replace it")
    above = next(parent for parent in target.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError(f"cannot write {str(target)!r}: {str(above)!r} is not a folder that can be written to")
