"""I10: through its socket a pod speaks for its own job and run, and for nothing else, whatever it says or does."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from eventual import files_in
from stepfast import catalog
from stepfast.client import connect
from stepfast.errors import AgentUnavailable, ProtocolError
from stepfast.messages import VERSION, Failure, FlushRun, Launching, Progress, RequestSave, Staged, Watch
from stepfast.protocol import ANSWER_LIMIT, Decoder, encode
from stepfast.storage.rules import StorageRules
from stepfast_sidecar.tenants import launch_of, persister_environment

NEIGHBOUR = "team-b/neighbour"


class Neighbour:
    """Another tenant's rank, in a pod of its own on the same node. It saves on, whatever happens around it."""

    def __init__(self, node: tuple[Any, Any], new_pod: Any) -> None:
        self.agent, kubelet = node
        pod = new_pod(namespace="team-b", name="neighbour-0-0", job="neighbour", run="theirs-0")
        self.rank = self.agent.join(socket=kubelet.publish(pod), job=NEIGHBOUR, run="theirs-0")
        self.step = 0
        self.save()

    def save(self) -> None:
        self.step += 1
        self.rank.save(self.step)
        self.rank.wait_committed(self.step)


@pytest.fixture(scope="module")
def the_neighbour(shared_node: tuple[Any, Any], new_pod: Any) -> Neighbour:
    return Neighbour(shared_node, new_pod)


@pytest.fixture
def tenant(
    shared_node: tuple[Any, Any], new_pod: Any, the_neighbour: Neighbour
) -> Iterator[Callable[..., tuple[Any, str]]]:
    """Publishes a pod's volume; after the test it is removed, and the neighbour is well."""
    _, kubelet = shared_node
    pods = []

    def publish(**values: object) -> tuple[Any, str]:
        pods.append(new_pod(**{"job": f"job-{uuid.uuid4().hex[:8]}", **values}))
        return pods[-1], kubelet.publish(pods[-1])

    yield publish
    for pod in pods:
        kubelet.unpublish(pod)
    the_neighbour.save()
    assert not the_neighbour.rank.lost.is_set()


def _say(path: str, *messages: Any) -> list[Any]:
    """Sends messages, and reads until the agent closes the connection."""
    with connect(path, 30) as sock:
        with contextlib.suppress(OSError):
            for message in messages:
                sock.sendall(encode(message))
        decoder, answers = Decoder(ANSWER_LIMIT), []
        with contextlib.suppress(ConnectionResetError):
            while data := sock.recv(1 << 16):
                answers += list(decoder.feed(data))
        return answers


@pytest.mark.parametrize(
    "claim",
    [
        {"job": NEIGHBOUR, "run": "theirs-0"},
        {"job": NEIGHBOUR},
        {"job": "team-a/other"},
        {"job": "team-b/{job}"},
        {"run": "uid1-1"},
        {"run": "uid1-00"},
        {"run": "uid1-0."},
        {"run": "uid1-0.01"},
        {"run": "uid1-0.1.1"},
        {"run": "uid1-0.x"},
        {"run": "theirs-0"},
        {"storage_uri": "file:///etc"},
        {"storage_uri": "{root}/team-b"},
        {"storage_uri": "{root}/../elsewhere"},
        {"storage_uri": "abfss://container@account.dfs.core.windows.net/x"},
        {"storage_uri": "memory://x"},
        {"storage_uri": ""},
    ],
    ids=str,
)
def test_hello_that_does_not_fit_the_pod_is_refused(
    tenant: Callable[..., Any], shared_node: tuple[Any, Any], claim: dict[str, Any]
) -> None:
    agent, _ = shared_node
    pod, path = tenant()
    words = {"job": pod.job, "root": agent.storage_uri}
    said = {key: value.format(**words) if isinstance(value, str) else value for key, value in claim.items()}
    claimed = {"job": f"team-a/{pod.job}", **said}
    with pytest.raises(ProtocolError, match="pod team-a/train-0-0"):
        agent.join(socket=path, **claimed)
    launching = {"version": VERSION, "run": "uid1-0", "storage_uri": agent.storage_uri, **claimed}
    (answer,) = _say(path, Launching(first_rank=0, ranks=1, resume_step=None, **launching))
    assert "pod team-a/train-0-0" in answer.reason
    assert not (agent.storage / "team-b" / pod.job).exists()


def test_root_is_the_root_with_and_without_a_slash_at_its_end(
    tenant: Callable[..., Any], shared_node: tuple[Any, Any]
) -> None:
    agent, _ = shared_node
    pod, path = tenant()
    rank = agent.join(socket=path, job=f"team-a/{pod.job}", storage_uri=f"{agent.storage_uri}/")
    rank.save(1)
    rank.wait_committed(1)


