"""Five families of models, small: what they are made of and what they are trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)


@dataclass(frozen=True)
class Family:
    model: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]


def _words(count: int, length: int) -> torch.Tensor:
    return torch.randint(1, 900, (count, length))


def _classes(count: int) -> torch.Tensor:
    return torch.randint(0, 2, (count,))


def _bert() -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=1000)
    )


def _gpt() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=64, n_layer=2, n_head=4, vocab_size=1000, n_positions=64, bos_token_id=0, eos_token_id=0,
            loss_type="ForCausalLMLoss",
        )
    )  # fmt: skip


def _gpt_batch(count: int) -> dict[str, torch.Tensor]:
    words = _words(count, 32)
    return {"input_ids": words, "labels": words}


def _vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            image_size=32,
            patch_size=8,
        )
    )


def _resnet() -> nn.Module:
    return ResNetForImageClassification(ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2]))


def _t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=1000, decoder_start_token_id=0)
    )


def _pictures(side: int) -> Callable[[int], dict[str, Any]]:
    return lambda count: {"pixel_values": torch.randn(count, 3, side, side), "labels": _classes(count)}


FAMILIES = {
    "bert": Family(_bert, lambda count: {"input_ids": _words(count, 32), "labels": _classes(count)}),
    "gpt": Family(_gpt, _gpt_batch),
    "vit": Family(_vit, _pictures(32)),
    "resnet": Family(_resnet, _pictures(64)),
    "t5": Family(_t5, lambda count: {"input_ids": _words(count, 32), "labels": _words(count, 16)}),
}


def _wide_gpt() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=256, n_layer=6, n_head=4, vocab_size=1000, n_positions=64, bos_token_id=0, eos_token_id=0,
            loss_type="ForCausalLMLoss",
        )
    )  # fmt: skip


# Large enough that a layer, on its way between ranks at the wrong moment, is a small part of the whole.
WIDE_GPT = Family(_wide_gpt, lambda count: {"input_ids": (words := _words(count, 64)), "labels": words})
