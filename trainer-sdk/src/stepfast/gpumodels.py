"""NVIDIA's GPUs as their driver calls them, and the memory that each has. Pure: no torch.

One name may be the beginning of another's that is a different device (A10 and A10G, H100 and H100 NVL, a whole A100 and
a MIG slice of it), so that only whole names count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MIB = 1 << 20
_VENDOR = re.compile(r"^(?:nvidia |tesla |geforce )+")
_PROFILE = re.compile(r"\bmig[- ](?:\d+c\.)?\d+g\.(\d+)gb\b")
_SAME = 0.1  # drivers tell a few hundredths less or more of one model, as ECC and their own reserve have it


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """A whole GPU. `name` is ours; `memory_bytes` what nvidia-smi shows as total with drivers from 525 on."""

    name: str
    memory_bytes: int


# The driver's name without its vendor and with blanks alone, as a regular expression; the memory in MiB.
_MODELS: dict[str, tuple[str, int]] = {
    "v100-16gb": (r"v100 (?:sxm2|sxm3|pcie|fhhl) 16gb", 16160),
    "v100-32gb": (r"v100 (?:sxm2|sxm3|pcie|dgxs) 32gb", 32510),
    "t4": ("t4", 15360),
    "a10": ("a10", 23028),
    "l4": ("l4", 23034),
    "l40s": ("l40s", 46068),
    "rtx-4090": ("rtx 4090", 24564),
    "a100-40gb": (r"a100 (?:sxm4?|pcie) 40gb", 40960),
    "a100-80gb": (r"a100 (?:sxm4? 80gb|80gb pcie|pcie 80gb)", 81920),
    "h100-80gb": (r"h100 80gb hbm3", 81559),
    "h100-pcie-80gb": (r"h100 pcie", 81559),
    "h100-nvl-94gb": (r"h100 nvl", 95830),
    "h200-141gb": ("h200", 143771),
    "b200-180gb": ("b200", 183359),
}
MODELS: dict[str, GpuModel] = {name: GpuModel(name=name, memory_bytes=mib * _MIB) for name, (_, mib) in _MODELS.items()}


def model_called(name: str) -> GpuModel | None:
    """The model that the driver calls so, as "NVIDIA A100-SXM4-80GB", or a node's label, with `-` for blanks; None for
    any other, a slice or a share of one among them.
    """
    words = _words(name)
    return next((MODELS[ours] for ours, (pattern, _) in _MODELS.items() if re.fullmatch(pattern, words)), None)


def is_like(model: GpuModel, memory_bytes: int) -> bool:
    """Whether a device of that name and so much memory is the whole of it."""
    return abs(memory_bytes - model.memory_bytes) <= _SAME * model.memory_bytes


def slice_bytes(name: str) -> int | None:
    """The most that a MIG slice has that is called so, as "A100-SXM4-80GB-MIG-1g.10gb" or "mig-1g.10gb"; None where the
    name has no profile. A profile's name rounds up: of 1g.12gb there are 10.75 GiB.
    """
    profile = _PROFILE.search(name.lower())
    return int(profile.group(1)) << 30 if profile is not None else None


def _words(name: str) -> str:
    return _VENDOR.sub("", " ".join(name.lower().replace("-", " ").split()))
