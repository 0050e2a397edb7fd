"""The CheckpointNode: what the agent writes and when, what it does for the operator, and that nobody waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepfast import catalog
from stepfast.messages import Progress, Restored, SaveRequested
from stepfast.nodestatus import JobStatus, NodeStatus, RankStatus, SaveStatus, format_time, from_document, parse_time
from stepfast.step import JobKey
from stepfast_sidecar import checkpointnode
from stepfast_sidecar.checkpointnode import (
    Action,
    ApiError,
    CheckpointNodeWriter,
    NodeRequest,
    news_of,
    progress_seconds,
    requests_of,
    status_document,
)

JOB = "default/train"
FLUSH = {"namespace": "default", "name": "train", "run": "uid1-0", "action": "Flush"}
SAVE = {**FLUSH, "action": "Save"}


@pytest.fixture
def reporting_agent(new_agent: Callable[..., Any], api: Any, tmp_path: Path) -> Callable[..., Any]:
    """Starts an agent that knows the API server."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(api.kubeconfig())

    def start(*options: str) -> Any:
        return new_agent("--checkpoint-node", *options, environment={"KUBECONFIG": str(kubeconfig)})

    return start


def newest(api: Any) -> dict[str, Any]:
    """The status that was written last; empty when there is none."""
    return dict(api.statuses[-1]) if api.statuses else {}


def job_of(status: dict[str, Any], run: str = "uid1-0") -> dict[str, Any]:
    return next((dict(job) for job in status.get("jobs", ()) if job["run"] == run), {})


def test_object_is_made_for_its_node_and_says_that_the_agent_is_ready(
    reporting_agent: Callable[..., Any], api: Any, ranks: Any
) -> None:
    reporting_agent()
    ranks.eventually(lambda: api.statuses, "a status is written")
    owner = {"apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": api.node_uid}
    assert api.found["metadata"]["ownerReferences"] == [owner]
    status = newest(api)
    (ready,) = status["conditions"]
    assert (ready["type"], ready["status"], ready["observedGeneration"]) == ("Ready", "True", 1)
    assert parse_time(status["writtenTime"]) >= parse_time(ready["lastTransitionTime"])
    assert parse_time(ready["lastTransitionTime"]) <= time.time()
    assert (status["observedGeneration"], status["memory"]["limitBytes"], status["jobs"]) == (1, 1 << 30, [])
    assert status["progressSeconds"] == 5.0
    assert "node" not in status


def test_what_matters_is_written(reporting_agent: Callable[..., Any], api: Any, ranks: Any) -> None:
    agent = reporting_agent()
    ranks.eventually(lambda: api.statuses, "a status is written")

    def told(what: Callable[[dict[str, Any]], object], which: str) -> None:
        ranks.eventually(lambda: what(job_of(newest(api))), which)

    rank = agent.join()
    told(lambda job: job and job["ranks"][0]["alive"], "a rank joined")
    restored = time.time()
    rank.client.send(Restored(step=3, tier="Memory", time=restored, seconds=0.1))
    told(lambda job: job["ranks"][0].get("restoredStep") == 3, "it restored")
    told_time = parse_time(job_of(newest(api))["ranks"][0]["restoredTime"])
    assert told_time == pytest.approx(restored, abs=1e-5), "by the rank's clock, as its steps are: none comes before it"
    rank.save(5)
    told(lambda job: job.get("latestPersistedStep") == 5 and not job["pendingSteps"], "a step is committed")
    rank.die()
    told(lambda job: not job["ranks"][0]["alive"], "it died")


def test_job_that_has_left_the_node_is_not_told_of_any_more(
    reporting_agent: Callable[..., Any], api: Any, ranks: Any
) -> None:
    agent = reporting_agent("--idle-timeout", "2")
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)
    ranks.eventually(lambda: newest(api).get("memory", {}).get("usedBytes"), "what it holds is told")
    rank.close()
    ranks.eventually(lambda: newest(api)["jobs"] == [] and newest(api)["memory"]["usedBytes"] == 0, "it has left", 30.0)


def test_progress_alone_is_written_every_few_seconds(reporting_agent: Callable[..., Any], api: Any, ranks: Any) -> None:
    agent = reporting_agent()
    rank = agent.join()
    ranks.eventually(lambda: job_of(newest(api)), "the rank is told")
    begin, before = time.monotonic(), len(api.statuses)

    def is_told() -> bool:
        step = int(1000 * (time.monotonic() - begin)) + 1
        rank.client.send(Progress(step=step, time=time.time(), metrics={"loss": 1.5, "nan": float("nan")}))
        return len(api.statuses) >= before + 2

    ranks.eventually(is_told, "progress is told")
    assert time.monotonic() - begin >= 0.9 * checkpointnode._COALESCE_SECONDS
    told = job_of(newest(api))["ranks"][0]
    assert told["globalStep"] >= 4000
    assert told["metrics"] == {"loss": 1.5}


