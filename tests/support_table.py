"""The table of what works, measured on the models of the sweep, and its summary for the README.

`make support` writes both. The tests compare every model of the sweep with its row, and the README with the table.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from every_model import ENTRIES, UNBUILDABLE, build
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tracer.errors import InputError, ModelRefused
from tracer.models import support
from tracer.models.anatomy import PROBE_LENGTH, PROBE_ROWS, Anatomy
from tracer.models.selfcheck import SelfCheck, open_plain
from tracer.models.transformer_lens import booted_bridge, transformer_lens_logits, why_no_bridge

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tracer/models/support.csv"
README = ROOT / "README.md"
FLOOR = ROOT / "tests/floor.json"
"""What was found with the oldest release of transformers that is allowed; written by `make test-floor`."""

BEGIN, END = "<!-- support:begin -->\n", "\n<!-- support:end -->"
COLUMNS = (
    *("model_type", "class", "outcome", "blocks", "stream_shape", "engine", "adapter", "transformer_lens", "why"),
    *("transformers", "torch", "transformer_lens_version"),
)
WIDTH = 64
"""d_model of the tiny models, where the architecture leaves the choice."""

Row = dict[str, str]


def versions() -> Row:
    """What a row depends on beside the project itself."""
    return {
        "transformers": version("transformers"),
        "torch": version("torch").partition("+")[0],
        "transformer_lens_version": version("transformer-lens"),
    }


def traced(anatomy: Anatomy, check: SelfCheck) -> Row:
    """What the row of a model says that can be traced, as far as plain hooks go."""
    # How far a resumed run was off differs from machine to machine.
    reason = re.sub(r"^[\w ]+ differs by \S+: ", "", check.reason) if check.engine == "full" else ""
    said = any(note.startswith(reason) for note in check.notes)
    return {
        "outcome": "traced",
        "blocks": str(anatomy.n_blocks),
        "stream_shape": "x".join(str(size) for size in anatomy.stream_shape),
        "engine": check.engine,
        "why": "; ".join(check.notes if said else [reason, *check.notes]),
    }


def refused(error: ModelRefused) -> Row:
    """What the row of a model says that is refused: why, without the gap that was measured and without advice."""
    why = re.sub(r"^\w+ (cannot be traced: )?", "", str(error)).partition(";")[0]
    return {
        "outcome": "refused",
        "why": re.sub(r"^check '\w+' \((.*)\) found a gap of .*", r"fails the check that \1", why),
    }


def opened(model_type: str, *, bridge: bool = True) -> Row:
    """What the row of an entry says, found by opening it by plain hooks and, unless told not to, as a bridge."""
    if model_type in UNBUILDABLE:
        return {"outcome": "not buildable", "why": UNBUILDABLE[model_type]}
    model = build(model_type)
    try:
        adapter, check = open_plain(model)
    except ModelRefused as error:
        return refused(error)
    row = traced(adapter.anatomy, check)
    if bridge:
        fault = bridge_fault(model)
        row["adapter"] = "hooks" if fault is not None else "hooks+transformer_lens"
        row["why"] = "; ".join(filter(None, (row["why"], fault)))
    return row


def bridge_fault(model: PreTrainedModel) -> str | None:
    """Why a model, which is taken over, cannot be opened as a bridge: empty where none is listed; None where it can.

    The bridge must give the model's own outputs and pass the self-check.
    """
    if why_no_bridge(model) is not None:
        return ""
    try:
        bridge = booted_bridge(model, type(model).__name__)
    except InputError:
        return "its TransformerBridge cannot be booted"
    except ModelRefused:
        return "its TransformerBridge gives other outputs"
    try:
        open_plain(bridge, partial(transformer_lens_logits, bridge), embeddings=bridge.cfg.d_vocab)
    except ModelRefused:
        return "its TransformerBridge cannot be traced"
    return None


def listed(model_type: str) -> str:
    """Whether TransformerLens lists the class of an entry."""
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES

    return "listed" if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] in SUPPORTED_ARCHITECTURES else "not listed"


def measured() -> pd.DataFrame:
    """The whole table, by opening every entry."""
    rows = [
        {"model_type": model_type, "class": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]}
        | opened(model_type)
        | {"transformer_lens": listed(model_type)}
        | versions()
        for model_type in ENTRIES
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


@cache
def recorded() -> pd.DataFrame:
    """The table of the package, by model type."""
    return support.supported().set_index("model_type")


@cache
def is_current() -> bool:
    """Whether the table was measured with the installed transformers."""
    return set(recorded()["transformers"]) == {versions()["transformers"]}


def assert_recorded(model_type: str, row: Row) -> None:
    """Compare what the row of an entry should say with what it says."""
    said = recorded().loc[model_type, list(row)]
    found = said.astype(object).where(said.notna(), "").astype(str).to_dict()
    # The table also says why a bridge cannot be opened.
    assert row["why"] in found["why"]
    assert found | {"why": row["why"]} == row, f"{model_type} behaves in another way than its row says: make support"


def floor_record() -> dict[str, Any]:
    """What the installed release of transformers does: versions, counts, and which entries behave in another way."""
    rows = {model_type: opened(model_type, bridge=False) for model_type in ENTRIES}
    different: dict[str, list[str]] = {}
    for model_type, row in rows.items():
        outcome = _outcome(row["outcome"], row.get("engine"))
        if outcome != _outcome(*recorded().loc[model_type, ["outcome", "engine"]]):
            different.setdefault(f"{outcome}: {row['why']}" if row["why"] else outcome, []).append(model_type)
    return {
        **versions(),
        **{name: version(name) for name in ("tokenizers", "huggingface_hub")},
        "entries": len(rows),
        "traced": sum(row["outcome"] == "traced" for row in rows.values()),
        "different": different,
    }


def summary(table: pd.DataFrame, floor: dict[str, Any]) -> str:
    """The README's block: counts by the shape of the stream, the exceptions with their reasons, and versions.

    Args:
        table: as `support.supported` gives it.
        floor: as `floor_record` gives it.
    """
    traceable = table[table["outcome"] == "traced"]
    full, bridged = traceable["engine"] == "full", traceable["adapter"] == "hooks+transformer_lens"
    count = Counter(table["outcome"])
    lines = [
        f"Of {len(table)} entries {count['traced']} are traced exactly ({(~full).sum()} in one pass, {full.sum()} by "
        f"whole forwards), {count['refused']} are refused with the reason, and {count['not buildable']} cannot be "
        "built alone.",
        "",
        "| residual stream | in one pass | by whole forwards | also as a `TransformerBridge` |",
        "| --- | --- | --- | --- |",
    ]
    streams = traceable["stream_shape"].map(_stream)
    for stream, _ in sorted(Counter(streams).items(), key=lambda item: (-item[1], item[0])):
        alike = streams == stream
        lines.append(f"| `{stream}` | {(alike & ~full).sum()} | {(alike & full).sum()} | {(alike & bridged).sum()} |")
    lines += ["", "| entries | how | why |", "| --- | --- | --- |"]
    outcomes = [_outcome(*pair) for pair in zip(table["outcome"], table["engine"], strict=True)]
    reasons = table.assign(how=outcomes).dropna(subset=["why"]).groupby(["how", "why"], sort=False)["model_type"]
    order = ("whole forwards", "one pass", "refused", "not buildable")
    lines += [
        f"| {_quoted(names)} | {how}{', by plain hooks only' if how == 'one pass' else ''} | {why} |"
        for (how, why), names in sorted(reasons, key=lambda group: order.index(group[0][0]))
    ]
    first = table.iloc[0]
    different = "; ".join(f"{_quoted(names)} ({how})" for how, names in floor["different"].items())
    lines += [
        "",
        f"Versions: transformers {first['transformers']}, torch {first['torch']}, TransformerLens "
        f"{first['transformer_lens_version']}. The oldest release of transformers that is allowed, "
        f"{floor['transformers']}, passed `make test-floor` with torch {floor['torch']}, TransformerLens "
        f"{floor['transformer_lens_version']}, tokenizers {floor['tokenizers']} and huggingface_hub "
        f"{floor['huggingface_hub']}: of its {floor['entries']} entries {floor['traced']} are traced exactly. "
        + (f"Entries that come out otherwise there: {different}." if different else "They come out as above."),
    ]
    return "\n".join(lines)


def _outcome(outcome: str, engine: Any) -> str:
    return {"onepass": "one pass", "full": "whole forwards"}.get(engine, outcome)


def _stream(shape: str) -> str:
    """`3x11x4x64` as `[batch, pos, 4, d_model]`; sizes that are none of these stay numbers."""
    names = {PROBE_ROWS: "batch", PROBE_LENGTH: "pos", WIDTH: "d_model"}
    return f"[{', '.join(names.get(int(size), size) for size in shape.split('x'))}]"


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def readme_block() -> str:
    """What stands between the marks of the README."""
    readme = README.read_text(encoding="utf-8")
    return readme[readme.index(BEGIN) + len(BEGIN) : readme.index(END)]


def write_readme_block() -> None:
    """Bring the README up to the table and to what was found with the oldest release."""
    recorded.cache_clear()
    block = summary(recorded().reset_index(), json.loads(FLOOR.read_text(encoding="utf-8")))
    readme = README.read_text(encoding="utf-8")
    README.write_text(readme.replace(BEGIN + readme_block() + END, BEGIN + block + END), encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Write the table, or with `--floor` what the installed, oldest release does; then the README's block."""
    if arguments == ["--floor"]:
        FLOOR.write_text(json.dumps(floor_record(), indent=2) + "\n", encoding="utf-8")
    else:
        measured().to_csv(TABLE, index=False, lineterminator="\n")
    write_readme_block()


if __name__ == "__main__":
    main(sys.argv[1:])