@pytest.mark.parametrize(
    "message",
    [
        Watch(),
        FlushRun(job=NEIGHBOUR, run="theirs-0"),
        RequestSave(job=NEIGHBOUR, run="theirs-0"),
        FlushRun(job="team-a/train", run="uid1-0"),
        Progress(step=1, time=1.0, metrics={}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_pods_supervise_nobody(tenant: Callable[..., Any], the_neighbour: Neighbour, message: Any) -> None:
    _, path = tenant()
    pushed = len(the_neighbour.rank.pushed)
    (answer,) = _say(path, message)
    assert isinstance(answer, Failure)
    assert "not for pods" in answer.reason
    assert len(the_neighbour.rank.pushed) == pushed


def test_rank_that_has_said_hello_supervises_nobody(tenant: Callable[..., Any], shared_node: tuple[Any, Any]) -> None:
    agent, _ = shared_node
    pod, path = tenant()
    answers = _say(path, agent.hello(job=f"team-a/{pod.job}"), Watch())
    assert isinstance(answers[-1], Failure)
    assert not [answer for answer in answers if type(answer).__name__ == "Status"]


def test_user_of_the_process_does_not_matter_in_a_pod_and_does_at_the_nodes_own_socket(
    tenant: Callable[..., Any], shared_node: tuple[Any, Any]
) -> None:
    agent, _ = shared_node
    _, path = tenant()
    os.chmod(agent.folder, 0o755)
    os.chmod(agent.socket, 0o666)
    assert _as_nobody(path, speaks=True) == "not for pods"
    assert _as_nobody(agent.socket, speaks=False) == "user 65534 is not"


def _as_nobody(path: str, *, speaks: bool) -> str:
    """What the agent answers to a process of another user."""
    sock = connect(path, 30)  # the way there is root's; a pod sees the folder alone
    sock.close()
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    code = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534);"
        "s = socket.socket(socket.AF_UNIX); s.connect(f'/proc/self/fd/{sys.argv[1]}/' + sys.argv[2]);"
        "s.send((16).to_bytes(4, 'big') + b'{\"type\":\"Watch\"}', socket.MSG_NOSIGNAL) if sys.argv[3] else None;"
        "print(s.recv(65536))"
    )
    try:
        command = [sys.executable, "-c", code, str(folder), os.path.basename(path), "1" if speaks else ""]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, pass_fds=[folder])
    finally:
        os.close(folder)
    said = done.stdout + done.stderr
    return next((words for words in ("not for pods", "user 65534 is not") if words in said), said)


def test_pod_with_more_ranks_than_it_says_is_refused(tenant: Callable[..., Any], shared_node: tuple[Any, Any]) -> None:
    agent, _ = shared_node
    pod, path = tenant()
    job = f"team-a/{pod.job}"
    agent.join(socket=path, job=job, world_size=100, local_world_size=2, rank=0)
    died = agent.join(socket=path, job=job, world_size=100, local_world_size=2, rank=1)
    died.die()
    for said in ({"rank": 2, "local_world_size": 2}, {"rank": 1, "local_world_size": 3}):
        with pytest.raises(ProtocolError, match="more ranks than"):
            agent.join(socket=path, job=job, world_size=100, **said)
    agent.join(socket=path, job=job, world_size=100, local_world_size=2, rank=1)


def test_pod_that_claims_ever_more_ranks_does_not_fill_the_agent(
    tenant: Callable[..., Any], shared_node: tuple[Any, Any]
) -> None:
    agent, _ = shared_node
    pod, path = tenant()
    said = {"socket": path, "job": f"team-a/{pod.job}", "world_size": 1000, "local_world_size": 1000}
    for rank in range(256):
        agent.join(rank=rank, local_rank=rank, **said).die()
    with pytest.raises(ProtocolError, match="more ranks than the 256"):
        agent.join(rank=256, local_rank=256, **said)


def test_ranks_of_a_launch_that_torchrun_has_replaced_are_no_more(
    tenant: Callable[..., Any], shared_node: tuple[Any, Any]
) -> None:
    agent, _ = shared_node
    pod, path = tenant()
    job = f"team-a/{pod.job}"
    first = agent.join(socket=path, job=job)
    first.save(1)
    first.wait_committed(1)
    second = agent.join(socket=path, job=job, run="uid1-0.1")
    first.wait_lost()
    second.save(2)
    second.wait_committed(2)
    with pytest.raises(ProtocolError, match="is over"):
        agent.join(socket=path, job=job)