def test_flush_is_carried_out_and_then_acknowledged_by_what_came_of_it(
    reporting_agent: Callable[..., Any], api: Any, ranks: Any
) -> None:
    agent = reporting_agent()
    rank = agent.join()
    ranks.eventually(lambda: job_of(newest(api)), "the rank is told")
    rank.save(1)
    rank.wait_committed(1)
    os.kill(agent.persisters()[JOB], signal.SIGSTOP)
    rank.save(7, due=False)
    generation = api.request(FLUSH)
    ranks.eventually(lambda: newest(api)["observedGeneration"] == generation, "it is acknowledged")
    first = next(status for status in api.statuses if status["observedGeneration"] == generation)
    assert job_of(first)["pendingSteps"] == [7]  # what is due is seen with the acknowledgement
    os.kill(agent.persisters()[JOB], signal.SIGCONT)
    rank.wait_committed(7)
    ranks.eventually(lambda: job_of(newest(api))["pendingSteps"] == [], "nothing is pending")
    assert job_of(newest(api))["latestPersistedStep"] == 7
    after = api.request()
    ranks.eventually(lambda: newest(api)["observedGeneration"] == after, "that there is none any more is seen")


def test_save_is_asked_of_every_rank_and_of_those_that_come_later(
    reporting_agent: Callable[..., Any], api: Any, ranks: Any
) -> None:
    agent = reporting_agent()
    first = agent.join(world_size=2, local_world_size=2)
    other = agent.join(run="uid9-0")
    ranks.eventually(lambda: job_of(newest(api)), "the rank is told")
    api.request(SAVE, {**SAVE, "action": "Dance"}, {"name": "x"}, {**SAVE, "namespace": "no", "name": "job"})
    ranks.eventually(lambda: SaveRequested() in first.pushed, "it is asked")
    second = agent.join(world_size=2, local_world_size=2, rank=1, local_rank=1)
    ranks.eventually(lambda: SaveRequested() in second.pushed, "the later one is asked")
    agent.kill()
    agent.start()
    back = agent.join(world_size=2, local_world_size=2)
    ranks.eventually(lambda: SaveRequested() in back.pushed, "the next agent asks again")
    again = agent.join(run="uid1-0.1", world_size=2, local_world_size=2)
    ranks.eventually(lambda: SaveRequested() in again.pushed, "also those that torchrun launched again")
    assert SaveRequested() not in other.pushed
    assert "Dance" in agent.log


@pytest.mark.parametrize("fault", ["crd", "forbidden", "overloaded", "silent", "gone", "no-node", "conflict"])
def test_agent_serves_whatever_the_api_server_does_and_tells_once_it_can(
    reporting_agent: Callable[..., Any], api: Any, ranks: Any, fault: str
) -> None:
    faults = {
        "crd": {"list": 404, "watch": 404, "create": 404, "patch": 404},
        "forbidden": {"list": 403},
        "overloaded": {"list": 503, "watch": 429, "patch": 500},
        "silent": {"list": 0},
        "gone": {"watch": 410},
        "no-node": {"node": 404},
        "conflict": {"create": 409},
    }
    api.fail(**faults[fault])
    agent = reporting_agent()
    rank = agent.join()
    for step in (1, 2, 3):
        rank.save(step)
        rank.wait_committed(step)
    ranks.eventually(lambda: api.requests, "it was asked")
    if fault != "silent":
        ranks.eventually(lambda: len(api.requests) > 3, "and asked again")
    api.fail()
    ranks.eventually(lambda: job_of(newest(api)).get("latestPersistedStep") == 3, "all is told")
    rank.save(4)
    ranks.eventually(lambda: job_of(newest(api)).get("latestPersistedStep") == 4, "and what comes after it")
    assert agent.log.count("again and again") <= 2, agent.log


def test_watch_that_ends_expires_or_breaks_goes_on(reporting_agent: Callable[..., Any], api: Any, ranks: Any) -> None:
    agent = reporting_agent()
    ranks.eventually(lambda: api.statuses, "a status is written")
    for trouble in (api.forget_versions, lambda: api.fail(watch=503), lambda: api.fail(watch=410)):
        trouble()
        rank_count = api.requests.count("list")
        ranks.eventually(lambda n=rank_count: api.requests.count("list") > n, "it lists anew")
        api.fail()
        generation = api.request(FLUSH)
        ranks.eventually(lambda g=generation: newest(api)["observedGeneration"] == g, "the request is seen")
    assert agent.join()


