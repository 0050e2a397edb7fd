"""`stepfast deepspeed-config fix`: what it writes where, what it reports, and how it ends."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from stepfast.cli import deepspeedconfig
from stepfast.integrations.deepspeedconfig import RELEASE

VALID = {"train_batch_size": 8, "gradient_clipping": 1.0}
BROKEN = {"train_batch_size": 8, "gradient_clipping": True, "nebula": {"enabled": True}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    code: int
    out: str
    err: str


@pytest.fixture
def fix() -> Callable[..., Said]:
    """`fix(file, …)`: the command in this process, piped."""
    app = typer.Typer()
    deepspeedconfig.register(app)

    def call(*arguments: object) -> Said:
        result = CliRunner().invoke(app, ["deepspeed-config", "fix", *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Said(code=result.exit_code, out=result.stdout, err=result.stderr)

    return call


@pytest.fixture
def written(tmp_path: Path) -> Callable[[object, str], Path]:
    """`written(document, name)`: a file that holds it, as JSON unless it is text."""

    def write(document: object, name: str = "ds.json") -> Path:
        file = tmp_path / name
        file.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
        return file

    return write


def test_configuration_goes_to_standard_output_and_the_report_to_standard_error(fix: Any, written: Any) -> None:
    file = written(BROKEN)

    said = fix(file)

    assert (said.code, json.loads(said.out)) == (0, VALID)
    assert said.err.splitlines()[0] == 'nebula: {"enabled": true} removed'
    assert "    DeepSpeed 0.19.7 removed Nebula" in said.err
    assert "gradient_clipping: true -> 1.0\n    a number is wanted" in said.err
    assert said.err.splitlines()[-1] == f"{file}: 2 changes for DeepSpeed {RELEASE}"
    assert json.loads(file.read_text()) == BROKEN


def test_report_names_what_was_added_what_moved_and_what_was_there_twice(fix: Any, written: Any) -> None:
    said = fix(written('{"zero_optimization": {"stage": 1, "stage": 1, "allgather_size": 5e8}}'))

    assert "zero_optimization.stage: 1\n    the key is there twice" in said.err
    assert (
        "zero_optimization.allgather_size: 500000000 -> zero_optimization.allgather_bucket_size: 500000000\n"
        in said.err
    )
    assert "train_micro_batch_size_per_gpu: 1 added\n" in said.err
    assert "note: gradient_clipping is not said" in said.err


def test_valid_configuration_is_said_to_be_and_written_as_it_is(fix: Any, written: Any) -> None:
    file = written(VALID)

    said = fix(file)

    assert (said.code, json.loads(said.out)) == (0, VALID)
    assert said.err == f"{file}: valid for DeepSpeed {RELEASE}, nothing to change\n"


@pytest.mark.parametrize(("document", "code"), [(VALID, 0), (BROKEN, 1)], ids=["valid", "broken"])
def test_check_only_reports(document: Any, code: int, fix: Any, written: Any) -> None:
    file = written(document)

    said = fix(file, "--check")

    assert (said.code, said.out) == (code, "")
    assert json.loads(file.read_text()) == document


def test_out_is_a_new_file_unless_forced(fix: Any, written: Any, tmp_path: Path) -> None:
    file, out = written(BROKEN), tmp_path / "fixed" / "ds.json"

    first, second = fix(file, "--out", out), fix(file, "--out", out)

    assert (first.code, first.out) == (0, "")
    assert json.loads(out.read_text()) == VALID
    assert second.code == 2
    assert "exists already" in second.err
    assert fix(file, "--out", out, "--force").code == 0


def test_in_place_replaces_the_file_and_keeps_its_mode(fix: Any, written: Any) -> None:
    file = written(BROKEN)
    file.chmod(0o640)

    said = fix(file, "--in-place")

    assert (said.code, said.out) == (0, "")
    assert json.loads(file.read_text()) == VALID
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert list(file.parent.iterdir()) == [file]


def test_in_place_leaves_a_valid_file_alone(fix: Any, written: Any) -> None:
    file = written('{ "train_batch_size" : 8, "gradient_clipping": 1.0 }')

    assert fix(file, "--in-place").code == 0
    assert file.read_text() == '{ "train_batch_size" : 8, "gradient_clipping": 1.0 }'


def test_python_file_gives_its_configuration_as_json(fix: Any, written: Any) -> None:
    file = written("hparams = Hparams(train_batch_size=8, gradient_clipping={'clip_value': 1.0})", "train.py")

    assert json.loads(fix(file).out) == VALID
    assert "no JSON file: name a file with --out" in fix(file, "--in-place").err


def test_text_that_does_not_begin_as_json_is_read_as_python(fix: Any, written: Any) -> None:
    assert json.loads(fix(written("config = {'train_batch_size': 8}", "snippet.txt")).out) == {"train_batch_size": 8}
    assert json.loads(fix(written(' {"train_batch_size": 8}', "config")).out) == {"train_batch_size": 8}


def test_comments_are_skipped_to_see_what_a_text_is(fix: Any, written: Any) -> None:
    assert json.loads(fix(written('// of the cluster\n{"train_batch_size": 8}', "config")).out) == {
        "train_batch_size": 8
    }
    assert json.loads(fix(written("# x\nconfig = {'train_batch_size': 8}", "y.txt")).out) == {"train_batch_size": 8}


HALF_PAIRS = {
    "a value": ('{"train_batch_size": 8, "tensorboard": {"job_name": "\\ud800"}}', "tensorboard.job_name:"),
    "a key": ('{"train_batch_size": 8, "fp16": {"\\ud800": 1}}', "fp16:"),
}


@pytest.mark.parametrize(("text", "path"), HALF_PAIRS.values(), ids=HALF_PAIRS)
def test_half_a_pair_of_surrogates_is_refused_by_its_path(text: str, path: str, fix: Any, written: Any) -> None:
    said = fix(written(text))

    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"stepfast: {path}\n")
    assert "no value of text" in said.err


def test_keys_that_deepspeed_does_not_read_are_no_change(fix: Any, written: Any) -> None:
    said = fix(written(VALID | {"_comment": "for the cluster"}), "--check")

    assert said.code == 0
    assert "note: _comment: " in said.err


def test_name_chooses_one_of_several(fix: Any, written: Any) -> None:
    file = written("config = {'train_batch_size': 8}\nds_config = {'train_batch_size': 4}", "train.py")

    said = fix(file)

    assert (said.code, said.out) == (2, "")
    assert said.err == "stepfast: --name: is needed, for there are several, by name and line: config, ds_config\n"
    assert json.loads(fix(file, "--name", "ds_config").out) == {"train_batch_size": 4}


def test_what_a_person_has_to_decide_is_listed_with_the_values(fix: Any, written: Any, tmp_path: Path) -> None:
    file = written({"amp": {"enabled": True}, "zero_optimization": {"stage": 7}})

    said = fix(file, "--out", tmp_path / "out.json")

    assert said.code == 2
    assert 'stepfast: amp: {"enabled": true}\n    Apex was removed' in said.err
    assert "stepfast: zero_optimization.stage: 7\n    wants a whole number from 0 to 3\n" in said.err
    assert said.err.splitlines()[-1].endswith("take it out with --remove PATH")
    assert not (tmp_path / "out.json").exists()


def test_options_say_what_the_file_does_not(fix: Any, written: Any) -> None:
    file = written(BROKEN | {"amp": {"enabled": True}, "zero_optimization": {"stage": 1}})

    said = fix(file, "--remove", "amp", "--keep-nebula", "--own-optimizer", "--world-size", 2)

    assert json.loads(said.out) == VALID | {
        "nebula": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    assert fix(written(VALID), "--remove", "amp").err == "stepfast: amp: is asked to be removed, and is not there\n"


WRONG = {
    "no such file": ([], None, "cannot be read: No such file or directory"),
    "a folder": ([], "folder", "cannot be read: Is a directory"),
    "no JSON": ([], '{"train_batch_size": ', "is no JSON: "),
    "no object": ([], "[]", "holds a list"),
    "no text": ([], b"\xff\xfe{}", "is no text"),
    "a name in JSON": (["--name", "x"], VALID, "which is one configuration"),
    "two places": (["--in-place", "--check"], VALID, "--check: does not go with --in-place"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_wrong_input_ends_with_one_line_and_status_2(
    case: tuple[list[str], Any, str], fix: Any, written: Any, tmp_path: Path
) -> None:
    options, content, reason = case
    file = tmp_path / "ds.json"
    if content == "folder":
        file.mkdir()
    elif isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        written(content)

    said = fix(file, *options)

    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("stepfast: ")
    assert reason in said.err
    assert len(said.err.splitlines()) == 1


def test_out_that_is_the_file_itself_is_refused(fix: Any, written: Any) -> None:
    file = written(BROKEN)

    assert "say --in-place" in fix(file, "--out", file).err


def test_a_storage_that_refuses_ends_with_status_1(fix: Any, written: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    said = fix(written(BROKEN), "--out", tmp_path / "file" / "ds.json")

    assert said.code == 1
    assert said.err.splitlines()[-1].startswith("stepfast: ")


def test_command_imports_neither_deepspeed_nor_torch(written: Any) -> None:
    code = (
        "import sys; sys.argv = ['stepfast', 'deepspeed-config', 'fix', sys.argv[1]]\n"
        "import atexit; atexit.register(lambda: print({'deepspeed', 'torch'} & set(sys.modules)))\n"
        "from stepfast.cli import main; main()"
    )

    said = subprocess.run(
        [sys.executable, "-c", code, written(BROKEN)], capture_output=True, text=True, check=True,
        env=os.environ | {"COLUMNS": "80"},
    )  # fmt: skip

    assert said.stdout.splitlines()[-1] == "set()"
    assert json.loads(said.stdout.removesuffix("set()\n")) == VALID
