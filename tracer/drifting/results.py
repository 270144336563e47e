"""What a comparison of two checkpoints returns, and the folder that it is saved as (see `tracer.results`)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from tracer.errors import one_of
from tracer.results import SavedResult
from tracer.summary import bounds, spans

SCHEMA = 1
FILES = ("arrays.safetensors", "depths.csv", "probes.jsonl", "run.json")
"""The files of a result; `run.json` is moved in last, so that a folder that has it is complete."""


@dataclass(frozen=True, eq=False)
class DriftResult(SavedResult):
    """How far a checkpoint has moved from another one on a set of probes.

    Attributes:
        run: arguments, versions, both models (`base`, `continued`), the mean JSD of the outputs with its interval
            (`output`, nats), `answered` by both, by one and by neither, particle blocks of both (`particles`, with
            those of each group), the blocks whose weights change the output most (`largest`, `largest_without_first`),
            and warnings; what `run.json` holds.
        probes: one row per probe: `id`, `group`, `prompt`, `target`, `answered_base`, `answered_continued`,
            `log_p_base`, `log_p_continued` (nats), `jsd` of the outputs (nats), and the particles `particle_base`,
            `particle_continued` (block, missing where there is none).
        depths: one row per depth d of the stream: `depth`, mean `cosine` of the two streams with its interval
            (`cosine_low`, `cosine_high`), `norm_ratio` (mean norm of the continued stream over that of the base), `cka`
            (debiased, between the two, over probes; missing under 50 of them), and of the block that writes that depth
            (missing at depth 0): `block`, `mixer`, `weights` (norm of the change of its weights over their norm), and
            the mean `jsd` of the base's output when only this block gets its continued weights, with `jsd_low` and
            `jsd_high` (nats).
        arrays: `cosine` `[depths, probes]`, `jsd` `[probes]`, `jsd_swap_weights` `[blocks, probes]`.
    """

    run: dict[str, Any]
    probes: pd.DataFrame
    depths: pd.DataFrame
    arrays: dict[str, np.ndarray]

    files: ClassVar = FILES
    schema: ClassVar = SCHEMA
    verb: ClassVar = "drift"
    table: ClassVar = "depths"
    types: ClassVar = {"block": "Int64", "mixer": str}

    @staticmethod
    def probes_of(rows: list[dict[str, Any]]) -> pd.DataFrame:
        """The table of probes with the types that do not follow from the values, which may all be missing."""
        return pd.DataFrame(rows).astype({"particle_base": "Int64", "particle_continued": "Int64"})

    def to_frame(self, of: str = "depths") -> pd.DataFrame:
        """One of the tables `depths` and `probes`, as a copy."""
        return getattr(self, one_of("table", of, ("depths", "probes"))).copy()

    def summary(self) -> str:
        """The result as text for a terminal."""
        run, output, answered = self.run, self.run["output"], self.run["answered"]
        interval = bounds(output["low"], output["high"], ".4f")
        blocks = self.depths.dropna(subset=["block"])
        shown = pd.DataFrame(
            {
                "block": blocks["block"],
                "mixer": blocks["mixer"],
                "weights moved": [f"{value:.4f}" for value in blocks["weights"]],
                "JSD if swapped": _intervals(blocks, "jsd"),
                "cosine after it": _intervals(blocks, "cosine"),
                "CKA": ["" if pd.isna(value) else f"{value:.3f}" for value in blocks["cka"]],
            }
        )
        lines = [
            f"{run['continued']['name']} against {run['base']['name']} ({run['base']['anatomy']['model_class']}, "
            f"{len(blocks)} blocks), {len(self.probes)} probes ({run['arguments']['probes']}); 95 % intervals",
            f"outputs: JSD {output['estimate']:.4f} {interval} nats; answered by both "
            f"{answered['both']}, only before {answered['only_base']}, only after {answered['only_continued']}, by "
            f"neither {answered['neither']}",
            f"median particle block: {_block(run['particles']['base'])} before, "
            f"{_block(run['particles']['continued'])} after",
            f"blocks whose new weights change the output most, not told apart: {spans(run['largest'])}; without block "
            f"0: {spans(run['largest_without_first'])}",
            "",
            shown.to_string(index=False),
        ]
        return "\n".join([*lines, *(f"! {note}" for note in run["warnings"])])

    def plot(self) -> Figure:
        """Draw the streams over depth, and the weights and what they do to the output over blocks."""
        from tracer.plots.drift import draw_drift

        return draw_drift(self)


def _intervals(table: pd.DataFrame, name: str) -> list[str]:
    rows = table[[name, f"{name}_low", f"{name}_high"]].to_numpy(dtype=float)
    return [f"{mean:.4f} {bounds(low, high, '.4f')}".rstrip() for mean, low, high in rows]


def _block(found: dict[str, Any]) -> str:
    if found["estimate"] is None:
        return "none"
    return f"{found['estimate']:g} {bounds(found['low'], found['high'], 'g')}".rstrip()