def test_object_that_somebody_deleted_is_made_again(reporting_agent: Callable[..., Any], api: Any, ranks: Any) -> None:
    agent = reporting_agent()
    rank = agent.join()
    ranks.eventually(lambda: job_of(newest(api)), "the rank is told")
    uid = api.found["metadata"]["uid"]
    api.delete()
    ranks.eventually(lambda: api.found is not None and "status" in api.found, "it is there again")
    assert api.found["metadata"]["uid"] != uid
    assert job_of(api.found["status"])["ranks"][0]["alive"]
    rank.save(1)
    rank.wait_committed(1)


def test_flush_that_is_asked_for_stands_whoever_joins_until_it_is_asked_for_no_more(
    reporting_agent: Callable[..., Any], api: Any, ranks: Any
) -> None:
    agent = reporting_agent()
    rank = agent.join()

    def heard(generation: int) -> None:
        ranks.eventually(lambda: newest(api)["observedGeneration"] == generation, "the request is seen")

    ranks.eventually(lambda: job_of(newest(api)), "the rank is told")
    heard(api.request(FLUSH))
    rank.die()
    ranks.eventually(lambda: not agent.job().ranks[0].alive, "the agent knows")
    again = agent.join()
    again.save(1, due=False)
    again.wait_committed(1)
    heard(api.request())
    again.save(2, due=False)
    again.save(3)
    again.wait_committed(3)
    assert again.committed() == [1, 3]


def test_status_of_an_agent_that_ends_tells_what_it_flushed(
    reporting_agent: Callable[..., Any], api: Any, ranks: Any
) -> None:
    agent = reporting_agent()
    rank = agent.join()
    ranks.eventually(lambda: job_of(newest(api)), "the rank is told")
    rank.save(9, due=False)
    ranks.eventually(lambda: agent.job().latest_memory_step == 9, "it is staged")
    assert agent.terminate() == 0
    status = newest(api)
    (ready,) = status["conditions"]
    assert (ready["status"], ready["reason"]) == ("False", "Ended")
    assert job_of(status)["latestPersistedStep"] == 9
    assert [found.step for found in catalog.committed_steps(agent.store(), JOB)] == [9]
    agent.start()
    ranks.eventually(lambda: newest(api)["conditions"][0]["status"] == "True", "the next one is ready")


def test_api_server_that_is_silent_holds_up_no_end(reporting_agent: Callable[..., Any], api: Any, ranks: Any) -> None:
    agent = reporting_agent()
    ranks.eventually(lambda: api.statuses, "a status is written")
    api.fail(patch=0)
    rank = agent.join()
    rank.save(1)
    rank.wait_committed(1)
    assert agent.terminate(30) == 0


# ---------------------------------------------------------------- pure


RANK = RankStatus(rank=0, pid=1, alive=True, clean=False, joined_time=1.0)
STATUS = JobStatus(
    job=JobKey.parse(JOB), run="uid1-0", world_size=1, ranks=(RANK,), saves=SaveStatus(), pending_steps=(3,)
)


def _node(job: JobStatus) -> NodeStatus:
    return NodeStatus(node="n", memory_limit_bytes=1, memory_used_bytes=0, jobs=(job,))


@pytest.mark.parametrize(
    ("change", "is_news"),
    [
        (replace(STATUS, latest_persisted_step=3), True),
        (replace(STATUS, persist_error="full"), True),
        (replace(STATUS, final_step=3), True),
        (replace(STATUS, pending_steps=()), True),
        (replace(STATUS, pending_steps=(3, 4)), False),
        (replace(STATUS, latest_memory_step=9), False),
        (replace(STATUS, saves=SaveStatus(count=5)), False),
        (replace(STATUS, ranks=()), True),
        (replace(STATUS, ranks=(replace(RANK, alive=False),)), True),
        (replace(STATUS, ranks=(replace(RANK, joined_time=2.0),)), True),
        (replace(STATUS, ranks=(replace(RANK, restored_step=3, restored_time=5.0),)), True),
        (replace(STATUS, ranks=(replace(RANK, global_step=4, step_time=5.0, metrics={"a": 1.0}),)), False),
        (replace(STATUS, run="uid1-1"), True),
    ],
)
def test_news_are_what_a_decision_may_wait_for(change: JobStatus, is_news: bool) -> None:
    assert (news_of(_node(change)) != news_of(_node(STATUS))) is is_news


