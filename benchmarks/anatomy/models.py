"""Five families at the sizes that people begin with, made of their configurations' defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.anatomy.plaintraining import train

from stepfast.torch.anatomy.modelsource import ModelSource, model_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model of Transformers with its defaults, and the tokens of a batch's sequences (None: pictures)."""

    name: str
    kind: str
    task: str
    sequence_length: int | None

    def source(self) -> ModelSource:
        return model_source(self.kind, task=self.task, sequence_length=self.sequence_length)

    def step(self, batch_size: int) -> Callable[[], None]:
        """Two plain training steps with AdamW."""

        source = self.source()
        assert source.batch is not None
        return partial(train, source.model, partial(source.batch, batch_size))


SUBJECTS = (
    Subject(name="BERT-base", kind="bert", task="sequence-classification", sequence_length=128),
    Subject(name="GPT-2 small", kind="gpt2", task="causal-lm", sequence_length=128),
    Subject(name="ViT-B/16", kind="vit", task="image-classification", sequence_length=None),
    Subject(name="ResNet-50", kind="resnet", task="image-classification", sequence_length=None),
    Subject(name="T5-small", kind="t5", task="seq2seq-lm", sequence_length=128),
)
