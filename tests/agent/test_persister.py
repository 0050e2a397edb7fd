"""Persisters and their supervisor: whatever comes out of the process, and a storage that asks to be left alone."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stepfast_sidecar.persisterprocess import PersisterLost, PersisterProcess

T = TypeVar("T")

_DEADLINE_SECONDS = 120.0
_CHATTY = """
import os
from stepfast_sidecar import persister

def open_store(*arguments, really=persister.open_store, **options):
    print("a library says hello")
    os.write(1, b"and so does what it is made of\\n")
    return really(*arguments, **options)

persister.open_store = open_store
sys.argv = sys.argv[2:]  # the module's name and its options
persister.main()
"""
_THROTTLED = """
import sys

if "stepfast_sidecar.persister" in sys.orig_argv:
    import os, time
    from stepfast.errors import StorageUnavailable
    from stepfast.storage.local import LocalStore

    def upload(self, path, *arguments, really=LocalStore.upload, **options):
        is_first = not os.path.exists(TOLD) or path not in open(TOLD).read()
        with open(TOLD, "a") as told:
            told.write(f"{time.monotonic()} {path}\\n")
        if is_first and "-00001-of-" in path:
            asked = StorageUnavailable(f"upload {path}: 429")
            asked.retry_after_seconds = SECONDS
            raise asked
        return really(self, path, *arguments, **options)

    LocalStore.upload = upload
"""


@contextmanager
def _run_instead(folder: Path, program: str) -> Iterator[None]:
    """Has persisters be this program, which is given what the interpreter would be."""
    script = folder / "program"
    script.write_text(f"#!{sys.executable}\nimport sys\n{program}")
    script.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(script))
        yield


def _with_persister(
    use: Callable[[PersisterProcess], Awaitable[T]], on_lost: Callable[[PersisterLost], None], storage: str
) -> T:
    async def run() -> T:
        persister = PersisterProcess(
            storage, ["--folder", "a/b"], on_lost=on_lost, environment=os.environ, retry_limit_seconds=1
        )
        try:
            async with asyncio.timeout(_DEADLINE_SECONDS):
                return await use(persister)
        finally:
            await persister.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "lives"),
    [
        ('{"id": 1, "ok"', False),
        ("what a library says\\n", False),
        ("what a library says\\n", True),
        ('["id"]\\n', True),
        ('{"ok": true}\\n', True),
    ],
    ids=["half-an-answer", "no-json-and-dies", "no-json", "no-object", "no-id"],
)
def test_persister_that_does_not_answer_as_it_should_is_lost(tmp_path: Path, answer: str, lives: bool) -> None:
    losses: list[int] = []
    rest = "sys.stdin.read()" if lives else ""
    program = f"sys.stdin.readline()\nsys.stdout.write('{answer}')\nsys.stdout.flush()\n{rest}\n"

    async def ask(persister: PersisterProcess) -> int | None:
        with pytest.raises(PersisterLost):
            await persister.request("steps")
        return persister.pid

    with _run_instead(tmp_path, program):
        pid = _with_persister(ask, lambda _: losses.append(1), "file:///nowhere")
    assert (pid, losses) == (None, [1])


def test_what_a_storage_library_prints_is_no_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    losses: list[int] = []

    async def ask(persister: PersisterProcess) -> list[int]:
        answer = await persister.request("steps")
        return list(answer["steps"])

    with _run_instead(tmp_path, _CHATTY):
        assert _with_persister(ask, lambda _: losses.append(1), (tmp_path / "storage").as_uri()) == []
    assert losses == []
    said = capfd.readouterr().err
    assert "a library says hello" in said
    assert "what it is made of" in said


def test_storage_is_left_alone_as_long_as_it_asks_and_gets_no_file_twice(
    new_agent: Callable[..., Any], tmp_path: Path, inject: Callable[[str], dict[str, str]]
) -> None:
    told, seconds = tmp_path / "told", 3.0
    agent = new_agent(environment=inject(f"TOLD, SECONDS = {str(told)!r}, {seconds}\n{_THROTTLED}"))
    first, second = agent.gang(2)
    first.save(1)
    second.save(1)
    first.wait_committed(1)
    lines = [line.split() for line in told.read_text().splitlines()]
    assert sorted(path.rpartition("/")[2][:11] for _, path in lines) == ["state-00000", "state-00001", "state-00001"]
    refused, again = (float(time) for time, path in lines if "-00001-of-" in path)
    assert again - refused >= seconds
    assert "429" in second.failures()[0]