def test_flush_that_is_over_is_news_also_of_a_step_that_is_never_committed() -> None:
    dead = replace(STATUS, ranks=(replace(RANK, alive=False),), pending_bytes=5)
    missed = {"pending_bytes": 0, "incomplete_steps": (3,)}
    assert news_of(_node(dead)) != news_of(_node(replace(dead, **missed)))
    assert news_of(_node(dead)) == news_of(_node(replace(dead, pending_bytes=3)))
    living = replace(STATUS, pending_bytes=5)
    assert news_of(_node(living)) == news_of(_node(replace(living, **missed))), "every save would be two writes"


def test_other_parts_that_may_have_come_meanwhile_are_news_of_a_gang_that_is_over() -> None:
    dead = replace(STATUS, ranks=(replace(RANK, alive=False),), incomplete_steps=(3,))
    assert news_of(_node(dead)) != news_of(_node(replace(dead, incomplete_steps=())))


def test_requests_that_are_not_understood_are_passed_over() -> None:
    wrong = [{}, {**FLUSH, "run": "../x"}, {**FLUSH, "name": "UPPER"}, {**FLUSH, "action": "Other"}, "text", None]
    assert requests_of({"spec": {"requests": [*wrong, FLUSH]}}) == (
        NodeRequest(job=JobKey.parse(JOB), run="uid1-0", action=Action.FLUSH),
    )
    assert requests_of({}) == requests_of({"spec": None}) == requests_of({"spec": {"requests": None}}) == ()


def test_no_tenant_can_make_the_status_too_large() -> None:
    metrics = {"x" * 64 + str(number): float(number) for number in range(64)}
    ranks = tuple(replace(RANK, rank=rank, metrics=metrics) for rank in range(256))
    job = replace(STATUS, ranks=ranks, persist_error="e" * 100_000)
    document = status_document(_node(job), generation=1, is_ready=True, since=0.0, reason="R", message="m")
    assert len(json.dumps(document)) < 60_000


@pytest.mark.parametrize("seconds", [0.0, 1.5, 1_795_000_000.123456, 253_402_300_799.0])
def test_times_are_exact_to_the_microsecond(seconds: float) -> None:
    assert format_time(seconds).endswith("Z")
    assert parse_time(format_time(seconds)) == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize("seconds", [-1.0, 1e300, float("nan"), float("inf"), -float("inf")])
def test_times_that_no_clock_shows_are_told_as_one_that_does(seconds: float) -> None:
    assert 0 <= parse_time(format_time(seconds)) <= 253_402_300_799


def test_status_is_read_as_it_was_written() -> None:
    status = _node(replace(STATUS, latest_persisted_time=7.25, ranks=(replace(RANK, step_time=3.5, global_step=1),)))
    document = status_document(status, generation=1, is_ready=True, since=0.0, reason="R", message="m")
    assert from_document({"node": "n", **document}) == status


@pytest.mark.parametrize("text", ["2026-01-01T00:00:00", "yesterday", ""])
def test_text_that_is_no_time_of_a_zone_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_time(text)


class _Recorder:
    """An API that takes everything."""

    def __init__(self) -> None:
        self.statuses: list[Any] = []
        self.written = asyncio.Event()

    async def find(self, name: str) -> tuple[Any, str]:
        return {"metadata": {"uid": "u", "generation": 4}}, "1"

    async def create(self, body: Any) -> Any:
        raise AssertionError("it is there")

    async def node_uid(self, name: str) -> str:
        raise AssertionError("it is there")

    async def patch_status(self, name: str, status: Any) -> None:
        self.statuses.append(status)
        self.written.set()

    async def wait_written(self) -> None:
        async with asyncio.timeout(60):
            await self.written.wait()
        self.written.clear()

    async def watch(self, name: str, resource_version: str) -> AsyncGenerator[tuple[str, Any], None]:
        await asyncio.Event().wait()
        yield "", {}

    async def close(self) -> None:
        """It has nothing."""


class _Source:
    """An agent that tells what a test says, and is asked nothing."""

    told = _node(STATUS)

    def status(self) -> NodeStatus:
        return self.told

    def carry_out(self, requests: tuple[NodeRequest, ...]) -> None:
        assert requests == ()

    def take_gangs(self, gangs: object) -> None:
        """It mirrors none."""


