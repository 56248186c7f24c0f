"""Tiny randomly initialised transformers models, one of each architecture, and inputs for them."""

import torch
import transformers
from discovered import fill

_COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
_DECODER = {**_COMMON, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_IMAGE = {"image_size": 16, "patch_size": 4}
_SPECS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {**_DECODER, "attention_bias": True, "mlp_bias": True}),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _DECODER),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 8}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", _DECODER),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_DECODER, "head_dim": 8}),
    "Mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_DECODER, "num_local_experts": 4, "experts_implementation": "batched_mm"},
    ),
    "GPT-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 50,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_COMMON, "bos_token_id": 1, "eos_token_id": 2}),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 50,
            "feed_forward_proj": "gated-gelu",
        },
    ),
    "BERT": ("BertModel", "BertConfig", _COMMON),
    "DistilBERT": (
        "DistilBertModel",
        "DistilBertConfig",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 50},
    ),
    "ViT": (
        "ViTForImageClassification",
        "ViTConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, **_IMAGE},
    ),
    "ConvNeXt": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "image_size": 32},
    ),
    "ResNet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2], "layer_type": "bottleneck"},
    ),
    "MobileNetV2": (
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        {"image_size": 32, "depth_multiplier": 0.25},
    ),
}
NAMES = tuple(_SPECS)


def make(name):
    """(a model with random weights everywhere, keyword inputs)."""
    model_class, config_class, keys = _SPECS[name]
    model = fill(getattr(transformers, model_class)(getattr(transformers, config_class)(**keys)))
    generator = torch.Generator().manual_seed(0)
    if "ForImage" in model_class:
        size = model.config.image_size if hasattr(model.config, "image_size") else 32
        return model, {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}
    inputs = {"input_ids": torch.randint(3, 50, (2, 7), generator=generator)}
    return model, inputs | ({"decoder_input_ids": inputs["input_ids"][:, :5]} if name == "T5" else {})