def test_pod_that_opens_connections_without_end_stops_nobody(
    tenant: Callable[..., Any], shared_node: tuple[Any, Any], the_neighbour: Neighbour, eventually: Callable[..., None]
) -> None:
    agent, _ = shared_node
    _, path = tenant()
    before = agent.descriptors()
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            stack.enter_context(connect(path, 30))
        the_neighbour.save()
        assert agent.descriptors() < before + 300
    eventually(lambda: agent.descriptors() <= before + 2, "they are given back")


def test_pids_of_pods_do_not_mix_their_ranks_up(tenant: Callable[..., Any], shared_node: tuple[Any, Any]) -> None:
    agent, _ = shared_node
    pod, path = tenant()
    _, beside = tenant(job=pod.job, name="train-0-1")
    job = f"team-a/{pod.job}"
    rank = agent.join(socket=path, job=job, world_size=2, pid=7)
    with pytest.raises(ProtocolError, match="here already"):
        agent.join(socket=beside, job=job, world_size=2, pid=7)
    back = agent.join(socket=path, job=job, world_size=2, pid=7)  # its own connection was lost
    rank.wait_lost()
    assert not back.lost.is_set()


def test_two_pods_of_a_job_on_a_node_make_one_part(tenant: Callable[..., Any], shared_node: tuple[Any, Any]) -> None:
    agent, _ = shared_node
    pod, path = tenant()
    _, beside = tenant(job=pod.job, name="train-0-1")
    job = f"team-a/{pod.job}"
    first = agent.join(socket=path, job=job, world_size=2, rank=0, node=0)
    second = agent.join(socket=beside, job=job, world_size=2, rank=1, node=1)
    first.save(5)
    first.want(5)
    (status,) = [found for found in agent.status().jobs if str(found.job) == job]
    assert status.latest_memory_step is None
    second.save(5)
    first.wait_committed(5)
    second.wait_committed(5)
    assert [file.rank for file in catalog.verify_step(agent.store(), job, 5)] == [0, 1]
    assert len(list((agent.storage / job / "global_step5").glob("part-*"))) == 1


@pytest.mark.parametrize("kind", ["file", "link", "folder", "link-to-folder"])
def test_what_a_tenant_puts_in_the_sockets_place_is_replaced_and_never_followed(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any, tmp_path: Path, kind: str
) -> None:
    agent, pod = node_agent(), new_pod()
    path = Path(kubelet.publish(pod))
    victim = tmp_path / "victim"
    agent.kill()
    path.unlink()
    if kind == "folder":
        (path / "deep").mkdir(parents=True)
        (path / "deep" / "link").symlink_to(tmp_path)
    elif kind == "link-to-folder":
        victim.mkdir(mode=0o700)
        path.symlink_to(victim)
    else:
        victim.write_text("secret")
        victim.chmod(0o600)
        path.symlink_to(victim) if kind == "link" else path.write_text("mine")
    (path.parent / "agent.sock.new").symlink_to(victim)
    (path.parent / "extra").symlink_to("/etc")
    agent.start()
    rank = agent.join(socket=str(path), job="team-a/train")
    rank.save(1)
    rank.wait_committed(1)
    assert kind in ("file", "folder") or oct(victim.stat().st_mode)[-3:] in ("600", "700")
    kubelet.unpublish(pod)
    assert not kubelet.target(pod).exists()
    assert kind != "link" or victim.read_text() == "secret"
    assert os.path.exists("/etc/passwd")
    assert tmp_path.exists()


def test_target_that_is_a_link_is_neither_served_nor_emptied(
    shared_node: tuple[Any, Any], new_pod: Any, tmp_path: Path
) -> None:
    _, kubelet = shared_node
    pod = new_pod()
    kubelet.target(pod).parent.mkdir(parents=True)
    (tmp_path / "precious").write_text("kept")
    kubelet.target(pod).symlink_to(tmp_path)
    with pytest.raises(Exception, match="not published"):
        kubelet.publish(pod)
    kubelet.unpublish(pod)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_times_and_numbers_that_no_clock_shows_do_no_harm(
    tenant: Callable[..., Any], shared_node: tuple[Any, Any]
) -> None:
    agent, _ = shared_node
    pod, path = tenant()
    rank = agent.join(socket=path, job=f"team-a/{pod.job}")
    for time in (1e300, -1e300, 4e18):
        rank.client.send(Progress(step=1, time=time, metrics={"loss": float("nan")}))
    rank.save(2)
    rank.wait_committed(2)
    assert agent.job(job=f"team-a/{pod.job}").ranks[0].global_step == 1
    with pytest.raises(ProtocolError):
        Staged(slot=0, seq=1, stall_seconds=1e308)


