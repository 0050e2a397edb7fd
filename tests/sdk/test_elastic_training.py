"""A training that goes on with fewer ranks, then with more, ends as one that nobody disturbed, within rounding.

The measure: the largest difference of a tensor's elements, relative to the largest magnitude in that tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("elastictraining.py")
LAST, EPOCH, SAMPLES = 17, 5, 62  # steps; steps of an epoch
RELATIVE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """An attempt: on so many ranks it trains to `last`, and saves one step; what is behind that is lost."""

    ranks: int
    last: int
    save: int


UNDISTURBED = [Stretch(ranks=2, last=LAST, save=LAST)]
# The first goes on at an epoch's end, the second in the middle of one.
CHANGES = {
    "2 -> 1 -> 2": [
        Stretch(ranks=2, last=7, save=5),
        Stretch(ranks=1, last=12, save=8),
        Stretch(ranks=2, last=LAST, save=LAST),
    ],
    "4 -> 2 -> 3": [
        Stretch(ranks=4, last=7, save=5),
        Stretch(ranks=2, last=12, save=8),
        Stretch(ranks=3, last=LAST, save=LAST),
    ],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`samples`: by step, those that committed work has trained on, over all ranks."""

    tensors: dict[str, list[float]]
    losses: dict[int, float]
    samples: dict[int, list[int]]


def train(launcher: Any, kind: str, stretches: list[Stretch], folder: Path) -> Outcome:
    folder.mkdir()
    losses: dict[int, float] = {}
    samples: dict[int, list[int]] = {}
    begin = 0
    for attempt, stretch in enumerate(stretches, start=1):
        finished = launcher.run(
            SCRIPT, kind, str(folder), "--last", str(stretch.last), "--save", str(stretch.save), ranks=stretch.ranks,
            attempt=attempt,
        )  # fmt: skip
        assert finished.code == 0, finished.output
        notes = [json.loads((folder / f"noted.{attempt}.{rank}.json").read_text()) for rank in range(stretch.ranks)]
        assert [note["begin"] for note in notes] == [begin] * stretch.ranks
        assert [list(map(int, note["noted"])) for note in notes] == [list(range(begin + 1, stretch.last + 1))] * len(
            notes
        )
        for step in range(begin + 1, stretch.save + 1):
            losses[step] = notes[0]["losses"][str(step)]
            samples[step] = [number for note in notes for number in note["noted"][str(step)]]
        begin = stretch.save
    tensors = json.loads((folder / f"results.{len(stretches)}.json").read_text())
    return Outcome(tensors=tensors, losses=losses, samples=samples)


@pytest.fixture(scope="module")
def undisturbed(make_launcher: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Two ranks under DDP, all the time."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return train(make_launcher(folder), "replicated", UNDISTURBED, folder / "out")


def distance(found: list[float], expected: list[float]) -> float:
    largest = max(map(abs, expected))
    return max(abs(a - b) for a, b in zip(found, expected, strict=True)) / largest


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
@pytest.mark.parametrize("change", CHANGES)
def test_another_number_of_ranks_ends_as_the_undisturbed_run(
    kind: str, change: str, undisturbed: Outcome, launcher: Any, tmp_path: Path
) -> None:
    outcome = train(launcher, kind, CHANGES[change], tmp_path / "out")

    assert outcome.samples.keys() == undisturbed.samples.keys() == set(range(1, LAST + 1))
    # Batch by batch the same samples in the same order; of an epoch every sample once.
    assert outcome.samples == undisturbed.samples
    for first in range(1, LAST - EPOCH + 2, EPOCH):
        epoch = [number for step in range(first, first + EPOCH) for number in outcome.samples[step]]
        assert sorted(epoch) == list(range(SAMPLES))
    assert outcome.losses == pytest.approx(undisturbed.losses, rel=RELATIVE)
    assert outcome.tensors.keys() == undisturbed.tensors.keys()
    assert len(outcome.tensors) == 3 * 4
    apart = {name: distance(found, undisturbed.tensors[name]) for name, found in outcome.tensors.items()}
    assert max(apart.values()) < RELATIVE, apart
