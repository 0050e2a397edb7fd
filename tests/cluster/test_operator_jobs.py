"""Jobs from their making to their end, reconciled against a real API server: what is written how often, what is told,
what is left behind.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from stepfast.nodestatus import JobStatus, RankStatus, SaveStatus
from stepfast_operator import labels
from stepfast_operator.clusterjob import ClusterJob
from stepfast_operator.record import State, Status
from testcluster.controlplane import ApiServer, KubernetesClient
from testoperator.admission import WHY, Rule, denied
from testoperator.playing import play
from testoperator.polling import until
from testoperator.world import API, Operation, World, manifest

NO_RESTARTS = {"maxRestarts": 0, "backoff": {"baseSeconds": 0}, "flushTimeoutSeconds": 0}
PATIENT = {"gracefulSuspendSeconds": 600}


async def reaches(world: World, job: ClusterJob, state: State) -> Status:
    """The status, once the job is in that state."""

    async def is_so() -> bool:
        return (await world.status(job)).state is state

    await until(f"the job is {state}", is_so)
    return await world.status(job)


async def is_gone(world: World, job: ClusterJob) -> None:
    path = f"/apis/stepfast.dev/v1alpha1/namespaces/{world.namespace}/trainingjobs"

    async def is_so() -> bool:
        return all(item["metadata"]["uid"] != job.uid for item in (await world.kube.get(path))["items"])

    await until("the job is gone", is_so)


async def is_told(world: World, job: ClusterJob, words: str) -> None:
    async def is_so() -> bool:
        return any(words in event["message"] for event in await events_of(world, job))

    await until(f"an Event says {words}", is_so)


def report(job: ClusterJob, step: int, attempt: int = 1) -> JobStatus:
    rank = RankStatus(
        rank=0, pid=1, alive=True, clean=False, joined_time=1.0, global_step=step, step_time=2.0 + step,
        restored_step=0, restored_time=1.5,
    )  # fmt: skip
    return JobStatus(
        job=job.job, run=f"{job.uid}-{attempt}", world_size=1, ranks=[rank], saves=SaveStatus(), latest_memory_step=step
    )


def test_job_runs_fails_restarts_and_completes(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job()
        await world.kubelets.end("job-1-0", 7)
        await world.kubelets.end("job-2-0", 0)
        status = await reaches(world, job, State.COMPLETE)
        assert (status.attempt, status.restarts, status.restarts_count_towards_max) == (2, 1, 1)
        assert status.last_failure is not None
        assert (status.last_failure.pod, status.last_failure.exit_code) == ("job-1-0", 7)
        assert await world.pods() == ["job-1-0", "job-2-0"], "the last two attempts' logs can be read"
        await asyncio.wait_for(operation.events.drain(10), 15)
        described = operator_api.kubectl("describe", "trainingjob", "job", "-n", world.namespace)
        for reason in ("PodsCreated", "Restarting", "Completed"):
            assert reason in described
        scraped = operation.metrics.text().decode()
        assert 'stepfast_restarts_total{cause="WorkerFailed",counted="true"} 1.0' in scraped

    play(operator_api, scenario)


def test_progress_alone_is_written_every_two_seconds_and_the_last_of_it_is_not_lost(
    audited_api: ApiServer,
) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job()
        await world.kubelets.started("job-1-0")
        await world.kubelets.make_node(0)
        await world.make_agent(0)
        await world.report(0, report(job, 1))
        await reaches(world, job, State.RUNNING)
        before, begin = status_writes(audited_api, world), asyncio.get_running_loop().time()
        for step in range(2, 62):
            await world.report(0, report(job, step))

        async def is_written() -> bool:
            return (await world.status(job)).trainer_status.global_step == 61

        await until("the last step is written", is_written)
        seconds = asyncio.get_running_loop().time() - begin
        written = status_writes(audited_api, world) - before
        assert 1 <= written <= seconds / 2 + 2, f"{written} writes in {seconds:.1f} s"

    play(audited_api, scenario)


def test_node_of_an_earlier_attempt_whose_agent_is_gone_fails_no_job_that_has_saved_all(
    operator_api: KubernetesClient,
) -> None:
    """The second node stays Ready, and what its agent said last of the first attempt stays as it is."""

    async def scenario(world: World, operation: Operation) -> None:
        policy = {"backoff": {"baseSeconds": 0}, "flushTimeoutSeconds": 3}
        job = await world.make_job(failurePolicy=policy)
        await world.kubelets.started("job-1-0")
        await world.make_agent(0)
        await world.kubelets.make_node(1)
        await world.report(1, report(job, 5))
        await world.report(0, report(job, 5))
        await world.kubelets.end("job-1-0", 7)
        await world.kubelets.started("job-2-0")

        async def is_seen() -> bool:
            await world.report(0, report(job, 9, attempt=2))
            return (await world.status(job)).checkpoint.latest_memory_step == 9

        await until("the second attempt's save is seen", is_seen)
        saved = replace(report(job, 9, attempt=2), latest_persisted_step=9)
        await world.kubelets.end("job-2-0", 0)

        async def is_over() -> bool:
            await world.report(0, saved)  # and it has done all that it was asked
            return (await world.status(job)).is_terminal

        await until("the job is over", is_over)
        status = await world.status(job)
        assert (status.state, status.attempt) == (State.COMPLETE, 2), status.conditions

    play(operator_api, scenario)


async def asked_of(world: World, index: int) -> set[tuple[str, str]]:
    """What the agent of that node is asked for: jobs and actions."""
    document = await world.kube.get(f"{API}/checkpointnodes/{world.kubelets.node(index)}")
    return {(one["name"], one["action"]) for one in document.get("spec", {}).get("requests") or ()}


def test_agents_are_asked_no_more_for_jobs_that_are_over_or_suspended(operator_api: KubernetesClient) -> None:
    """Else a node's list, which the API bounds, fills up with jobs that nobody deletes."""

    async def scenario(world: World, operation: Operation) -> None:
        await world.kubelets.make_node(0)
        await world.make_agent(0)
        await world.report(0)
        done, failed = await world.make_job("done"), await world.make_job("failed", failurePolicy=NO_RESTARTS)
        paused = await world.make_job("paused")
        saving = await world.make_job("saving", checkpoint={**PATIENT, "storageUri": "memory://contract"})
        for job in (done, failed, paused, saving):
            await world.kubelets.started(f"{job.job.name}-1-0")
        await world.report(0, report(saving, 5))
        for job in (paused, saving):
            await world.kube.patch(job.path, {"spec": {"suspend": True}})
        await world.kubelets.end("done-1-0", 0)
        await world.kubelets.end("failed-1-0", 1)
        await reaches(world, done, State.COMPLETE)
        await reaches(world, failed, State.FAILED)
        await reaches(world, paused, State.SUSPENDED)
        await reaches(world, saving, State.SUSPENDING)
        await until("the last save is asked for", lambda: is_asked(world, "saving", "Save"))
        last = await world.make_job("last")
        await world.kubelets.end("last-1-0", 0)
        await reaches(world, last, State.COMPLETE)
        assert await asked_of(world, 0) == {("saving", "Save"), ("last", "Flush")}

    play(operator_api, scenario)