# ---------------------------------------------------------------- storages and secrets


def test_storage_that_the_administrator_allows_is_used(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any, tmp_path: Path
) -> None:
    allowed = (tmp_path / "allowed").as_uri()
    agent = node_agent("--allow-storage", "file:///another", "--allow-storage", allowed)
    path = kubelet.publish(new_pod())
    with pytest.raises(ProtocolError, match="administrator"):
        agent.join(socket=path, job="team-a/train", storage_uri=f"{allowed}/team-b")
    rank = agent.join(socket=path, job="team-a/train", storage_uri=allowed)
    rank.save(1)
    rank.wait_committed(1)
    assert (tmp_path / "allowed" / "team-a" / "train" / "global_step1" / "manifest.json").exists()


@pytest.fixture
def opened(azurite: Any) -> tuple[str, dict[str, str]]:
    """A job's own storage, and the secret that opens it."""
    secret = {"AZURE_STORAGE_CONNECTION_STRING": azurite.connection_string(), "LD_PRELOAD": "/tenant.so", "PATH": "/x"}
    return f"abfs://{azurite.new_container()}/here", secret


def test_secret_opens_a_storage_for_its_job_alone(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any, opened: tuple[str, dict[str, str]]
) -> None:
    identity = {"AZURE_CLIENT_ID": "the-agents-own", "AZURE_FEDERATED_TOKEN_FILE": "/token"}
    agent = node_agent(environment=identity)
    uri, secret = opened
    pod = new_pod(secrets=secret)
    rank = agent.join(socket=kubelet.publish(pod), job="team-a/train", storage_uri=uri)
    other = agent.join(
        socket=kubelet.publish(new_pod(namespace="team-b", name="neighbour-0-0", job="neighbour")), job=NEIGHBOUR
    )
    for peer in (rank, other):
        peer.save(1)
        peer.wait_committed(1)
    with pytest.raises(ProtocolError, match="a secret opens storages of"):
        agent.join(socket=kubelet.socket(pod), job="team-a/train", storage_uri="file:///etc")

    environments = {job: psutil.Process(pid).environ() for job, pid in agent.persisters().items()}
    key = "AccountKey="
    mine, theirs = environments["team-a/train"], environments[NEIGHBOUR]
    assert key in mine["AZURE_STORAGE_CONNECTION_STRING"]
    assert mine.get("LD_PRELOAD") is None
    assert mine["PATH"] == os.environ["PATH"]
    assert not identity.keys() & mine.keys()
    assert mine["AZURE_STORAGE_ANON"] == "true"
    assert identity.items() <= theirs.items()
    assert not any(key in value for value in theirs.values())
    assert not any(key in value for value in psutil.Process(agent.pid).environ().values())
    assert not any(key in word for pid in (agent.pid, *agent.persisters().values()) for word in _words(pid))
    assert key not in agent.log
    for note in files_in(agent.memory_dir, "**/*.json"):
        assert note.stat().st_mode & 0o077 == 0, note
    assert agent.memory_dir.stat().st_mode & 0o077 == 0
    others = [note for note in agent.memory_dir.glob(".volumes/*") if pod.volume_id not in note.name]
    assert others
    assert not any(key in note.read_text() for note in others)


def _words(pid: int) -> list[str]:
    return psutil.Process(pid).cmdline()


def test_restarted_agent_persists_with_the_secret_of_a_pod_that_is_gone(
    node_agent: Callable[..., Any],
    kubelet: Any,
    new_pod: Any,
    opened: tuple[str, dict[str, str]],
    eventually: Callable[..., None],
) -> None:
    uri, secret = opened
    agent, pod = node_agent(), new_pod(secrets=secret)
    rank = agent.join(socket=kubelet.publish(pod), job="team-a/train", storage_uri=uri)
    rank.save(1)
    rank.wait_committed(1)
    rank.save(2, due=False)
    agent.kill()
    for note in (agent.memory_dir / ".volumes").iterdir():
        note.unlink()
    agent.start()
    eventually(lambda: agent.job(job="team-a/train").latest_persisted_step == 2, "it is committed")
    assert "AccountKey=" not in agent.log


