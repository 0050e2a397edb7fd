"""Eviction notices: a real agent that asks a metadata service whether its machine is about to be taken away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepfast.nodestatus import EvictionNotice, from_document, to_document
from stepfast_sidecar.notices import notice_in
from testcluster.metadataservice import MetadataService

NOON = "Mon, 19 Sep 2016 12:00:00 GMT"
ONE = "Mon, 19 Sep 2016 13:00:00 GMT"
NOON_SECONDS = 1474286400.0


def event(kind: str = "Preempt", **fields: Any) -> dict[str, Any]:
    usual = {"EventId": "e1", "EventType": kind, "Resources": ["vm_0"], "EventStatus": "Scheduled", "NotBefore": NOON}
    return {**usual, **fields}


NOTICE = EvictionNotice(kind="Preempt", event="e1", seen_time=5.0, not_before_time=NOON_SECONDS)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([], None, id="none"),
        pytest.param([event()], NOTICE, id="preempt"),
        pytest.param([event("Freeze")], None, id="a freeze is survived"),
        pytest.param([event(Resources=["vm_1"])], None, id="of another machine"),
        pytest.param([event(Resources=["vm_1", "VM_0"])], NOTICE, id="among others, in capitals"),
        pytest.param(
            [event(EventStatus="Started", NotBefore="")],
            EvictionNotice(kind="Preempt", event="e1", seen_time=5.0),
            id="has begun",
        ),
        pytest.param(
            [event("Reboot", EventId="e2", NotBefore="Mon, 19 Sep 2016 13:00:00 GMT"), event()],
            NOTICE,
            id="the first counts",
        ),
    ],
)
def test_event_that_ends_what_runs_here_is_a_notice(events: list[Any], expected: EvictionNotice | None) -> None:
    assert notice_in({"DocumentIncarnation": 1, "Events": events}, "vm_0", 5.0) == expected


@pytest.mark.parametrize("kind", ["Preempt", "Redeploy", "Reboot", "Terminate"])
def test_every_kind_that_ends_the_machine_counts(kind: str) -> None:
    found = notice_in({"Events": [event(kind)]}, "vm_0", 5.0)
    assert found is not None
    assert found.kind == kind


@pytest.mark.parametrize(
    "document", [{}, {"Events": [{}]}, {"Events": None}, [], {"Events": [event(NotBefore="soon")]}], ids=repr
)
def test_document_that_is_none_is_refused(document: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        notice_in(document, "vm_0", 5.0)


@pytest.fixture
def service() -> Iterator[MetadataService]:
    made = MetadataService()
    yield made
    made.close()


@pytest.fixture
def warned_agent(new_agent: Callable[..., Any], service: MetadataService, eventually: Callable[..., None]) -> Any:
    """An agent that has asked about events once."""
    agent = new_agent("--eviction-notices", service.url)
    eventually(lambda: service.asked, "the agent asks about events")
    return agent


def persisted(agent: Any) -> int | None:
    step: int | None = agent.job().latest_persisted_step
    return step


def test_notice_has_all_that_is_held_persisted_though_nobody_gets_a_signal(
    warned_agent: Any, service: MetadataService, eventually: Callable[..., None]
) -> None:
    warned_agent.join().save(7, due=False)
    assert persisted(warned_agent) is None
    event = service.announce("Preempt", "machine-1", "machine-2", seconds=30)
    eventually(lambda: persisted(warned_agent) == 7, "what was staged and not due is committed")
    notice = warned_agent.status().notice
    assert (notice.kind, notice.event) == ("Preempt", event)
    assert 20 < notice.not_before_time - notice.seen_time <= 31
    assert from_document(to_document(warned_agent.status())).notice == notice


def test_training_goes_on_until_the_machine_is_gone(
    warned_agent: Any, service: MetadataService, eventually: Callable[..., None]
) -> None:
    rank = warned_agent.join()
    rank.save(1, due=False)
    event = service.announce("Reboot", "machine-1")
    eventually(lambda: persisted(warned_agent) == 1, "it is flushed")
    rank.save(2)
    eventually(lambda: persisted(warned_agent) == 2, "later steps are persisted as ever")
    service.begin(event)
    eventually(lambda: warned_agent.status().notice.not_before_time is None, "it has begun")


@pytest.mark.parametrize(("kind", "machine"), [("Freeze", "machine-1"), ("Preempt", "machine-2")])
def test_event_that_is_not_the_end_of_this_machine_changes_nothing(
    warned_agent: Any, service: MetadataService, eventually: Callable[..., None], kind: str, machine: str
) -> None:
    warned_agent.join().save(7, due=False)
    service.announce(kind, machine)
    asked = service.asked
    eventually(lambda: service.asked >= asked + 2, "the agent has heard of it")
    assert (warned_agent.status().notice, persisted(warned_agent)) == (None, None)


def test_notice_that_is_withdrawn_is_told_no_more(
    warned_agent: Any, service: MetadataService, eventually: Callable[..., None]
) -> None:
    event = service.announce("Redeploy", "machine-1")
    eventually(lambda: warned_agent.status().notice is not None, "the status tells of it")
    service.withdraw(event)
    eventually(lambda: warned_agent.status().notice is None, "the status tells of it no more")


def test_node_that_stays_after_all_persists_what_is_due_alone(
    warned_agent: Any, service: MetadataService, eventually: Callable[..., None]
) -> None:
    rank = warned_agent.join()
    rank.save(1, due=False)
    event = service.announce("Redeploy", "machine-1")
    eventually(lambda: persisted(warned_agent) == 1, "it is flushed")
    rank.save(2, due=False)
    eventually(lambda: persisted(warned_agent) == 2, "so is what is staged while the notice stands")
    service.withdraw(event)
    eventually(lambda: warned_agent.status().notice is None, "the notice is withdrawn")
    rank.save(3, due=False)
    rank.save(4)
    rank.wait_committed(4)
    assert rank.committed() == [1, 2, 4]


def test_service_that_fails_for_a_while_is_asked_again_and_said_once(
    warned_agent: Any, service: MetadataService, eventually: Callable[..., None]
) -> None:
    service.is_failing = True
    eventually(lambda: "tells of no scheduled events" in warned_agent.log, "it is said")
    event = service.announce("Terminate", "machine-1")
    service.is_failing = False
    eventually(lambda: warned_agent.status().notice is not None, "it is heard of all the same")
    assert warned_agent.status().notice.event == event
    assert warned_agent.log.count("tells of no scheduled events") == 1


def test_agent_serves_where_there_is_no_such_service(
    new_agent: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    gone = MetadataService()
    gone.close()
    agent = new_agent("--eviction-notices", gone.url)
    eventually(lambda: "tells of no scheduled events" in agent.log, "it is said")
    agent.join().save(3)
    eventually(lambda: persisted(agent) == 3, "steps are persisted")
    assert agent.terminate() == 0


def test_node_in_the_cluster_tells_of_a_notice_for_as_long_as_it_stands(
    new_agent: Callable[..., Any], service: MetadataService, api: Any, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(api.kubeconfig())
    options = ("--checkpoint-node", "--eviction-notices", service.url)
    new_agent(*options, environment={"KUBECONFIG": str(kubeconfig)})

    def told() -> Any:
        return (api.found or {}).get("status", {}).get("evictionNotice")

    event = service.announce("Preempt", "machine-1")
    eventually(lambda: told() is not None and told()["event"] == event, "the CheckpointNode tells of it")
    service.withdraw(event)
    eventually(lambda: told() is None, "it tells of it no more")
