"""AutoPipe's and AutoDP's choice: the shape that is taken when so many layers are frozen. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from stepfast.torch.elastic_pipeline.partition import balance, shortest_length
from stepfast.torch.elastic_pipeline.shape import Shape


class ShapePlan:
    """The shapes of one training.

    sizes: of the layers, in bytes. length: devices of the pipeline when nothing is frozen. The other arguments are
    ElasticPipeline's. Raises ValueError for a length that does not fit.
    """

    def __init__(
        self, sizes: Sequence[int], *, world_size: int, length: int, packs: bool, replicates: bool,
        device_bytes: int | None, stages_per_device: int,
    ) -> None:  # fmt: skip
        if not 1 <= length <= len(sizes) or world_size % length:
            raise ValueError(
                f"a pipeline of {length} devices: it must divide the {world_size} ranks, and there are "
                f"{len(sizes)} layers"
            )
        self._sizes, self._world_size, self._length = sizes, world_size, length
        self._packs, self._replicates, self._stages_per_device = packs, replicates, stages_per_device
        fullest = balance(sizes, length).largest_cost
        self._device_bytes = device_bytes if device_bytes is not None else fullest

    def shape_for(self, frozen: int) -> Shape:
        """It follows from that number alone, whatever was before."""
        length = self._length
        if frozen:
            limit = self._device_bytes if self._packs else 0.0
            length = shortest_length(self._sizes, length, frozen=frozen, limit=limit)
        active = len(self._sizes) - frozen
        per_device = min(self._stages_per_device, active // length) if length > 1 else 1
        return Shape(
            world_size=self._world_size,
            replicas=self._world_size // (length if self._replicates else self._length),
            frozen=frozen,
            length=length,
            stages=balance(self._sizes, length * per_device, frozen=frozen).stages,
        )
