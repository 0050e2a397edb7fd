"""Without its framework a module says what to install, and the base SDK needs none of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stepfast.integrations.missing import missing

IMPORT = """
import sys
for name in sys.argv[2].split(","):
    sys.modules[name] = None
try:
    __import__(sys.argv[1])
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("module", "hidden", "package"),
    [
        ("deepspeed", "deepspeed", "deepspeed"),
        ("lightning", "lightning,pytorch_lightning,lightning_fabric", "lightning"),
        ("transformers", "transformers", "transformers[torch]"),
        ("accelerate", "accelerate", "accelerate"),
    ],
)
def test_a_missing_framework_is_named(module: str, hidden: str, package: str) -> None:
    command = [sys.executable, "-c", IMPORT, f"stepfast.integrations.{module}", hidden]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"pip install {package}\n" in said


def test_a_framework_that_is_too_old_or_broken_is_not_said_to_be_missing() -> None:
    for error in (ImportError("cannot import name 'X'"), ModuleNotFoundError("No module named 'y'", name="y")):
        said = str(missing("transformers[torch]", error))
        assert "is not installed" not in said
        assert str(error) in said
    error = ModuleNotFoundError("No module named 'transformers'", name="transformers")
    assert "is not installed: pip install transformers[torch]" in str(missing("transformers[torch]", error))


def test_the_sdk_imports_no_framework() -> None:
    frameworks = "deepspeed,lightning,pytorch_lightning,transformers,accelerate"
    script = IMPORT.replace("__import__(sys.argv[1])", "import stepfast.torch.dcp, stepfast.nebula, stepfast.cli")
    command = [sys.executable, "-c", script, "", frameworks]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (result.stdout, result.returncode) == ("", 0)
