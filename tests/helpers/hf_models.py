"""Tiny randomly initialised transformers models, one of each architecture, and inputs for them."""

import inspect

import torch
import transformers
from discovered import fill

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
_LAYERS = {"hidden_size": 32, "num_hidden_layers": 2}
_HEADS = {**_LAYERS, "num_attention_heads": 4}
_COMMON = {**_HEADS, "intermediate_size": 48, "vocab_size": 50, "max_position_embeddings": 64}
_DECODER = {**_COMMON, "num_key_value_heads": 2, **_TOKENS, "pad_token_id": 0}
_HEADS_OF_8 = {**_DECODER, "head_dim": 8}
_VISION = {**_HEADS, "intermediate_size": 48, "image_size": 16, "patch_size": 4}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 64, **_TOKENS}
_SEQUENCES = {
    **{f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 1), ("attention_heads", 4))},
    **{"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 50, "max_position_embeddings": 64},
    **{"pad_token_id": 0, **_TOKENS, "decoder_start_token_id": 2},
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "vocab_size": 50}
_BATCHED = {"experts_implementation": "batched_mm"}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, **_BATCHED}
_STATES = {**_LAYERS, "state_size": 4, "vocab_size": 50, "pad_token_id": 0, **_TOKENS}
_CONVOLUTIONS = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "image_size": 32}
_STAGES = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2]}
_MOBILE = {"image_size": 32, "depth_multiplier": 0.25}
_SOUND = {**_HEADS, "intermediate_size": 48, "conv_dim": (16, 16), "conv_stride": (2, 2), "conv_kernel": (3, 3)}
_SOUND |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
_CLIP = {**_VISION, "patch_size": 8, "model_type": "clip_vision_model"}


def _of(model, base=None, **keys):
    """The class of a model and the arguments of its configuration."""
    return model, {**(base or {}), **keys}