async def is_asked(world: World, name: str, action: str) -> bool:
    return (name, action) in await asked_of(world, 0)


def status_writes(api: ApiServer, world: World) -> int:
    """How often the audit log says that the job's status was written."""
    return sum(
        event["verb"] == "patch"
        and event.get("objectRef", {}).get("resource") == "trainingjobs"
        and event["objectRef"].get("subresource") == "status"
        and event["objectRef"].get("namespace") == world.namespace
        for event in api.audit()
    )


def test_deleted_job_waits_for_its_gang_and_goes(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job(checkpoint={"storageUri": "memory://contract", "gracefulSuspendSeconds": 1})
        await world.kubelets.started("job-1-0")
        world.kubelets.stuck.add(world.kubelets.node(0))
        await world.kube.delete(job.path)
        await until("it is asked to end", lambda: "deletionTimestamp" in world.kubelets.pods["job-1-0"]["metadata"])
        assert (await world.job(job)).finalizers == (labels.FINALIZER,), "as long as the pod lives"
        world.kubelets.stuck.clear()
        await world.kubelets.remove("job-1-0")
        await is_gone(world, job)

    play(operator_api, scenario)


def test_two_jobs_of_one_name_one_after_the_other(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        first = await world.make_job()
        await world.kubelets.started("job-1-0")
        await world.kube.delete(first.path)
        await is_gone(world, first)
        # No garbage collector runs here: what the first one owned stays until the test removes it.
        second = await world.make_job()
        await is_told(world, second, "does not belong")
        await world.kube.delete(f"/api/v1/namespaces/{world.namespace}/services/job")
        await world.kubelets.end("job-1-0", 0)
        status = await reaches(world, second, State.COMPLETE)
        assert (status.attempt, status.restarts) == (1, 0)

    play(operator_api, scenario)


async def events_of(world: World, job: ClusterJob) -> list[Any]:
    listed = await world.kube.get(f"/api/v1/namespaces/{world.namespace}/events")
    return [event for event in listed["items"] if event["involvedObject"]["uid"] == job.uid]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        pytest.param({"imagePullPolicy": "Sometimes"}, "imagePullPolicy", id="invalid"),
        pytest.param({"resources": {"limits": {"cpu": "many"}}}, "quantities must match", id="unreadable"),
    ],
)
def test_pods_that_the_api_server_refuses_fail_the_job_with_why(
    operator_api: KubernetesClient, wrong: Any, named: str
) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job(template={"spec": {"containers": [{"name": "node", **wrong}]}})
        status = await reaches(world, job, State.FAILED)
        [failed] = [condition for condition in status.conditions if condition.type == "Failed"]
        assert failed.reason == "InvalidSpec"
        assert named in failed.message
        assert await world.pods() == []

    play(operator_api, scenario)


