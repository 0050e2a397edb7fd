"""A small GPT-2 that learns to count, with Hugging Face's Trainer.

What Stepfast asks of a Trainer is a class to put before it: look for "Stepfast:". Killed at any moment and started
again, also where the disk is empty, it goes on bit for bit.

    stepfast run train.py
    stepfast run --nproc-per-node 2 train.py --crash-at-step 45      see a recovery
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from stepfast.integrations.transformers import StepfastTrainerMixin

NUMBERS, LENGTH = 64, 16


# Stepfast: before Trainer, or before a class of your own that is made of it.
class CountingTrainer(StepfastTrainerMixin, Trainer):
    """Trainer, whose checkpoints are steps of the job."""


class Crash(TrainerCallback):
    """The last rank kills itself, in the first attempt."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        is_first = os.environ.get("STEPFAST_ATTEMPT") == "1"
        if state.global_step == self._step and is_first and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def counting(size: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows that count upwards from somewhere."""
    begins = torch.randint(NUMBERS, (size, 1), generator=torch.Generator().manual_seed(seed))
    rows = (begins + torch.arange(LENGTH)) % NUMBERS
    return [{"input_ids": row, "labels": row} for row in rows]


def main(options: argparse.Namespace) -> None:
    """Trains, from the latest step on if there is one, and exports the result."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=NUMBERS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0,
                        eos_token_id=0)  # fmt: skip
    arguments = TrainingArguments(
        output_dir=options.output, max_steps=options.steps, save_steps=10, save_total_limit=2, eval_strategy="steps",
        eval_steps=10, load_best_model_at_end=True, per_device_train_batch_size=16, learning_rate=3e-3, report_to=[],
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = CountingTrainer(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=counting(512, 1), eval_dataset=counting(64, 2),
        callbacks=[Crash(options.crash_at_step)],
    )  # fmt: skip
    trainer.train()  # Stepfast: goes on from the job's latest step; False begins anew
    # Stepfast: a regular checkpoint, for from_pretrained and for plain Trainers.
    trainer.export(trainer.state.global_step, Path(options.output, "exported"))
    print(f"loss {trainer.evaluate()['eval_loss']:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--output", default="counting")
    parser.add_argument("--crash-at-step", type=int, default=0)
    main(parser.parse_args())