def test_slow_api_server_is_told_of_progress_more_seldom_and_never_too_seldom() -> None:
    status = _node(STATUS)
    usual = progress_seconds(status)
    assert progress_seconds(status, 0.005) == usual, "it has time"
    assert progress_seconds(status, 0.02) == pytest.approx(20.0)
    assert progress_seconds(status, 60.0) == 30.0, "hangs are looked for in minutes"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        pytest.param("_COALESCE_SECONDS", 30.0, id="told a moment ago"),
        pytest.param("_PROGRESS_SHARE", 1e-9, id="an API server that is slow, measured by that"),
    ],
)
def test_news_do_not_wait_for_progress_and_take_it_along(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: float
) -> None:
    monkeypatch.setattr(checkpointnode, "_COALESCE_SECONDS", 0.0)
    monkeypatch.setattr(checkpointnode, setting, value)
    monkeypatch.setattr(checkpointnode, "_GAP_SECONDS", 0.01)

    async def run() -> None:
        source, recorder = _Source(), _Recorder()

        async def connect() -> Any:
            return recorder

        writer = CheckpointNodeWriter("n", source, connect)
        task = asyncio.create_task(writer.run())
        await recorder.wait_written()
        job = replace(STATUS, persist_error="another")
        source.told = _node(job)
        writer.changed(True)  # by how long the first answer took, the second says how long progress waits
        await recorder.wait_written()
        for step in (11, 22, 33):
            job = replace(job, latest_memory_step=step)
            source.told = _node(job)
            for _ in range(20):
                writer.changed(False)
                await asyncio.sleep(0.002)
            assert not recorder.written.is_set()
            job = replace(job, latest_persisted_step=step)
            source.told = _node(job)
            writer.changed(step == 22)
            await recorder.wait_written()
            assert recorder.statuses[-1]["jobs"][0]["latestMemoryStep"] == step
            assert recorder.statuses[-1]["observedGeneration"] == 4
        assert len(recorder.statuses) == 5
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_interval_holds_once_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks for hangs waits no longer than what was told last."""
    monkeypatch.setattr(checkpointnode, "_COALESCE_SECONDS", 0.0)
    monkeypatch.setattr(checkpointnode, "_GAP_SECONDS", 0.01)
    monkeypatch.setattr(checkpointnode, "_RETRY_SECONDS", (0.001,))

    class Refusing(_Recorder):
        refuses = False

        async def patch_status(self, name: str, status: Any) -> None:
            if self.refuses:
                self.refuses = False
                self.refused.set()
                raise ApiError("overloaded")
            await super().patch_status(name, status)

    async def run() -> None:
        source, api = _Source(), Refusing()
        api.refused = asyncio.Event()

        async def connect() -> Any:
            return api

        monkeypatch.setattr(checkpointnode, "progress_seconds", lambda status, seconds=0.0: 0.05)
        writer = CheckpointNodeWriter("n", source, connect)
        task = asyncio.create_task(writer.run())
        await api.wait_written()
        monkeypatch.setattr(checkpointnode, "progress_seconds", lambda status, seconds=0.0: 3600.0)
        api.refuses = True
        source.told = _node(replace(STATUS, latest_memory_step=9))
        writer.changed(False)
        async with asyncio.timeout(60):
            await api.refused.wait()
        writer.changed(False)
        await api.wait_written()
        assert api.statuses[-1]["jobs"][0]["latestMemoryStep"] == 9
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


class _Broken:
    """An API whose answers make no sense."""

    def __init__(self) -> None:
        self.asked = 0

    async def find(self, name: str) -> tuple[Any, str]:
        self.asked += 1
        return {"metadata": None}, "1"

    async def create(self, body: Any) -> Any:
        raise ApiError("no")

    async def node_uid(self, name: str) -> str:
        return "uid"

    async def patch_status(self, name: str, status: Any) -> None:
        raise ApiError("no")

    async def watch(self, name: str, resource_version: str) -> AsyncGenerator[tuple[str, Any], None]:
        raise ApiError("no")
        yield

    async def close(self) -> None:
        """It has nothing."""


def test_answers_that_make_no_sense_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointnode, "_RETRY_SECONDS", (0.001,))
    broken = _Broken()

    class Source:
        def status(self) -> NodeStatus:
            return _node(STATUS)

        def carry_out(self, requests: tuple[NodeRequest, ...]) -> None:
            raise AssertionError("there are none")

    async def connect() -> Any:
        return broken

    async def run() -> None:
        writer = CheckpointNodeWriter("n", Source(), connect)
        task = asyncio.create_task(writer.run())
        async with asyncio.timeout(30):
            while broken.asked < 5:
                writer.changed(True)
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await writer.say_goodbye()

    asyncio.run(run())
