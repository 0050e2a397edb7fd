"""Architectures of Transformers, small, and what each has that is hard to predict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from families import Family

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 1000,
}  # fmt: skip
LAYERS = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 1000,
}  # fmt: skip


def _words(count: int) -> dict[str, Any]:
    words = torch.randint(1, 900, (count, 32))
    return {"input_ids": words, "labels": words}


def _masked_words(count: int) -> dict[str, Any]:
    return {**_words(count), "attention_mask": torch.ones(count, 32, dtype=torch.long)}


def _sentences(count: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(1, 900, (count, 32)), "labels": torch.randint(0, 2, (count,))}


def _pictures(side: int) -> Callable[[int], dict[str, Any]]:
    return lambda count: {
        "pixel_values": torch.randn(count, 3, side, side),
        "labels": torch.randint(0, 2, (count,)),
    }


def _captions(count: int) -> dict[str, Any]:
    return {
        "input_ids": torch.randint(3, 900, (count, 16)),
        "pixel_values": torch.randn(count, 3, 32, 32),
        "return_loss": True,
    }


def _speech(count: int) -> dict[str, Any]:
    return {"input_features": torch.randn(count, 20, 100), "labels": torch.randint(4, 900, (count, 16))}


def _made(kind: str, configuration: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: nn.Module = getattr(hf, kind)(getattr(hf, configuration)(**options))
        return model

    return make


_CLIP = hf.CLIPConfig(
    text_config={**SIZES, "eos_token_id": 2},
    vision_config={**{name: SIZES[name] for name in SIZES if name != "vocab_size"}, "image_size": 32, "patch_size": 8},
    projection_dim=32,
)

ARCHITECTURES = {
    "Llama: grouped queries, a mask that masks nothing": Family(
        _made("LlamaForCausalLM", "LlamaConfig", **SIZES, num_key_value_heads=2, use_cache=False), _masked_words
    ),
    "Mistral: a sliding window": Family(
        _made("MistralForCausalLM", "MistralConfig", **SIZES, num_key_value_heads=2, sliding_window=16), _words
    ),
    "Mixtral: experts": Family(
        _made("MixtralForCausalLM", "MixtralConfig", **SIZES, num_key_value_heads=2, num_local_experts=4), _words
    ),
    "Mamba: a scan": Family(
        _made(
            "MambaForCausalLM", "MambaConfig", hidden_size=64, num_hidden_layers=2, vocab_size=1000, state_size=8,
            use_cache=False,
        ),
        _words,
    ),
    "BART: masks of floating-point numbers": Family(
        _made("BartForConditionalGeneration", "BartConfig", **LAYERS), _words
    ),
    "DeBERTa: labels that are looked for": Family(
        _made("DebertaV2ForSequenceClassification", "DebertaV2Config", **SIZES), _sentences
    ),
    "Whisper: convolutions over time": Family(
        _made(
            "WhisperForConditionalGeneration", "WhisperConfig", **LAYERS, num_mel_bins=20, max_source_positions=50,
            max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        ),
        _speech,
    ),
    "Swin: windows, a mean over a transposed view": Family(
        _made(
            "SwinForImageClassification", "SwinConfig", image_size=32, patch_size=4, embed_dim=16, depths=[2, 2],
            num_heads=[2, 4], window_size=4,
        ),
        _pictures(32),
    ),
    "ConvNeXt: rates that are read from tensors": Family(
        _made("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2),
        _pictures(64),
    ),
    "CLIP: two towers, the mean of two losses": Family(lambda: hf.CLIPModel(_CLIP), _captions),
}  # fmt: skip
