"""The families of the zoo: which class of transformers, with which config, and for how long each is trained.

Edit this file to add a family or another size; `RUNS` lists everything that is trained.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

WIDTH = 128
"""d_model of every model."""
BLOCKS, PERIOD = 8, 4


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        name: As in `zoo/<name>-<blocks>`.
        classes: Names of the config's and the model's class in transformers.
        config: Arguments of the config beside width, vocabulary and number of blocks. Patterns of layers are those of
            the first `PERIOD` blocks, which the others repeat.
        steps: Training steps.
        learning_rate: Its peak.
    """

    name: str
    classes: tuple[str, str]
    config: dict[str, Any] = field(repr=False)
    steps: int
    learning_rate: float = 4e-3


_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
_GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_MAMBA = {"state_size": 32, "num_heads": 4, "head_dim": 64, "n_groups": 1, "chunk_size": 64}
_MAMBA_IN_HYBRIDS = {
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "transformer",
            ("LlamaConfig", "LlamaForCausalLM"),
            _ATTENTION | {"intermediate_size": 352},
            steps=1200,
        ),
        Family("mamba2", ("Mamba2Config", "Mamba2ForCausalLM"), _MAMBA, steps=1300, learning_rate=6e-3),
        Family(
            "mamba1",
            ("MambaConfig", "MambaForCausalLM"),
            {"state_size": 8, "time_step_rank": 8},
            steps=1100,
            learning_rate=6e-3,
        ),
        Family(
            "gdn",
            ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
            _ATTENTION | _GDN | {"intermediate_size": 256, "layer_types": ["linear_attention"]},
            steps=1300,
        ),
        Family(
            "gdn-attention",
            ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
            _ATTENTION
            | _GDN
            | {"intermediate_size": 256, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
            steps=1300,
        ),
        Family(
            "mamba2-attention",
            ("BambaConfig", "BambaForCausalLM"),
            _ATTENTION | _MAMBA_IN_HYBRIDS | {"intermediate_size": 256, "attn_layer_indices": [3]},
            steps=1300,
        ),
        Family(
            "mamba2-parallel",
            ("FalconH1Config", "FalconH1ForCausalLM"),
            _ATTENTION | _MAMBA_IN_HYBRIDS | {"intermediate_size": 256, "mamba_d_ssm": 256},
            steps=1200,
        ),
    )
}
"""Name to family."""


@dataclass(frozen=True)
class Run:
    """One training of one model.

    Attributes:
        family: Its architecture.
        blocks: How many.
        seed: Of initialisation, order of the documents and batches.
        embedding_std: Standard deviation of the embedding's initialisation.
    """

    family: Family
    blocks: int = BLOCKS
    seed: int = 0
    embedding_std: float = 1.0

    @property
    def name(self) -> str:
        """`transformer-8`, with what is not the default behind it: `transformer-8-seed1`."""
        seed = f"-seed{self.seed}" if self.seed else ""
        std = f"-std{self.embedding_std:g}" if self.embedding_std != 1.0 else ""
        return f"{self.family.name}-{self.blocks}{std}{seed}"

    @property
    def shipped(self) -> bool:
        """Whether its weights are part of the package; of the other runs the results are kept."""
        return self.seed == 0 and self.embedding_std == 1.0


RUNS: dict[str, Run] = {
    run.name: run
    for run in (
        *(Run(family) for family in FAMILIES.values()),
        Run(FAMILIES["transformer"], blocks=4),
        Run(FAMILIES["transformer"], blocks=12),
        *(Run(FAMILIES[name], seed=seed) for seed in (1, 2) for name in ("transformer", "mamba2", "gdn-attention")),
        Run(FAMILIES["transformer"], embedding_std=0.02),
    )
}
"""Name to run; the shipped ones first."""


def untrained(run: Run, vocabulary: int, bos: int) -> PreTrainedModel:
    """The model of a run before its training, which its seed fixes.

    Args:
        run: What is trained.
        vocabulary: Tokens of the tokenizer.
        bos: Id of the token that begins and separates documents.
    """
    config_name, model_name = run.family.classes
    arguments = dict(run.family.config)
    if "layer_types" in arguments:
        arguments["layer_types"] = (arguments["layer_types"] * run.blocks)[: run.blocks]
    if "attn_layer_indices" in arguments:
        inside = arguments["attn_layer_indices"]
        arguments["attn_layer_indices"] = [block for block in range(run.blocks) if block % PERIOD in inside]
    config = getattr(transformers, config_name)(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        num_hidden_layers=run.blocks,
        initializer_range=0.02,
        tie_word_embeddings=False,
        bos_token_id=bos,
        eos_token_id=bos,
        pad_token_id=bos,
        **arguments,
    )
    torch.manual_seed(run.seed)
    model: PreTrainedModel = getattr(transformers, model_name)(config)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, torch.nn.Embedding)
    torch.nn.init.normal_(embedding.weight, std=run.embedding_std)
    return model
