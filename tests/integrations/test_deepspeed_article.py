"""The configurations of an article that no release of DeepSpeed could run: made valid, and trained with.

`article.txt` is its code as the page shows it, without indentation: no Python as a whole.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepfast.integrations.deepspeedconfig import RELEASE, fix
from stepfast.integrations.deepspeedconfig.source import read_python

HERE = Path(__file__).parent
TEXT = (HERE / "article.txt").read_text(encoding="utf-8")
NAMES = ["hparams:16", "hparams:48"]

SECOND = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "fast_init": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 500_000_000,
        "allgather_bucket_size": 500_000_000,
        "load_from_fp32_weights": True,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_prefetch_bucket_size": 500_000_000,
        "stage3_param_persistence_threshold": 100_000_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
    },
    "activation_checkpointing": {"partition_activations": True},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000},
    "gradient_clipping": 1.0,
    "train_batch_size": 32,
    "gradient_accumulation_steps": 4,
    "steps_per_print": 10,
}


@pytest.mark.parametrize("name", NAMES)
def test_articles_configuration_becomes_valid(name: str, deepspeed: Any) -> None:
    configuration = read_python(TEXT, name).configuration
    assert deepspeed.refusal(configuration) is not None

    assert deepspeed.refusal(fix(configuration).configuration) is None


def test_articles_second_configuration_keeps_all_that_means_something() -> None:
    source = read_python(TEXT, NAMES[1])
    fixed = fix(source.configuration)

    assert fixed.configuration == SECOND
    assert [rewrite.path.partition(".")[2] for rewrite in source.rewrites] == [
        "reduce_bucket_size", "allgather_bucket_size", "reduce_scatter", "contiguous_gradients", "overlap_comm",
    ]  # fmt: skip
    assert {rewrite.path for rewrite in fixed.rewrites} == {
        "gradient_clipping", "fp16.scale_window",
        *(
            f"zero_optimization.{key}"
            for key in (
                "partition_activations", "cpu_offload", "min_num_size", "stage3_gather_fp16_weights_on_model_save",
                "stage3_gather_fp16_weights_during_training", "offload_param", "offload_param.pin_memory", "pin_memory",
                "fast_init", "sync_bn_in_backward",
            )
        ),
    }  # fmt: skip


def test_documentation_shows_what_comes_of_it() -> None:
    page = (HERE.parents[1] / "docs" / "deepspeed.md").read_text(encoding="utf-8")
    before, after = (re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)[-1] for language in ("python", "json"))

    source = read_python(before)
    fixed = fix(source.configuration, own_optimizer=True)

    assert fixed.configuration == json.loads(after)
    assert len(source.rewrites) + len(fixed.rewrites) == 14
    assert "in fourteen changes" in page
    assert f"release ({RELEASE})" in page


@pytest.mark.parametrize("name", NAMES)
def test_articles_training_runs(name: str) -> None:
    fixed = fix(read_python(TEXT, name).configuration, own_optimizer=True).configuration
    # fp16 needs a device, which a test cannot count on: here it trains in bf16, and the test above has shown that
    # DeepSpeed takes the block as it is.
    fixed["bf16"] = {"enabled": fixed.pop("fp16")["enabled"]}

    answer = subprocess.run(
        [sys.executable, HERE / "deepspeedtraining.py"],
        input=json.dumps(fixed),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
    )

    assert answer.returncode == 0, answer.stderr
    trained = json.loads(answer.stdout)
    assert trained["steps"] == 3
    assert trained["losses"][-1] < trained["losses"][0]
