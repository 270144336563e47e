"""A tiny model for every causal language model that transformers knows, re-initialised so that every block matters.

Nothing is listed architecture by architecture that can be derived: the fields of a config class are set by name, lists
of one entry per block are shortened to a list with every kind that the default has, and sub-configs are treated alike.
`_ODD` says what else an entry needs.
"""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from tiny import BLOCKS, VOCAB, older_than, reinitialised
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ENTRIES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

UNBUILDABLE: dict[str, str] = {
    "gemma3n": "its vision tower needs timm; its language model is the entry gemma3n_text",
    "gemma4_assistant": "a drafter: its forward needs the hidden states and the key-value cache of a target model",
    "gemma4_unified_assistant": "a drafter: its forward needs the hidden states and the key-value cache of a target",
}
if older_than("5.15"):
    UNBUILDABLE["dbrx"] = "its router takes the width of its feed-forward layers for that of the model"


def _every(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


# Sizes first; then what is 0, 1, off or None by default and would hide an error as such.
_TINY: dict[str, Any] = {
    **_every(VOCAB, "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    **_every(64, "hidden_size d_model n_embd embedding_dim emb_dim attention_hidden_size lru_width"),
    **_every(BLOCKS, "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks"),
    **_every(1, "encoder_layers num_encoder_layers"),
    **_every(4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"),
    **_every(4, "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads"),
    **_every(2, "num_key_value_heads num_kv_heads"),
    **_every(96, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size intermediate_size_mlp dff"),
    **_every(96, "dim_ff d_inner feed_forward_size shared_intermediate_size dense_intermediate_size"),
    **_every(32, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
    **_every(32, "shared_experts_intermediate_size expert_ffn_hidden_size"),
    **_every(256, "max_position_embeddings n_positions max_seq_len max_target_positions n_ctx"),
    **_every(256, "context_length"),
    **_every(16, "head_dim d_head dim_head kv_channels v_head_dim attention_head_size"),
    **_every(4, "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num"),
    **_every(2, "num_experts_per_tok moe_topk moe_k top_k_experts"),
    **_every(1, "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers"),
    **_every(1, "n_group topk_group"),
    **_every(8, "qk_rope_head_dim qk_nope_head_dim rotary_dim sliding_window sliding_window_size window_size"),
    **_every(8, "attention_window_size attention_chunk_size chunk_size mamba_chunk_size local_attention index_topk"),
    **_every(16, "q_lora_rank kv_lora_rank o_lora_rank adapter_rank laurel_rank hc_lowrank gated_norm_rank"),
    **_every(16, "index_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim swa_head_dim"),
    **_every(2, "linear_num_key_heads mamba_n_groups mamba_ngroups n_groups o_groups"),
    **_every(4, "linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads n_mamba_heads"),
    **_every(16, "mamba_d_head mamba_head_dim mamba_d_state state_size ssm_state_size"),
    **_every(4, "time_step_rank mamba_dt_rank"),
    # Scores of indexers are sums of rectified ones over the heads: few heads make ties, which top-k breaks at random.
    **_every(16, "index_n_heads"),
    **_every(5.0, "final_logit_softcapping attn_logit_softcapping logits_soft_cap output_logit_soft_cap"),
    **_every(0.25, "logit_scale attention_multiplier lm_head_multiplier"),
    **_every(0.5, "residual_multiplier"),
    **_every(2.0, "embedding_multiplier scale_emb"),
    **_every(4.0, "logits_scaling"),
    **_every(True, "is_decoder attention_bias mlp_bias use_bias lm_head_bias use_qkv_bias add_bias_linear bias"),
    **_every(True, "norm_bias qkv_bias conv_bias mamba_proj_bias attention_out_bias"),
    **_every(False, "no_bias"),
    **_every(0, "pad_token_id"),
    **_every(1, "bos_token_id"),
    **_every(2, "eos_token_id"),
    **_every(3, "image_token_id image_token_index audio_token_id video_token_id sep_token_id decoder_start_token_id"),
}

# What an entry needs beyond its field names, by the model type of the config that its class takes.
_ODD: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_d_head": 32, "attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [3, 4], "patch_size": 2},
    "blt_global_transformer": {"hidden_size": 128},
    "blt_local_decoder": {"hidden_size_global": 128, "num_hidden_layers": 2},
    "blt_local_encoder": {"hidden_size_global": 128, "num_hidden_layers": 1},
    "blt_patcher": {"num_hidden_layers": 1},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "cpmant": {"prompt_length": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "index_topk": 2,
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "intermediate_size": 96,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0, 0.0, 0.0],
        "altup_num_inputs": 2,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "global_head_dim": 32,
    },
    "gemma4_unified_text": {"global_head_dim": 32},
    "glm_moe_dsa": {"indexer_types": ["full", "full", "shared", "full"]},
    "got_ocr2_vision": {"image_size": 32, "mlp_dim": 96, "output_channels": 16, "global_attn_indexes": [0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"mamba_d_head": 32, "layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"num_hidden_layers": 2},
    "hy_v4": {"indexer_types": ["full", "full", "shared", "full"]},
    "inkling2_text": {"unpadded_vocab_size": 120, "n_layers_per_attn_res_block": 2},
    "inkling2_loop_text": {
        "unpadded_vocab_size": 120,
        "num_hidden_layers": 6,
        "layer_types": ["hybrid_sliding", "hybrid"] * 3,
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": 2,
        "loop_gate_rank": 16,
    },
    "inkling_text": {"unpadded_vocab_size": 120},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 32},
    "minicpm3": {"dim_model_base": 32},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "phi4_multimodal_audio": {
        "ext_pw_out_channel": 64,
        "depthwise_separable_out_channel": 64,
        "nemo_conv_channels": 64,
    },
    "phi4_multimodal_vision": {"image_size": 28, "crop_size": 28},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_count": 2,
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
    },
    "reformer": {
        "attn_layers": ["local", "lsh"] * 2,
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [32, 32],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 48},
    "roc_bert": {
        "shape_vocab_size": VOCAB,
        "pronunciation_vocab_size": VOCAB,
        "shape_embed_dim": 32,
        "pronunciation_embed_dim": 32,
    },
    "roformer": {"embedding_size": 32},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    # The last three make two blocks with attention, and these run on a CPU, with older releases too.
    "zamba": {
        "attention_hidden_size": 128,
        "attn_layer_period": 2,
        "attn_layer_offset": 0,
        "use_mamba_kernels": False,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
}

# Entries whose number of blocks is another one, or not what the number of layers says.
_BLOCKS: dict[str, int] = {
    "dory": 6,  # two of four run twice
    "gemma3n_text": 6,  # as many as it takes to have two that share keys and values with earlier ones
    "gemma4": 6,
    "gemma4_text": 6,
    "hrm_text": 16,  # two stacks of two, which run six and two times
    "inkling2_loop_text": 8,  # two of six run twice
    "mllama": 3,  # the cross-attention layer is not called without an image
}


@contextmanager
def _quiet() -> Iterator[None]:
    """No messages of transformers about configs that are not those of real models."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def blocks(model_type: str) -> int:
    """How many block calls a forward of the tiny model makes."""
    return _BLOCKS.get(model_type, BLOCKS)


def build(model_type: str) -> PreTrainedModel:
    """The tiny model of an entry of transformers' list of causal language models, in eval mode."""
    torch.manual_seed(0)
    with _quiet():
        model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        config_class = CONFIG_MAPPING[model_type]
        # Some classes take the text part of the entry's config.
        if model_class.config_class in config_class.sub_configs.values():
            config_class = model_class.config_class
        model = model_class(_tiny_config(config_class))
        return reinitialised(model.eval())


def _tiny_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A tiny config of a class: its fields by name, its lists per block shortened, its sub-configs tiny too."""
    default = config_class()
    names = {field.name for field in dataclasses.fields(config_class)}
    arguments = {name: value for name, value in _TINY.items() if name in names}
    depth = getattr(default, "num_hidden_layers", 0)
    for name in names:
        value = default.__dict__.get(name)
        if isinstance(value, list) and len(value) == depth:
            kinds = list(dict.fromkeys(value))
            arguments[name] = [kinds[i % len(kinds)] for i in range(BLOCKS)]
        elif isinstance(value, PreTrainedConfig):
            arguments[name] = _tiny_config(type(value))
    if "qk_rope_head_dim" in names:
        # Latent attention has no groups of heads, and its rotary part is what `head_dim` means.
        heads = {
            "num_key_value_heads": arguments["num_attention_heads"],
            "head_dim": arguments["qk_rope_head_dim"],
        }
        arguments |= {name: value for name, value in heads.items() if name in names}
    return config_class(**arguments | _ODD.get(config_class.model_type, {}))


def block_list(model: PreTrainedModel) -> nn.ModuleList:
    """The blocks of the language model, by the names that transformers gives such lists."""
    aside = r"\b(vision_tower|vision_model|audio_tower|embed_tokens_extend|image_encoder|patcher|local_encoder)\b"
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.ModuleList)
            and re.search(r"\b(layers?|h|blocks)$", name)
            and not re.search(aside, name)
        ):
            return module
    raise AssertionError(f"{type(model).__name__} has no list of blocks")


def block_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks of the language model, in several stacks where it has several that are built alike."""
    first = block_list(model)
    stacks = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.endswith("_module.layers")
    ]
    return [block for stack in stacks or [first] for block in stack]
