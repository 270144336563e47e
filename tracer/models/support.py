"""The table of what works: which causal language models of transformers can be traced, and how.

The table is data of the package, `support.csv`. It is measured, not written by hand: `make support` opens a tiny model
of every architecture, and the tests fail where an architecture behaves in another way than its row says.
"""

from importlib.resources import files

import pandas as pd


def supported() -> pd.DataFrame:
    """Every entry of transformers' list of causal language models, one row each, in the order of that list.

    An entry is opened as a tiny model with unusual scales, caps and biases, on a probe of 3 x 11 tokens. What a model
    of yours does is decided by the self-check when it is opened, not by this table.

    Columns:
        `model_type`: as in the model's `config.json`.
        `class`: the class of transformers that is opened.
        `outcome`: `traced`, `refused`, or `not buildable` where there is no tiny model of it alone.
        `blocks`: how many block calls a forward of the tiny model makes; null unless traced.
        `stream_shape`: shape of the residual stream for 3 x 11 tokens, e.g. `3x11x64`; d_model is 64 where the
            architecture leaves the choice. Null unless traced.
        `engine`: `onepass`, or `full` where a run cannot be resumed from the stream alone; null unless traced.
        `adapter`: `hooks`, or `hooks+transformer_lens` where it can also be opened as a `TransformerBridge`; null
            unless traced.
        `transformer_lens`: whether TransformerLens lists the class, `listed` or `not listed`.
        `why`: why it is refused, takes the `full` engine, cannot be built, or cannot be opened as a bridge although
            the class is listed; else null.
        `transformers`, `torch`, `transformer_lens_version`: versions that the row was measured with.

    Example:
        >>> from tracer.models.support import supported
        >>> table = supported()
        >>> table.set_index("model_type").loc["llama", ["outcome", "engine"]].tolist()
        ['traced', 'onepass']
    """
    with files("tracer.models").joinpath("support.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file, dtype={"blocks": "Int64"})
