"""The whole fp32 weights out of what ZeRO 3 has divided over ranks, put together by DeepSpeed's own `zero_to_fp32`."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from typing import Any

import torch

from stepfast.integrations.deepspeedranks import FP32_3, RankFile, saved_ranks
from stepfast.integrations.missing import missing

try:
    from deepspeed.utils import zero_to_fp32
except ImportError as error:
    raise missing("deepspeed", error) from error


def whole_weights(names: Collection[str], load: Callable[[str], Any]) -> dict[str, torch.Tensor]:
    """What `get_fp32_state_dict_from_zero_checkpoint` makes of the files of these names. `load`: what is in one of
    them, in host memory; the optimizer's state of one rank at a time.
    """
    files = {file.kind: file for name in names if (file := RankFile.parse(name)) is not None}
    ranks = range(saved_ranks(names))
    models = zero_to_fp32.parse_model_states([_as_file(load(files["model"].of(rank))) for rank in ranks])
    flats = [load(files["optim"].of(rank))["optimizer_state_dict"][FP32_3] for rank in ranks]
    state = zero_to_fp32._get_fp32_state_dict_from_zero3_checkpoint(len(ranks), flats, models, False)
    weights: dict[str, torch.Tensor] = zero_to_fp32.to_torch_tensor(state)
    return weights


def _as_file(state: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


__all__ = ["whole_weights"]
