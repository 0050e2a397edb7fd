"""Frames and messages: what is sent is what arrives, and nothing but ProtocolError comes of nonsense."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepfast import messages, protocol
from stepfast.errors import ProtocolError, ProtocolMismatch
from stepfast.messages import Hello, Message, Progress
from stepfast.protocol import Decoder, decode, encode

HELLO = Hello(
    version=messages.VERSION,
    job="default/train",
    run="uid-0",
    rank=1,
    local_rank=1,
    world_size=4,
    local_world_size=2,
    node=0,
    pid=17,
    storage_uri="file:///data",
    memory_bytes=0,
    max_to_keep=3,
    resume_step=100,
)
EXAMPLES: list[Message] = [
    HELLO,
    messages.Expect(size_bytes=1),
    messages.Reserve(id=1, step=5, name="state", size_bytes=10, window_begin=9, drop=(1, 2), copying=(0, 3)),
    messages.Staged(slot=2, seq=7, stall_seconds=0.25),
    messages.Sharers(step=5, ranks="0,4-7"),
    messages.Skipped(step=5),
    messages.GaveUp(step=5),
    Progress(step=5, time=1.5, metrics={"loss": 0.5}, total_steps=300),
    messages.Restored(step=5, tier="Memory", time=1.5, seconds=0.5),
    messages.Steps(id=2),
    messages.Supersede(id=2, step=-1),
    messages.SetAside(id=2, step=5),
    messages.Remove(id=2, step=5),
    messages.Fetch(id=3, path="global_step5/manifest.json", refresh=True),
    messages.Borrow(id=3, name="activations", size_bytes=8192),
    messages.Want(step=5),
    messages.Referable(steps=(5, 10)),
    messages.FinalSaved(step=5),
    messages.Bye(),
    messages.Launching(
        version=messages.VERSION,
        job="default/train",
        run="uid-0",
        storage_uri="file:///data",
        first_rank=8,
        ranks=4,
        resume_step=None,
    ),
    messages.Watch(),
    messages.RequestSave(job="default/train", run="uid-0"),
    messages.FlushRun(job="default/train", run="uid-0"),
    messages.Welcome(version=1, share_bytes=5),
    messages.Reserved(id=1, slot=0, seq=1, capacity_bytes=4096, slots=3, persisting=(1,), unpersisted=()),
    messages.SlotReady(slot=0, capacity_bytes=4096),
    messages.Failure(id=1, kind="StorageFull", reason="no space"),
    messages.CommittedSteps(id=2, steps=(1, 2, 3)),
    messages.Fetched(id=3, offset=4096, size_bytes=10, tier="Memory"),
    messages.Lent(id=3, granted_bytes=8192),
    messages.Committed(step=5, committed_time=1.5),
    messages.Unreferable(steps=(5,)),
    messages.PersistFailed(step=5, reason="no space"),
    messages.Dropped(step=5),
    messages.SaveRequested(),
    messages.Status(document="{}"),
]


def _document(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode(message)[4:])
    return found


def test_examples_are_of_every_message() -> None:
    known = (*messages.FROM_RANK, *messages.FROM_LAUNCHER, *messages.FROM_SUPERVISOR, *messages.FROM_AGENT)
    assert [type(message) for message in EXAMPLES] == list(known)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_message_arrives_as_it_was_sent(message: Message) -> None:
    assert decode(encode(message)[4:]) == message


@given(cuts=st.lists(st.integers(0, 4000), max_size=20))
@settings(max_examples=50)
def test_messages_arrive_whole_however_the_stream_is_cut(cuts: list[int]) -> None:
    stream = b"".join(encode(message) for message in EXAMPLES)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    decoder = Decoder(protocol.REQUEST_LIMIT)
    arrived = [m for a, b in itertools.pairwise(edges) for m in decoder.feed(stream[a:b])]
    assert arrived == EXAMPLES


def _feed(data: bytes) -> None:
    """Nothing but ProtocolError may come of any bytes."""
    with contextlib.suppress(ProtocolError):
        list(Decoder(protocol.REQUEST_LIMIT).feed(data))


@given(data=st.binary(max_size=300))
@settings(max_examples=200)
def test_random_bytes_raise_nothing_but_protocol_errors(data: bytes) -> None:
    _feed(data)
    _feed(len(data).to_bytes(4, "big") + data)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["../..", "a" * 300, "\ud800", "\0", "default/train", "global_step1/manifest.json"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(data=st.data(), example=st.sampled_from([m for m in EXAMPLES if fields(m)]))
@settings(max_examples=300)
def test_message_with_any_value_in_any_field_raises_nothing_but_protocol_errors(
    data: st.DataObject, example: Message
) -> None:
    document = _document(example)
    key = data.draw(st.sampled_from(sorted(document)))
    document[key] = data.draw(_JSON)
    body = json.dumps(document).encode()
    _feed(len(body).to_bytes(4, "big") + body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe\x00",
        b'{"type":"Bye","extra":1}',
        b'{"type":"Want"}',
        b'{"type":["Want"],"step":1}',
        b'{"type":"Want","step":true}',
        b'{"type":"Want","step":1.0}',
        b'{"type":"Want","step":-1}',
        b'{"type":"Want","step":' + b"9" * 5000 + b"}",
        b'{"type":"Staged","slot":0,"seq":0,"stall_seconds":NaN}',
        b'{"type":"Staged","slot":0,"seq":0,"stall_seconds":Infinity}',
        b"[" * 60_000,
        b'{"type":' * 8000,
    ],
    ids=lambda body: body[:40].decode("latin1") + f"({len(body)})",
)
def test_broken_frame_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(body)


@pytest.mark.parametrize("length", [protocol.REQUEST_LIMIT + 1, 2**31, 2**32 - 1], ids=str)
def test_oversized_frame_is_refused_by_its_length_alone(length: int) -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        list(Decoder(protocol.REQUEST_LIMIT).feed(length.to_bytes(4, "big")))


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 4},
        {"rank": -1},
        {"local_rank": 2},
        {"world_size": 0},
        {"local_world_size": 5},
        {"node": -1},
        {"pid": 0},
        {"job": "../etc"},
        {"job": "a/../b"},
        {"job": "train"},
        {"run": "../x"},
        {"run": ""},
        {"run": "a/b"},
        {"memory_bytes": -1},
        {"resume_step": 2**63 - 1},
    ],
    ids=str,
)
def test_hello_out_of_range_is_refused(changes: dict[str, object]) -> None:
    body = json.dumps({**_document(HELLO), **changes}).encode()
    with pytest.raises(ProtocolError):
        decode(body)


def test_hello_of_another_version_says_which_versions_they_are() -> None:
    with pytest.raises(ProtocolMismatch, match="protocol 2, the agent 1"):
        decode(json.dumps({**_document(HELLO), "version": 2}).encode())


def test_heartbeat_of_an_sdk_from_before_total_steps_is_understood() -> None:
    document = _document(Progress(step=1, time=2.0, metrics={}))
    del document["total_steps"]
    assert decode(json.dumps(document).encode()) == Progress(step=1, time=2.0, metrics={})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_metric_that_is_no_number_arrives_as_what_it_is(value: float) -> None:
    arrived = decode(encode(Progress(step=1, time=0.0, metrics={"loss": value}))[4:])
    assert isinstance(arrived, Progress)
    assert repr(arrived.metrics["loss"]) == repr(value)
