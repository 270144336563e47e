"""Hand-made causal models whose answers are written by a known block."""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class PlantedConfig(PretrainedConfig):
    model_type = "planted"

    def __init__(self, writer: int = 0, n_blocks: int = 6, vocab_size: int = 64, constant: int | None = None, **kwargs):
        super().__init__(**kwargs)
        self.writer, self.n_blocks, self.vocab_size, self.constant = writer, n_blocks, vocab_size, constant


class PlantedBlock(nn.Module):
    """Adds the direction of the answer to the stream when it is the writer, else a small disturbance."""

    def __init__(self, config: PlantedConfig, index: int):
        super().__init__()
        size = config.vocab_size
        table = torch.zeros(size, 2 * size)
        if index == config.writer:
            answers = torch.arange(size).roll(-1) if config.constant is None else torch.full((size,), config.constant)
            table[torch.arange(size), size + answers] = 12.0
        generator = torch.Generator().manual_seed(index)
        self.mix = nn.Linear(2 * size, 2 * size, bias=False)
        with torch.no_grad():
            noise = 0.02 * torch.randn(2 * size, 2 * size, generator=generator)
            noise[:, size:] = 0
            self.mix.weight.copy_(noise)
            self.mix.weight[:, :size] += table.T

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mix(hidden)


class PlantedModel(PreTrainedModel):
    """Token w is answered by w + 1, written into the stream by block `writer` (or by none); one-hot embeddings."""

    config_class = PlantedConfig
    _tied_weights_keys = None

    def __init__(self, config: PlantedConfig):
        super().__init__(config)
        size = config.vocab_size
        self.embedding = nn.Embedding(size, 2 * size)
        self.blocks = nn.ModuleList(PlantedBlock(config, i) for i in range(config.n_blocks))
        self.head = nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():
            self.embedding.weight.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], 1))
            self.head.weight.copy_(torch.cat([torch.zeros(size, size), torch.eye(size)], 1))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The weights are planted, not drawn."""

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> CausalLMOutput:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return CausalLMOutput(logits=self.head(hidden))


def planted(writer: int, n_blocks: int = 6, constant: int | None = None) -> PreTrainedModel:
    """A model whose block `writer` knows the answers; -1 for none; `constant` for one answer to everything."""
    return PlantedModel(PlantedConfig(writer=writer, n_blocks=n_blocks, constant=constant)).eval()
