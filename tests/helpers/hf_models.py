"""Tiny randomly initialised transformers models, one of each architecture, and inputs for them."""

import inspect

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
_VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, **_IMAGE}
_SEQUENCES = {
    **{f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 1), ("attention_heads", 4))},
    **{"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 50, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
}
_FAMILIES = {
    "Phi3": ("Phi3ForCausalLM", "Phi3Config", {**_DECODER, "original_max_position_embeddings": 64}),
    "OLMo2": ("Olmo2ForCausalLM", "Olmo2Config", _DECODER),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", {**_DECODER, "head_dim": 8}),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_DECODER, "head_dim": 8}),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 50,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "Falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {
            **{k: v for k, v in _COMMON.items() if k != "intermediate_size"},
            "multi_query": True,
            "new_decoder_architecture": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "GPT-J": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "rotary_dim": 4,
            "vocab_size": 50,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "GPT-Neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 48,
            "attention_types": [[["global"], 2]],
            "vocab_size": 50,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "Bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "MPT": (
        "MptForCausalLM",
        "MptConfig",
        {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 50, "max_seq_len": 64},
    ),
    "Phi": ("PhiForCausalLM", "PhiConfig", {**_DECODER, "num_key_value_heads": 4}),
    "StableLM": ("StableLmForCausalLM", "StableLmConfig", _DECODER),
    "Starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", _DECODER),
    "Cohere": ("CohereForCausalLM", "CohereConfig", _DECODER),
    "Granite": ("GraniteForCausalLM", "GraniteConfig", _DECODER),
    "SmolLM3": ("SmolLM3ForCausalLM", "SmolLM3Config", _DECODER),
    "Nemotron": ("NemotronForCausalLM", "NemotronConfig", _DECODER),
    "GLM": ("GlmForCausalLM", "GlmConfig", {**_DECODER, "head_dim": 8}),
    "Qwen2-MoE": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **_DECODER,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "experts_implementation": "batched_mm",
        },
    ),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **_DECODER,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "experts_implementation": "batched_mm",
        },
    ),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_DECODER,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_shared_experts": 1,
            "experts_implementation": "batched_mm",
        },
    ),
    "Mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
            "vocab_size": 50,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "Mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 8,
            "vocab_size": 50,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "BART": ("BartForConditionalGeneration", "BartConfig", _SEQUENCES),
    "Whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **_SEQUENCES,
            "num_mel_bins": 8,
            "max_source_positions": 8,
            "max_target_positions": 16,
            "begin_suppress_tokens": None,
            "suppress_tokens": None,
        },
    ),
    "Pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", _SEQUENCES),
    "Marian": ("MarianMTModel", "MarianConfig", {**_SEQUENCES, "decoder_vocab_size": 50}),
    "RoBERTa": ("RobertaModel", "RobertaConfig", _COMMON),
    "ELECTRA": ("ElectraModel", "ElectraConfig", {**_COMMON, "embedding_size": 16}),
    "ALBERT": ("AlbertModel", "AlbertConfig", {**_COMMON, "embedding_size": 16}),
    "MPNet": ("MPNetModel", "MPNetConfig", _COMMON),
    "DeBERTa-v2": ("DebertaV2Model", "DebertaV2Config", _COMMON),
    "ModernBERT": (
        "ModernBertModel",
        "ModernBertConfig",
        {**_COMMON, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "CLIP": (
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**_COMMON, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
            "vision_config": _VISION,
            "projection_dim": 16,
        },
    ),
    "SigLIP": ("SiglipModel", "SiglipConfig", {"text_config": _COMMON, "vision_config": _VISION}),
    "DINOv2": ("Dinov2Model", "Dinov2Config", _VISION),
    "DeiT": ("DeiTModel", "DeiTConfig", _VISION),
    "BEiT": ("BeitModel", "BeitConfig", _VISION),
    "Swin": (
        "SwinModel",
        "SwinConfig",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    "SegFormer": (
        "SegformerModel",
        "SegformerConfig",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
        },
    ),
    "ConvNeXt-V2": (
        "ConvNextV2Model",
        "ConvNextV2Config",
        {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "image_size": 32},
    ),
    "RegNet": (
        "RegNetModel",
        "RegNetConfig",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2], "groups_width": 8},
    ),
    "MobileNetV1": ("MobileNetV1Model", "MobileNetV1Config", {"image_size": 32, "depth_multiplier": 0.25}),
    "LeViT": (
        "LevitModel",
        "LevitConfig",
        {
            "image_size": 32,
            "hidden_sizes": [16, 24, 32],
            "num_attention_heads": [2, 3, 4],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
            "attention_ratio": [2, 2, 2],
            "mlp_ratio": [2, 2, 2],
        },
    ),
    "PoolFormer": (
        "PoolFormerModel",
        "PoolFormerConfig",
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_encoder_blocks": 4},
    ),
    "MobileViT": (
        "MobileViTModel",
        "MobileViTConfig",
        {
            "image_size": 32,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 12, 16, 16, 24, 32],
            "num_attention_heads": 2,
        },
    ),
    "T5 (v1)": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 50},
    ),
    "RWKV": (
        "RwkvForCausalLM",
        "RwkvConfig",
        {
            "hidden_size": 32,
            "attention_hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "vocab_size": 50,
        },
    ),
    "CodeGen": (
        "CodeGenForCausalLM",
        "CodeGenConfig",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "rotary_dim": 4,
            "vocab_size": 50,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "GPT-BigCode": (
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
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
    "XLNet": ("XLNetModel", "XLNetConfig", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "vocab_size": 50}),
}
FAMILIES = tuple(_FAMILIES)


def make(name):
    """(a model with random weights everywhere, keyword inputs)."""
    model_class, config_class, keys = (_SPECS | _FAMILIES)[name]
    torch.manual_seed(0)
    model = fill(getattr(transformers, model_class)(getattr(transformers, config_class)(**keys)))
    generator = torch.Generator().manual_seed(0)
    inputs = {"input_ids": torch.randint(3, 50, (2, 7), generator=generator)}
    if "vision_config" in keys or "input_ids" not in inspect.signature(model.forward).parameters:
        size = getattr(getattr(model.config, "vision_config", model.config), "image_size", None) or 32
        images = {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}
        inputs = {**inputs, **images} if "vision_config" in keys else images
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        inputs["decoder_input_ids"] = torch.randint(3, 50, (2, 5), generator=generator)
    if name == "Whisper":
        inputs = {"input_features": torch.randn(2, 8, 16), "decoder_input_ids": inputs["decoder_input_ids"]}
    return model, inputs