@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param({"storageUri": "abfss://c@elsewhere.example/x"}, id="with the operator's identity"),
        pytest.param({"storageUri": "http://elsewhere.example/x", "secretRef": {"name": "own"}}, id="of another kind"),
    ],
)
def test_storage_that_nobody_allowed_is_never_opened_and_fails_the_job(
    operator_api: KubernetesClient, checkpoint: Any
) -> None:
    """A host of the job's choice would be sent the token of the operator's identity."""

    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job(checkpoint={**PATIENT, **checkpoint})
        status = await reaches(world, job, State.FAILED)
        [failed] = [condition for condition in status.conditions if condition.type == "Failed"]
        assert failed.reason == "InvalidSpec"
        assert checkpoint["storageUri"] in failed.message
        assert (await world.pods(), operation.opened) == ([], [])

        async def told() -> list[str]:
            return [event["reason"] for event in await events_of(world, job)]

        async def is_told() -> bool:
            return bool(await told())

        await until("it is told", is_told)
        assert await told() == ["Failed"]

    play(operator_api, scenario)


@pytest.mark.parametrize("rule", Rule)
def test_recovery_that_an_admission_rule_denies_goes_on_once_it_is_let(audited_api: ApiServer, rule: Rule) -> None:
    """Else a registry that is away for a moment ends a job of weeks."""

    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job()
        await world.kubelets.started("job-1-0")
        async with denied(audited_api, world.kube, world.namespace, "job-2-", rule):
            await world.kubelets.end("job-1-0", 7)
            await is_told(world, job, WHY)
            assert not (await world.status(job)).is_terminal
        await world.kubelets.end("job-2-0", 0)
        status = await reaches(world, job, State.COMPLETE)
        assert (status.attempt, status.restarts) == (2, 1)

    play(audited_api, scenario)