def test_new_attempt_brings_new_credentials(
    node_agent: Callable[..., Any],
    kubelet: Any,
    new_pod: Any,
    opened: tuple[str, dict[str, str]],
    eventually: Callable[..., None],
) -> None:
    agent, (uri, secret) = node_agent(), opened
    expired = {"AZURE_STORAGE_CONNECTION_STRING": secret["AZURE_STORAGE_CONNECTION_STRING"].replace("Key=E", "Key=F")}
    first = agent.join(
        socket=kubelet.publish(new_pod(secrets=expired)), job="team-a/train", storage_uri=uri, run="uid1-0"
    )
    first.save(1)
    eventually(first.failures, "the storage refuses")
    first.die()
    pod = new_pod(secrets=secret, run="uid1-1", name="train-1-0")
    second = agent.join(socket=kubelet.publish(pod), job="team-a/train", storage_uri=uri, run="uid1-1")
    eventually(lambda: agent.job(job="team-a/train").latest_persisted_step == 1, "what was staged goes out")
    second.save(2)
    second.wait_committed(2)


def test_job_made_again_with_another_storage_is_taken_in(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    allowed = (tmp_path / "allowed").as_uri()
    agent = node_agent("--allow-storage", allowed)
    first = agent.join(socket=kubelet.publish(new_pod()), job="team-a/train")
    first.save(1)
    first.wait_committed(1)
    again = kubelet.publish(new_pod(run="uid2-0"))
    with pytest.raises(ProtocolError, match="with the storage"):  # the other one runs
        agent.join(socket=again, job="team-a/train", run="uid2-0", storage_uri=allowed)
    first.close()
    eventually(lambda: not agent.job(job="team-a/train").ranks[0].alive, "it has left")
    second = agent.join(socket=again, job="team-a/train", run="uid2-0", storage_uri=allowed)
    second.save(1)
    second.wait_committed(1)
    assert (tmp_path / "allowed" / "team-a" / "train" / "global_step1" / "manifest.json").exists()
    assert agent.used_bytes() < 3 * (1 << 20)


def test_notes_that_do_not_parse_keep_no_agent_from_starting(
    node_agent: Callable[..., Any], kubelet: Any, new_pod: Any
) -> None:
    agent, pod, damaged = node_agent(), new_pod(), new_pod(name="other-0-0")
    path = kubelet.publish(pod)
    kubelet.publish(damaged)
    agent.kill()
    (agent.memory_dir / ".volumes" / f"{damaged.volume_id}.json").write_text("{")
    (agent.memory_dir / ".volumes" / "x.json").write_text(json.dumps({"id": "x"}))
    agent.start()
    rank = agent.join(socket=path, job="team-a/train")
    rank.save(1)
    rank.wait_committed(1)
    with pytest.raises(AgentUnavailable):
        agent.join(socket=kubelet.socket(damaged), job="team-a/train")


@pytest.mark.parametrize(
    ("uri", "has_credentials", "fits"),
    [
        ("abfss://root@account.dfs.core.windows.net/all", False, True),
        ("abfss://root@account.dfs.core.windows.net/all/", False, True),
        ("abfss://root@account.dfs.core.windows.net/all/team-b", False, False),
        ("abfss://root@account.dfs.core.windows.net/", False, False),
        ("abfss://root@account.dfs.core.windows.net/allowed", False, False),
        ("az://allowed/x", False, True),
        ("az://allowed/y", False, False),
        ("az://allowed/y", True, True),
        ("s3://bucket", True, True),
        ("file:///memory", True, False),
        ("/memory", True, False),
        ("simplecache::az://x/y", True, False),
        ("github://x:y@z", True, False),
        ("", True, False),
    ],
)  # fmt: skip
def test_storages_that_a_pod_may_name(uri: str, has_credentials: bool, fits: bool) -> None:
    rules = StorageRules(root="abfss://root@account.dfs.core.windows.net/all", allowed=("az://allowed/x/",))
    assert (rules.refusal(uri, has_credentials=has_credentials) is None) is fits


def test_without_a_root_nothing_is_allowed_without_credentials() -> None:
    assert StorageRules().refusal("", has_credentials=False) is not None
    assert StorageRules(root="").refusal("/", has_credentials=False) is not None


@pytest.mark.parametrize(
    ("run", "launch"), [("a-1", 0), ("a-1.1", 1), ("a-1.12", 12), ("a-1.0", None), ("a-1.", None), ("a-10", None),
    ("a-1.1.1", None), ("a-1.²", None), ("a-1.9999999999", None), ("", None)],
)  # fmt: skip
def test_launches_of_a_run(run: str, launch: int | None) -> None:
    assert launch_of(run, "a-1") == launch


def test_persister_without_credentials_of_its_own_knows_what_the_agent_knows() -> None:
    assert persister_environment({"AZURE_CLIENT_ID": "x"}, {}) == {"AZURE_CLIENT_ID": "x"}
