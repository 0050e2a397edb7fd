"""Puts a record and what happens within kernels together into a timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepfast.torch.anatomy.recorder import Adopt, Begin, Call, End, Recorder, Resize
from stepfast.torch.anatomy.timeline import Block, Change, Component, Phase, Timeline
from stepfast.torch.anatomy.workspaces import KernelRun, Workspaces


@dataclass(frozen=True, slots=True)
class Assembled:
    """`calls` are all that were recorded, each with its seconds."""

    timeline: Timeline
    calls: Sequence[tuple[Call, float]]


def assemble(
    recorder: Recorder, workspaces: Workspaces, seconds: Callable[[Call, KernelRun | None], float]
) -> Assembled:
    """The timeline of what was recorded. `seconds` says how long a call takes on the device that is predicted."""
    assembly = _Assembly(recorder, workspaces, seconds)
    return Assembled(assembly.timeline(), assembly.calls)


class _Assembly:
    def __init__(
        self, recorder: Recorder, workspaces: Workspaces, seconds: Callable[[Call, KernelRun | None], float]
    ) -> None:
        self._recorder, self._workspaces, self._seconds = recorder, workspaces, seconds
        self._blocks = list(recorder.blocks)  # workspaces are added behind them
        self._changes: list[Change] = []
        self._now = 0.0
        self.calls: list[tuple[Call, float]] = []

    def timeline(self) -> Timeline:
        for entry in self._recorder.log:
            match entry:
                case Begin(index):
                    self._call(self._recorder.calls[index])
                case Adopt(adopted):
                    self._change(adopted, True, self._blocks[adopted].phase, self._blocks[adopted].step)
                case Resize(old, new):
                    block = self._blocks[new]
                    self._change(old, False, block.phase, block.step)
                    self._change(new, True, block.phase, block.step)
                case End(block_index, phase, step):
                    self._change(block_index, False, phase, step)
        return Timeline(blocks=self._blocks, changes=self._changes)

    def _call(self, call: Call) -> None:
        run = self._workspaces.of(call) if call.phase is not Phase.SETUP else None
        if run is not None and sum(piece.made is not None for piece in run.pieces) == len(call.made):
            self._run(call, run)
        else:
            for block in call.made:
                self._change(block, True, call.phase, call.step)
        took = self._seconds(call, run)
        self.calls.append((call, took))
        self._now += took

    def _run(self, call: Call, run: KernelRun) -> None:
        taken: dict[int, int] = {}
        for piece in run.pieces:
            if not piece.is_birth:
                self._change(taken[piece.ordinal], False, call.phase, call.step)
                continue
            if piece.made is None:
                block = len(self._blocks)
                assert piece.size_bytes is not None
                self._blocks.append(
                    Block(
                        piece.size_bytes, Component.TEMPORARY, call.module, _workspace_of(call), call.phase, call.step
                    )
                )
            else:
                block = call.made[piece.made]
                if piece.size_bytes is not None:
                    self._blocks[block].size_bytes = piece.size_bytes  # the kernel knows better than its stand-in
            taken[piece.ordinal] = block
            self._change(block, True, call.phase, call.step)

    def _change(self, block: int, is_birth: bool, phase: Phase, step: int) -> None:
        if block in self._recorder.left_out:
            return
        self._changes.append(Change(block, is_birth, phase, step, self._now))


def _workspace_of(call: Call) -> str:
    return f"{call.signature.operator.name()} (workspace)"