@pytest.mark.parametrize("rule", Rule)
def test_first_launch_that_an_admission_rule_denies_is_tried_until_the_start_deadline(
    audited_api: ApiServer, rule: Rule
) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        async with denied(audited_api, world.kube, world.namespace, "job-", rule):
            job = await world.make_job(startupDeadlineSeconds=2)
            await is_told(world, job, WHY)
            status = await reaches(world, job, State.FAILED)
        [failed] = [condition for condition in status.conditions if condition.type == "Failed"]
        assert failed.reason == "StartupDeadlineExceeded"
        assert status.attempt == 1

    play(audited_api, scenario)


def test_gang_that_could_not_be_made_whole_is_ended_with_its_job(operator_api: KubernetesClient) -> None:
    """A quota lets half of the pods pass: the half that was made is nobody's once the job is deleted or suspended."""

    async def scenario(world: World, operation: Operation) -> None:
        await world.limit_pods(1)
        job = await world.make_job(trainer={"numNodes": 2})
        await is_told(world, job, "exceeded quota")

        async def is_half_made() -> bool:
            return len(await world.pods()) == 1

        await until("the pod that the quota lets pass", is_half_made)
        await world.kube.patch(job.path, {"spec": {"suspend": True}})
        await reaches(world, job, State.SUSPENDED)
        await until("nothing of it lives", lambda: not world.kubelets.pods)
        await world.kube.delete(job.path)
        await is_gone(world, job)

    play(operator_api, scenario)


def test_job_that_stopped_making_sense_ends_its_gang_and_can_be_deleted(operator_api: KubernetesClient) -> None:
    """What the schema lets pass and the operator refuses: one of torchrun's own options."""

    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job()
        await world.kubelets.started("job-1-0")
        await world.kube.patch(job.path, {"spec": {"suspend": True}})
        await reaches(world, job, State.SUSPENDED)
        await world.kube.patch(job.path, {"spec": {"trainer": {"command": ["torchrun", "--nnodes=9", "t.py"]}}})
        status = await reaches(world, job, State.FAILED)
        assert "--nnodes" in str(status.conditions)
        await world.kube.delete(job.path)
        await is_gone(world, job)
        assert all("deletionTimestamp" in pod["metadata"] for pod in world.kubelets.pods.values())

    play(operator_api, scenario)


def test_job_of_a_namespace_that_goes_does_not_hold_it_up(operator_api: KubernetesClient) -> None:
    """As the namespace controller does it: everything is deleted, and nothing may be made any more."""

    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job()
        await world.kubelets.started("job-1-0")
        await world.kube.delete(f"/api/v1/namespaces/{world.namespace}")
        await world.kube.delete(job.path)
        await world.kube.delete(f"/api/v1/namespaces/{world.namespace}/pods/job-1-0")
        await is_gone(world, job)
        await until("no pod is left", lambda: not world.kubelets.pods)

    play(operator_api, scenario)


def test_mistake_in_one_jobs_loop_is_its_own_and_is_tried_again(
    operator_api: KubernetesClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepfast_operator import jobs

    real, calls = jobs.reconcile, []

    async def wrong_once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise KeyError("a mistake")
        return await real(*args)

    monkeypatch.setattr(jobs, "reconcile", wrong_once)

    async def scenario(world: World, operation: Operation) -> None:
        job = await world.make_job()
        await world.kubelets.end("job-1-0", 0)
        await reaches(world, job, State.COMPLETE)
        assert any("KeyError" in event["message"] for event in await events_of(world, job))

    play(operator_api, scenario)


def test_events_with_long_words_of_any_language_are_posted(operator_api: KubernetesClient) -> None:
    async def scenario(world: World, operation: Operation) -> None:
        document = await world.kube.create(
            f"/apis/stepfast.dev/v1alpha1/namespaces/{world.namespace}/trainingjobs",
            manifest(world.namespace, "told", suspend=True),
        )
        operation.events.tell_error(document, ValueError("ü" * 3000))
        await operation.events.drain(10)
        listed = await world.kube.get(f"/api/v1/namespaces/{world.namespace}/events")
        [event] = [event for event in listed["items"] if "ü" in event["message"]]
        assert len(event["message"].encode()) <= 1024

    play(operator_api, scenario)
