"""The agent as a CSI driver: a real gRPC client plays the kubelet; ranks come in through the published sockets."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from stepfast import catalog
from stepfast.errors import AgentUnavailable
from stepfast_sidecar.config import automatic_limit, parse_config
from stepfast_sidecar.health import Health
from stepfast_sidecar.protos import csi_pb2 as csi

JOB = "team-a/train"
INFO = "csi.storage.k8s.io"
_INJECT = Path(__file__).with_name("inject")


def refused(call: Callable[[], object], code: grpc.StatusCode, *words: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is code, caught.value.details()
    for word in words:
        assert word in caught.value.details()


def test_rank_saves_through_its_pods_socket(node_agent: Callable[..., Any], kubelet: Any, new_pod: Any) -> None:
    agent, pod = node_agent(), new_pod()
    path = kubelet.publish(pod)
    assert len(path) > 108
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o666
    assert stat.S_IMODE(kubelet.target(pod).stat().st_mode) == 0o755
    rank = agent.join(socket=path, job=JOB)
    rank.save(5)
    rank.wait_committed(5)
    assert [found.step for found in catalog.committed_steps(agent.store(), JOB)] == [5]


def test_pod_of_a_job_with_mirrors_is_refused_where_none_are_taken(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any
) -> None:
    node_agent()
    words = ("team-a/train-0-0", "checkpoint.memory.mirrors", "sidecar.mirrors.enabled")
    refused(
        lambda: kubelet.publish(new_pod(context={"mirrors": "1"})), grpc.StatusCode.INVALID_ARGUMENT, *words
    )  # fmt: skip
    assert kubelet.publish(new_pod(context={"mirrors": "0"}))


def test_driver_says_who_it_is(node_agent: Callable[..., Any], kubelet: Any) -> None:
    node_agent()
    info = kubelet.identity()
    assert (info.name, info.vendor_version) == ("csi.stepfast.dev", "0.1.0")
    assert kubelet.probe().ready.value
    for path in (kubelet.endpoint, kubelet.registration_socket):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_volume_is_published_and_removed_as_often_as_the_kubelet_asks(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any, ranks: Any
) -> None:
    agent, pod = node_agent(), new_pod()
    for _ in range(3):
        path = kubelet.publish(pod)
    rank = agent.join(socket=path, job=JOB)
    kubelet.publish(pod)
    rank.save(1)
    rank.wait_committed(1)
    before = agent.descriptors()
    kubelet.unpublish(pod)
    rank.wait_lost()
    assert not kubelet.target(pod).parent.exists()
    kubelet.unpublish(pod)
    ranks.eventually(lambda: agent.descriptors() < before, "the listener is closed")
    assert not list((agent.memory_dir / ".volumes").iterdir())


def test_socket_that_somebody_removed_is_put_back(node_agent: Callable[..., Any], kubelet: Any, new_pod: Any) -> None:
    agent, pod = node_agent(), new_pod()
    os.unlink(kubelet.publish(pod))
    rank = agent.join(socket=kubelet.publish(pod), job=JOB)
    rank.save(1)
    rank.wait_committed(1)


@pytest.mark.parametrize("gone", ["socket", "target", "volume"])
def test_volume_of_which_half_is_gone_is_removed(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any, gone: str
) -> None:
    node_agent()
    pod = new_pod()
    path = Path(kubelet.publish(pod))
    path.unlink()
    if gone != "socket":
        kubelet.target(pod).rmdir()
    if gone == "volume":
        kubelet.target(pod).parent.rmdir()
    kubelet.unpublish(pod)
    assert not kubelet.target(pod).exists()


def test_restarted_agent_gives_every_socket_back_and_persists_what_was_staged(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any, ranks: Any
) -> None:
    agent, pod, gone = node_agent(), new_pod(), new_pod(name="other-0-0", job="other")
    path = kubelet.publish(pod)
    kubelet.publish(gone)
    rank = agent.join(socket=path, job=JOB)
    rank.save(5, due=False)
    agent.kill()
    with pytest.raises(AgentUnavailable):
        agent.join(socket=path, job=JOB)
    # Meanwhile a pod goes, and what the kubelet removes by itself.
    Path(kubelet.socket(gone)).unlink()
    kubelet.target(gone).rmdir()
    kubelet.target(gone).parent.rmdir()
    agent.start()
    back = agent.join(socket=path, job=JOB)
    ranks.eventually(lambda: agent.job("uid1-0", JOB).latest_memory_step == 5, "the step is still there")
    back.want(5)
    back.wait_committed(5)
    assert [note.name for note in (agent.memory_dir / ".volumes").iterdir()] == [f"{pod.volume_id}.json"]
    assert kubelet.register() == "node-a"
    kubelet.unpublish(pod)
    back.wait_lost()
    kubelet.unpublish(gone)


def test_volume_that_the_agent_never_heard_of_is_removed(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any
) -> None:
    agent, pod = node_agent(), new_pod()
    kubelet.publish(pod)
    agent.kill()
    for note in (agent.memory_dir / ".volumes").iterdir():
        note.unlink()
    agent.start()
    kubelet.unpublish(pod)
    assert not kubelet.target(pod).exists()


# `inject` counts the effects of one request, and kills the agent before the nth.
EFFECTS = {"publish": 5, "unpublish": 5}


@pytest.fixture
def armed(
    node_agent: Callable[..., Any], kubelet: Any, tmp_path: Path, inject: Callable[[Path], dict[str, str]]
) -> Callable[[int], Any]:
    """An agent that, once told so, kills itself before the nth effect on its volumes."""
    trigger = tmp_path / "trigger"
    agent = node_agent(
        environment={
            **inject(_INJECT),
            "STEPFAST_KILL_TRIGGER": str(trigger),
            "STEPFAST_KILL_FOLDERS": os.pathsep.join([str(kubelet.folder / "pods"), "/.volumes/"]),
        }
    )

    def arm(effect: int) -> Any:
        building = trigger.with_suffix(".new")
        building.write_text(str(effect))
        building.rename(trigger)
        return agent

    return arm


@pytest.mark.parametrize("effect", range(1, EFFECTS["publish"] + 1))
def test_agent_killed_before_any_effect_of_publishing_publishes_when_asked_again(
    armed: Callable[[int], Any], kubelet: Any, new_pod: Any, effect: int
) -> None:
    agent, pod = armed(effect), new_pod()
    refused(lambda: kubelet.publish(pod), grpc.StatusCode.UNAVAILABLE)
    assert agent.process.wait(30) == -signal.SIGKILL
    agent.start()
    rank = agent.join(socket=kubelet.publish(pod), job=JOB)
    rank.save(1)
    rank.wait_committed(1)
    kubelet.unpublish(pod)
    assert not kubelet.target(pod).parent.exists()


@pytest.mark.parametrize("effect", range(1, EFFECTS["publish"] + 1))
def test_pod_that_goes_while_its_volume_is_half_published_leaves_nothing(
    armed: Callable[[int], Any], kubelet: Any, new_pod: Any, effect: int
) -> None:
    agent, pod = armed(effect), new_pod()
    refused(lambda: kubelet.publish(pod), grpc.StatusCode.UNAVAILABLE)
    assert agent.process.wait(30) == -signal.SIGKILL
    agent.start()
    kubelet.unpublish(pod)
    assert not kubelet.target(pod).parent.exists()
    assert not list((agent.memory_dir / ".volumes").glob("*.json"))


@pytest.mark.parametrize("effect", range(1, EFFECTS["unpublish"] + 1))
def test_agent_killed_before_any_effect_of_removing_removes_when_asked_again(
    armed: Callable[[int], Any], kubelet: Any, new_pod: Any, effect: int
) -> None:
    pod = new_pod()
    kubelet.publish(pod)
    agent = armed(effect)
    refused(lambda: kubelet.unpublish(pod), grpc.StatusCode.UNAVAILABLE)
    assert agent.process.wait(30) == -signal.SIGKILL
    agent.start()
    kubelet.unpublish(pod)
    assert not kubelet.target(pod).parent.exists()
    assert not list((agent.memory_dir / ".volumes").glob("*.json"))


def test_there_are_no_more_effects_than_agents_are_killed_at(
    armed: Callable[[int], Any], kubelet: Any, new_pod: Any
) -> None:
    armed(EFFECTS["publish"] + EFFECTS["unpublish"] + 1)
    pod = new_pod()
    kubelet.publish(pod)
    kubelet.unpublish(pod)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"context": {f"{INFO}/pod.name": None}}, ["pod.name", "podInfoOnMount"]),
        ({"context": {f"{INFO}/pod.namespace": None}}, ["pod.namespace"]),
        ({"context": {f"{INFO}/pod.uid": None}}, ["pod.uid"]),
        ({"context": {f"{INFO}/ephemeral": None}}, ["not ephemeral"]),
        ({"context": {f"{INFO}/ephemeral": "false"}}, ["not ephemeral"]),
        ({"context": {f"{INFO}/pod.uid": "another"}}, ["no CSI volume of it"]),
        ({"namespace": "../.."}, ["namespace"]),
        ({"job": ""}, ["volumeAttributes.job"]),
        ({"job": "../other"}, ["volumeAttributes.job", "'../other'"]),
        ({"job": "Upper"}, ["volumeAttributes.job"]),
        ({"run": ""}, ["volumeAttributes.run"]),
        ({"run": "a/../b"}, ["volumeAttributes.run"]),
        ({"secrets": {"PASSWORD": "hunter2"}}, ["AZURE_STORAGE_CONNECTION_STRING"]),
        ({"capability": csi.VolumeCapability(block=csi.VolumeCapability.BlockVolume())}, ["block device"]),
    ],
    ids=str,
)
def test_volume_that_no_pod_may_have_is_refused(
    shared_node: tuple[Any, Any], new_pod: Any, wrong: dict[str, Any], words: list[str]
) -> None:
    (agent, kubelet), pod = shared_node, new_pod(**wrong)
    name = "" if f"{INFO}/pod.name" in pod.context else pod.name
    refused(lambda: kubelet.publish(pod), grpc.StatusCode.INVALID_ARGUMENT, name, *words)
    assert not kubelet.target(pod).exists()
    assert "hunter2" not in agent.log


@pytest.mark.parametrize(
    "target",
    [
        "/etc/stepfast", "{pods}", "{pods}/../plugins/x", "{pods}/{uid}", "{pods}/{uid}/volumes/kubernetes.io~csi",
        "{pods}/{uid}/volumes/kubernetes.io~csi/../x/mount", "{pods}/{uid}/volumes/kubernetes.io~csi/stepfast/mount/..",
        "{pods}/{uid}/volumes/kubernetes.io~empty-dir/x/mount", "{pods}/other/volumes/kubernetes.io~csi/x/mount",
        "pods/{uid}/volumes/kubernetes.io~csi/x/mount", "", "\0",
    ],
)  # fmt: skip
def test_target_outside_the_pods_own_volumes_is_refused(
    shared_node: tuple[Any, Any], new_pod: Any, target: str
) -> None:
    (_, kubelet), pod = shared_node, new_pod()
    path = target.format(pods=kubelet.folder / "pods", uid=pod.uid) or "/"
    refused(lambda: kubelet.publish(pod, target=path), grpc.StatusCode.INVALID_ARGUMENT, "team-a/train-0-0")
    if "other" not in target:
        refused(lambda: kubelet.unpublish(pod, target=path), grpc.StatusCode.INVALID_ARGUMENT)


@pytest.mark.parametrize("volume_id", ["../x", ".", "a/b", "x" * 200])
def test_volume_id_that_is_no_name_is_refused(shared_node: tuple[Any, Any], new_pod: Any, volume_id: str) -> None:
    (_, kubelet), pod = shared_node, new_pod()
    refused(lambda: kubelet.publish(pod, volume_id=volume_id), grpc.StatusCode.INVALID_ARGUMENT)


def test_volume_published_for_another_run_is_not_changed(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any
) -> None:
    agent, pod = node_agent(), new_pod()
    kubelet.publish(pod)
    pod.run = "uid1-1"
    refused(lambda: kubelet.publish(pod), grpc.StatusCode.ALREADY_EXISTS, "team-a/train-0-0")
    assert agent.join(socket=kubelet.socket(pod), job=JOB, run="uid1-0")


def _notes(agent: Any) -> list[str]:
    return sorted(note.name for note in (agent.memory_dir / ".volumes").glob("*.json"))


def test_pod_has_one_volume_however_many_its_manifest_names(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any
) -> None:
    agent, pod = node_agent(), new_pod()
    path = kubelet.publish(pod)
    more = [replace(pod, volume=f"more-{number}", job=f"other-{number}") for number in range(3)]
    for second in more:
        words = (f"pod team-a/{pod.name}", pod.volume_id, "one")
        refused(lambda second=second: kubelet.publish(second), grpc.StatusCode.INVALID_ARGUMENT, *words)
        assert not kubelet.target(second).exists()
    assert _notes(agent) == [f"{pod.volume_id}.json"]
    assert kubelet.publish(pod) == path
    rank = agent.join(socket=path, job=JOB)
    rank.save(1)
    rank.wait_committed(1)
    beside = new_pod(name="train-0-1")
    kubelet.publish(beside)  # another pod of the same job and run
    kubelet.unpublish(more[0])  # as the kubelet does with what it could not mount
    refused(lambda: kubelet.publish(more[1]), grpc.StatusCode.INVALID_ARGUMENT)
    kubelet.unpublish(pod)
    assert agent.join(socket=kubelet.publish(more[1]), job="team-a/other-1")


def test_volumes_of_one_pod_that_are_asked_for_at_once_are_one(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any
) -> None:
    agent, pod = node_agent(), new_pod()
    volumes = [replace(pod, volume=f"volume-{number}") for number in range(8)]
    with ThreadPoolExecutor(len(volumes)) as threads:
        asked = [threads.submit(kubelet.publish, volume) for volume in volumes]
    codes = [error.code() for call in asked if isinstance(error := call.exception(), grpc.RpcError)]
    assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * (len(volumes) - 1)
    assert len(_notes(agent)) == 1


@pytest.mark.parametrize("is_back", [True, False], ids=["republished", "not yet republished"])
def test_restarted_agent_knows_that_a_pod_has_its_volume(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any, is_back: bool
) -> None:
    agent, pod = node_agent(), new_pod()
    path = Path(kubelet.publish(pod))
    agent.kill()
    if not is_back:
        path.unlink()
        path.parent.rmdir()
        path.parent.touch()  # no folder takes a socket there
    agent.start()
    second = replace(pod, volume="more")
    refused(lambda: kubelet.publish(second), grpc.StatusCode.INVALID_ARGUMENT, pod.volume_id)
    if not is_back:
        path.parent.unlink()
    assert agent.join(socket=kubelet.publish(pod), job=JOB)
    kubelet.unpublish(pod)
    assert agent.join(socket=kubelet.publish(second), job=JOB)


def test_restarted_agent_serves_one_of_the_volumes_that_one_before_it_gave_a_pod(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any
) -> None:
    agent, pod = node_agent(), new_pod()
    kubelet.publish(pod)
    second = replace(pod, volume="more")
    kubelet.target(second).mkdir(parents=True)
    agent.kill()
    folder = agent.memory_dir / ".volumes"
    note = json.loads((folder / f"{pod.volume_id}.json").read_text())
    note |= {"id": second.volume_id, "target_path": str(kubelet.target(second))}
    (folder / f"{second.volume_id}.json").write_text(json.dumps(note))
    agent.start()
    (kept,) = [volume for volume in (pod, second) if f"{volume.volume_id}.json" in _notes(agent)]
    assert agent.join(socket=kubelet.socket(kept), job=JOB)
    assert f"pod team-a/{pod.name}" in agent.log
    for volume in (pod, second):
        kubelet.unpublish(volume)
        assert not kubelet.target(volume).exists()


def test_agent_is_ready_once_the_kubelet_has_registered_it(
    new_agent: Callable[..., Any], kubelet: Any, ranks: Any, free_port: int
) -> None:
    agent = new_agent("--kubelet-dir", str(kubelet.folder), "--metrics-port", str(free_port))
    assert _get(free_port, "/healthz")[0] == 200
    status, text = _get(free_port, "/readyz")
    assert (status, "register" in text) == (503, True)
    kubelet.register(error="the kubelet is not well")
    assert _get(free_port, "/readyz")[0] == 503
    first = _made(kubelet.registration_socket)
    ranks.eventually(lambda: _made(kubelet.registration_socket) not in (None, first), "it offers itself again")
    assert "the kubelet is not well" in agent.log
    kubelet.register()
    assert _get(free_port, "/readyz") == (200, "ok\n")
    assert "stepfast_checkpoint_memory_limit_bytes" in _get(free_port, "/metrics")[1]
    assert _get(free_port, "/elsewhere")[0] == 404


def test_agent_whose_loop_stands_still_is_not_alive() -> None:
    health = Health()
    assert health.alive()[0]
    health._beat_time -= 60
    assert health.alive()[0] is False


def test_agent_that_ends_is_not_ready_flushes_and_leaves_its_sockets_names(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any
) -> None:
    agent, pod = node_agent(), new_pod()
    path = kubelet.publish(pod)
    rank = agent.join(socket=path, job=JOB)
    rank.save(3, due=False)
    assert agent.terminate() == 0
    assert [found.step for found in catalog.committed_steps(agent.store(), JOB)] == [3]
    assert os.path.exists(path)
    assert not kubelet.registration_socket.exists()
    agent.start()
    back = agent.join(socket=path, job=JOB)
    assert agent.job("uid1-0", JOB).latest_memory_step == 3
    back.save(4)
    back.wait_committed(4)


def test_agent_in_a_cluster_needs_no_socket_of_its_own(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any, tmp_path: Path
) -> None:
    agent = node_agent()
    agent.kill()
    command = [sys.executable, "-m", "stepfast_sidecar", "--memory-dir", str(agent.memory_dir)]
    command += ["--memory-limit", "auto", "--kubelet-dir", str(kubelet.folder), "--storage-root", agent.storage_uri]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "NODE_NAME": "node-of-the-environment"})
        try:
            assert kubelet.register() == "node-of-the-environment"
            rank = agent.join(socket=kubelet.publish(new_pod()), job=JOB)
            rank.save(1)
            rank.wait_committed(1)
            process.terminate()
            assert process.wait(60) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--node", "n"], "--kubelet-dir"),
        (["--socket", "s"], "NODE_NAME"),
        (["--kubelet-dir", "kubelet", "--node", "n"], "absolute"),
        (["--socket", "s", "--node", "n", "--memory-limit", "much"], "'much'"),
    ],
)
def test_wrong_options_are_said(
    arguments: list[str], words: str, capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.delenv("NODE_NAME", raising=False)
    with pytest.raises(SystemExit):
        parse_config(["--memory-dir", str(tmp_path), "--memory-limit", "1", *arguments])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limits", "expected"), [(["max"], None), (["1000000"], 500_000), (["max", "4000"], 2000), ([], None)]
)
def test_automatic_limit_is_half_of_what_may_be_held(tmp_path: Path, limits: list[str], expected: int | None) -> None:
    files = [tmp_path / f"limit{number}" for number in range(3)]
    for file, text in zip(files, limits, strict=False):
        file.write_text(f"{text}\n")
    system = os.statvfs(tmp_path)
    whole = system.f_blocks * system.f_frsize
    assert automatic_limit(tmp_path / "memory", files) == (expected if expected is not None else whole // 2)


def _get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def _made(path: Path) -> int | None:
    try:
        return path.stat().st_ctime_ns
    except FileNotFoundError:
        return None