_SPECS = {
    "Llama": _of("LlamaForCausalLM", _DECODER, attention_bias=True, mlp_bias=True),
    "Qwen2": _of("Qwen2ForCausalLM", _DECODER),
    "Qwen3": _of("Qwen3ForCausalLM", _HEADS_OF_8),
    "Mistral": _of("MistralForCausalLM", _DECODER),
    "Gemma2": _of("Gemma2ForCausalLM", _HEADS_OF_8),
    "Mixtral": _of("MixtralForCausalLM", _DECODER, num_local_experts=4, **_BATCHED),
    "GPT-2": _of("GPT2LMHeadModel", _GPT),
    "GPT-NeoX": _of("GPTNeoXForCausalLM", _COMMON, **_TOKENS),
    "T5": _of("T5ForConditionalGeneration", _T5, num_layers=2, feed_forward_proj="gated-gelu"),
    "BERT": _of("BertModel", _COMMON),
    "DistilBERT": _of("DistilBertModel", dim=32, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=50),
    "ViT": _of("ViTForImageClassification", _VISION),
    "ConvNeXt": _of("ConvNextForImageClassification", _CONVOLUTIONS),
    "ResNet": _of("ResNetForImageClassification", _STAGES, layer_type="bottleneck"),
    "MobileNetV2": _of("MobileNetV2ForImageClassification", _MOBILE),
}
NAMES = tuple(_SPECS)
_FAMILIES = {
    "Phi3": _of("Phi3ForCausalLM", _DECODER, original_max_position_embeddings=64),
    "OLMo2": _of("Olmo2ForCausalLM", _DECODER),
    "Gemma": _of("GemmaForCausalLM", _HEADS_OF_8),
    "Gemma3": _of("Gemma3ForCausalLM", _HEADS_OF_8),
    "OPT": _of(
        "OPTForCausalLM",
        {**_HEADS, **_TOKENS},
        **{"word_embed_proj_dim": 32, "ffn_dim": 48, "vocab_size": 50, "max_position_embeddings": 64},
        pad_token_id=0,
    ),
    "Falcon": _of(
        "FalconForCausalLM",
        {k: v for k, v in _COMMON.items() if k != "intermediate_size"},
        **{"multi_query": True, "new_decoder_architecture": False, **_TOKENS},
    ),
    "GPT-J": _of("GPTJForCausalLM", _GPT, rotary_dim=4),
    "GPT-Neo": _of(
        "GPTNeoForCausalLM",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48},
        **{"attention_types": [[["global"], 2]], "vocab_size": 50, "max_position_embeddings": 64, **_TOKENS},
    ),
    "Bloom": _of("BloomForCausalLM", _TOKENS, hidden_size=32, n_layer=2, n_head=4, vocab_size=50),
    "MPT": _of("MptForCausalLM", d_model=32, n_layers=2, n_heads=4, vocab_size=50, max_seq_len=64),
    "Phi": _of("PhiForCausalLM", _DECODER, num_key_value_heads=4),
    "StableLM": _of("StableLmForCausalLM", _DECODER),
    "Starcoder2": _of("Starcoder2ForCausalLM", _DECODER),
    "Cohere": _of("CohereForCausalLM", _DECODER),
    "Granite": _of("GraniteForCausalLM", _DECODER),
    "SmolLM3": _of("SmolLM3ForCausalLM", _DECODER),
    "Nemotron": _of("NemotronForCausalLM", _DECODER),
    "GLM": _of("GlmForCausalLM", _HEADS_OF_8),
    "Qwen2-MoE": _of("Qwen2MoeForCausalLM", _DECODER, num_experts=4, shared_expert_intermediate_size=16, **_EXPERTS),
    "Qwen3-MoE": _of("Qwen3MoeForCausalLM", _HEADS_OF_8, num_experts=4, **_EXPERTS),
    "DeepSeek-V3": _of(
        "DeepseekV3ForCausalLM",
        {**_DECODER, **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4},
        **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 16},
        **{"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    ),
    "GPT-OSS": _of("GptOssForCausalLM", _HEADS_OF_8, num_local_experts=4, num_experts_per_tok=2, **_BATCHED),
    "Mamba": _of("MambaForCausalLM", _STATES),
    "Mamba2": _of("Mamba2ForCausalLM", _STATES, num_heads=8, head_dim=8, n_groups=1, chunk_size=8),
    "BART": _of("BartForConditionalGeneration", _SEQUENCES),
    "Whisper": _of(
        "WhisperForConditionalGeneration",
        _SEQUENCES,
        **{"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
        **{"begin_suppress_tokens": None, "suppress_tokens": None},
    ),
    "Pegasus": _of("PegasusForConditionalGeneration", _SEQUENCES),
    "Marian": _of("MarianMTModel", _SEQUENCES, decoder_vocab_size=50),
    "RoBERTa": _of("RobertaModel", _COMMON),
    "ELECTRA": _of("ElectraModel", _COMMON, embedding_size=16),
    "ALBERT": _of("AlbertModel", _COMMON, embedding_size=16),
    "MPNet": _of("MPNetModel", _COMMON),
    "DeBERTa-v2": _of("DebertaV2Model", _COMMON),
    "ModernBERT": _of("ModernBertModel", _COMMON, pad_token_id=0, cls_token_id=1, sep_token_id=2, **_TOKENS),
    "CLIP": _of(
        "CLIPModel",
        {"text_config": {**_COMMON, **_TOKENS, "pad_token_id": 0}},
        **{"vision_config": _VISION, "projection_dim": 16},
    ),
    "SigLIP": _of("SiglipModel", text_config=_COMMON, vision_config=_VISION),
    "DINOv2": _of("Dinov2Model", _VISION),
    "DeiT": _of("DeiTModel", _VISION),
    "BEiT": _of("BeitModel", _VISION),
    "Swin": _of(
        "SwinModel",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16},
        **{"depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    "SegFormer": _of(
        "SegformerModel",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]},
        **{"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
    ),
    "ConvNeXt-V2": _of("ConvNextV2Model", _CONVOLUTIONS),
    "RegNet": _of("RegNetModel", _STAGES, groups_width=8),
    "MobileNetV1": _of("MobileNetV1Model", _MOBILE),
    "LeViT": _of(
        "LevitModel",
        {"image_size": 32, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4]},
        **{"depths": [1, 1, 1], "key_dim": [8, 8, 8], "attention_ratio": [2, 2, 2], "mlp_ratio": [2, 2, 2]},
    ),
    "PoolFormer": _of("PoolFormerModel", hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_encoder_blocks=4),
    "MobileViT": _of(
        "MobileViTModel",
        {"image_size": 32, "hidden_sizes": [16, 24, 32], "num_attention_heads": 2},
        neck_hidden_sizes=[8, 8, 12, 16, 16, 24, 32],
    ),
    "T5 (v1)": _of("T5ForConditionalGeneration", _T5, num_layers=1),
    "RWKV": _of("RwkvForCausalLM", _LAYERS, attention_hidden_size=32, intermediate_size=48, vocab_size=50),
    "CodeGen": _of("CodeGenForCausalLM", _GPT, rotary_dim=4),
    "GPT-BigCode": _of("GPTBigCodeForCausalLM", _GPT),
    "XLNet": _of("XLNetModel", d_model=32, n_layer=2, n_head=4, d_inner=48, vocab_size=50),
    "Wav2Vec2": _of("Wav2Vec2Model", _SOUND),
    "HuBERT": _of("HubertModel", _SOUND),
    "EnCodec": _of(
        "EncodecModel",
        **{"hidden_size": 16, "num_filters": 4, "codebook_size": 16, "codebook_dim": 16, "upsampling_ratios": [4, 2]},
        **{"num_lstm_layers": 1, "target_bandwidths": [1.5], "sampling_rate": 1000},
    ),
    "LLaVA": _of("LlavaForConditionalGeneration", vision_config=_CLIP, text_config=_DECODER, image_token_index=49),
    "Qwen2.5-VL": _of(
        "Qwen2_5_VLForConditionalGeneration",
        vision_config={
            **{"hidden_size": 32, "depth": 2, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32},
            **{"patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1]},
        },
        text_config={**_DECODER, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        **{"image_token_id": 49, "vision_start_token_id": 48, "vision_end_token_id": 47, "video_token_id": 46},
    ),
}
FAMILIES = tuple(_FAMILIES)
_MIXTURES = {  # for the tests of experts alone
    "MiniMax-M2": _of("MiniMaxM2ForCausalLM", _HEADS_OF_8, num_local_experts=4, **_EXPERTS),
    "LFM2-MoE": _of(
        "Lfm2MoeForCausalLM",
        {**_DECODER, **_EXPERTS, "layer_types": ["full_attention"] * 2},
        **{"num_experts": 4, "num_dense_layers": 0},
    ),
    "Llama 4": _of(
        "Llama4ForCausalLM",
        {**_HEADS_OF_8, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"intermediate_size_mlp": 48, "interleave_moe_layer_step": 1},
    ),
    "OLMoE": _of("OlmoeForCausalLM", _DECODER, num_experts=4, num_experts_per_tok=2, **_BATCHED),
    "GraniteMoE": _of("GraniteMoeForCausalLM", _DECODER, num_local_experts=4, num_experts_per_tok=2, **_BATCHED),
    "AFMoE": _of(
        "AfmoeForCausalLM",
        {**_HEADS_OF_8, **_EXPERTS, "num_experts": 4, "num_shared_experts": 1, "num_dense_layers": 0},
        **{"layer_types": ["full_attention"] * 2, "sliding_window": 8},
    ),
    "PhiMoE": _of("PhimoeForCausalLM", _DECODER, num_local_experts=4, num_experts_per_tok=2, **_BATCHED),
}


def make(name):
    """(a model with random weights everywhere, keyword inputs)."""
    model_name, keys = (_SPECS | _FAMILIES | _MIXTURES)[name]
    torch.manual_seed(0)
    model_class = getattr(transformers, model_name)
    model = fill(model_class(model_class.config_class(**keys)))
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
    return model, _INPUTS[name]() if name in _INPUTS else inputs


def deep(name, layers, **keys):
    """A model of so many layers and with other keys of its configuration, and inputs."""
    model, inputs = make(name)
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("layer_types", "no_rope_layers")}
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = layers
    return fill(type(model)(type(model.config)(**(config | keys)))), inputs


def _tokens_with(images, size):
    """Token ids, of which some stand for an image."""
    return {"input_ids": torch.tensor([[3, 48, *[49] * images, 47, 5, 6, 7]]), "pixel_values": torch.randn(size)}


_INPUTS = {
    "Wav2Vec2": lambda: {"input_values": torch.randn(2, 400)},
    "HuBERT": lambda: {"input_values": torch.randn(2, 400)},
    "EnCodec": lambda: {"input_values": torch.randn(1, 1, 400)},
    "LLaVA": lambda: _tokens_with(4, (1, 3, 16, 16)),
    "Qwen2.5-VL": lambda: _tokens_with(4, (16, 96)) | {"image_grid_thw": torch.tensor([[1, 4, 4]])},
}
