"""What one save of a gang of many nodes asks of the storage, and its agents of the API server.

Records, sizes, the commit and who looks how often are those of the code as shipped; a save's parts come evenly over
`SPREAD_SECONDS`, each agent looks on from when its own is written, and a look takes no time. Requests are counted as
Azure Blob Storage bills them: a block of a file, its list of blocks, a page of a listing, a small object.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results import Record, add_record
from benchmarks.simulation.memorystore import PAGE_ENTRIES, Counts, MemoryStore

from stepfast.commit import StepParts, try_commit
from stepfast.layout import FileEntry, Part, data_path, parse_manifest
from stepfast.nodestatus import JobStatus, NodeStatus, RankStatus, SaveStatus
from stepfast.step import JobKey
from stepfast_sidecar import checkpointnode, commits
from stepfast_sidecar.persist import chunk_of

NODES = (1_000, 10_000)
RANKS_PER_NODE = 8
RANK_BYTES = 2**30  # Llama 3 405B has 5.7 TB of state (14 bytes a parameter) on 16,384 ranks: 0.35 GB each
SPREAD_SECONDS = 30.0
SAVE_SECONDS = 104.0  # auto with half a second of stall and failures each three hours
STORAGE_REQUESTS_A_SECOND = 20_000
"""What an account takes by default (Microsoft, "Scalability and performance targets for standard storage accounts")."""
KUBELET_WRITES_A_NODE = 1 / 10.0
"""A kubelet renews its node's Lease every 10 s (Kubernetes, "Nodes"): what the API server of such a cluster takes."""
_FOLDER, _RUN, _STEP = "default/train", "0b0e4c2f-6f5e-4d55-9a68-1f0a3a3d7c11-12", 123_456
_CHECKSUM = "0123456789abcdef0123456789abcdef"


def part_of(node: int, nodes: int, *, rank_bytes: int = RANK_BYTES) -> Part:
    """A node's part record, with all the checksums that it would have."""
    world_size = nodes * RANKS_PER_NODE
    ranks = tuple(range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE))
    checksums = (_CHECKSUM,) * -(-rank_bytes // chunk_of(rank_bytes))
    files = tuple(
        FileEntry(
            path=data_path(_STEP, _RUN, "state", rank, world_size), name="state", rank=rank, size_bytes=rank_bytes,
            chunk_bytes=chunk_of(rank_bytes), checksums=checksums,
        )
        for rank in ranks
    )  # fmt: skip
    return Part(
        step=_STEP, run=_RUN, node=node, world_size=world_size, ranks=ranks, files=files,
        saved_time=1_700_000_000.123456, persisted_time=1_700_000_060.123456 + node / nodes, replicated=_CHECKSUM,
    )  # fmt: skip


def commit_record(nodes: int, *, rank_bytes: int = RANK_BYTES) -> Record:
    """One real commit of rank 0's agent, which looks twice: before the last part is there, and after."""
    store, part_bytes, built = MemoryStore(), 0, 0.0
    for node in range(nodes):
        if node == nodes - 1:
            parts = StepParts(store, _FOLDER, _STEP, _RUN)
            begin = time.perf_counter()
            if try_commit(store, _FOLDER, _STEP, _RUN, parts) is not None:
                raise AssertionError("committed without the last part")
            read_seconds = time.perf_counter() - begin
            store.counts = Counts()
        part = part_of(node, nodes, rank_bytes=rank_bytes)
        begin = time.perf_counter()
        record = part.to_bytes()
        built += time.perf_counter() - begin
        part_bytes += len(record)
        for file in part.files:
            store.put(f"{_FOLDER}/{file.path}", size_bytes=file.size_bytes)
        store.put(f"{_FOLDER}/{part.path}", record)
    begin = time.perf_counter()
    manifest = try_commit(store, _FOLDER, _STEP, _RUN, parts)
    commit_seconds = time.perf_counter() - begin
    if manifest is None:
        raise AssertionError("not committed")
    data = manifest.to_bytes()
    begin = time.perf_counter()
    parse_manifest(data)
    return {
        "part_bytes": part_bytes // nodes, "parts_bytes": part_bytes, "manifest_bytes": len(data),
        "part_build_seconds": built / nodes, "parts_read_seconds": read_seconds, "last_commit_seconds": commit_seconds,
        "manifest_parse_seconds": time.perf_counter() - begin, "last_commit_requests": store.counts.requests,
    }  # fmt: skip


def looks(own: float, end: float, longest_pause: float) -> Iterator[float]:
    """When an agent looks whose part is there at `own`, until it sees the manifest of `end`."""
    now, pause = own, commits._POLL_SECONDS[0]
    while True:
        yield now
        if now >= end:
            return
        now += pause
        pause = min(longest_pause, pause * 2)


def traffic_record(nodes: int, manifest_bytes: int, *, is_over: bool, spread: float = SPREAD_SECONDS) -> Record:
    """The requests of all agents for one commit. `is_over`: the gang has failed, and flushes."""
    leader, others = Counts(), Counts()
    files = RANKS_PER_NODE + 1
    for node in range(nodes):
        # Rank 0's node is the first to be done: the others' turns are then longest in coming.
        own, leads = spread * node / nodes, node == 0
        mine = leader if leads else others
        turn = 0.0 if leads else commits.turn_seconds(node)
        pause = commits.longest_pause_seconds(nodes, leads=leads)
        for number, now in enumerate(looks(own, spread, pause)):
            if now >= spread and not leads:
                mine.reads += 1  # the manifest, once
                mine.read_bytes += manifest_bytes
                continue
            mine.missing += 1
            if leads or now - own > turn or (is_over and number == 0):
                mine.lists += 1 + int(nodes * files * min(1.0, now / spread)) // PAGE_ENTRIES
    leader.reads, leader.writes = nodes, 1
    total = leader.requests + others.requests
    return {
        "is_flush": is_over, "spread_seconds": spread, "leader_requests": leader.requests,
        "other_requests": others.requests, "other_lists": others.lists, "other_misses": others.missing,
        "other_bytes": others.read_bytes, "requests_a_second": total / spread,
        "storage_limit_share": total / spread / STORAGE_REQUESTS_A_SECOND,
    }  # fmt: skip


def data_record(nodes: int, *, rank_bytes: int = RANK_BYTES) -> Record:
    """What is written of one save but for its manifest."""
    blocks = -(-rank_bytes // chunk_of(rank_bytes)) + 1
    return {
        "ranks": nodes * RANKS_PER_NODE, "data_bytes": nodes * RANKS_PER_NODE * rank_bytes,
        "data_requests": nodes * RANKS_PER_NODE * blocks, "part_requests": 2 * nodes,  # looked for, then created
    }  # fmt: skip


def node_status(nodes: int) -> NodeStatus:
    """What an agent tells of a node full of ranks."""
    moment = 1_700_000_000.123456
    ranks = tuple(
        RankStatus(
            rank=rank, pid=4_000 + rank, alive=True, clean=False, joined_time=moment, global_step=_STEP,
            step_time=moment, total_steps=1_000_000, restored_step=120_000, restored_time=moment,
            restored_tier="Memory", restore_seconds=3.25, metrics={"loss": 2.3456, "lr": 1e-4},
        )
        for rank in range(RANKS_PER_NODE)
    )  # fmt: skip
    job = JobStatus(
        job=JobKey(namespace="default", name="train"), run=_RUN, world_size=nodes * RANKS_PER_NODE, ranks=ranks,
        saves=SaveStatus(count=500, stall_seconds_total=250.0, stall_seconds_last=0.5, stall_seconds_max=0.9),
        latest_memory_step=_STEP, latest_persisted_step=_STEP - 100, latest_persisted_time=moment,
        latest_persisted_bytes=nodes * RANKS_PER_NODE * RANK_BYTES, pending_bytes=2**33, pending_steps=(_STEP,),
    )  # fmt: skip
    return NodeStatus(node="node", memory_limit_bytes=2**36, memory_used_bytes=2**35, jobs=(job,))


def report_record(nodes: int) -> Record:
    """CheckpointNode traffic while training goes on, and what reading it costs whoever watches all of them."""
    status = node_status(nodes)
    document = checkpointnode.status_document(
        status, generation=1, is_ready=True, since=1_700_000_000.0, reason="Serving", message="the agent serves"
    )
    data = json.dumps(document).encode()
    begin = time.perf_counter()
    for _ in range(200):
        json.loads(data)
    parse = (time.perf_counter() - begin) / 200
    progress = nodes / checkpointnode.progress_seconds(status)
    news = 2 * nodes / SAVE_SECONDS  # something is pending; it is committed
    return {
        "document_bytes": len(data), "progress_writes_a_second": progress, "news_writes_a_second": news,
        "commit_burst_writes": nodes, "lease_writes_a_second": nodes * KUBELET_WRITES_A_NODE,
        "bytes_a_second": (progress + news) * len(data), "watch_parse_share": (progress + news) * parse,
    }  # fmt: skip


def add_all(results: Path, *, nodes: tuple[int, ...] = NODES) -> list[Record]:
    """Measures and records."""
    records = []
    for count in nodes:
        values = {**data_record(count), **commit_record(count), **report_record(count)}
        for is_over in (False, True):
            traffic = traffic_record(count, values["manifest_bytes"], is_over=is_over)
            records.append(add_record("scale", results=results, nodes=count, **values, **traffic))
    return records


def lines_of(records: list[Record]) -> Iterator[str]:
    """One line a figure, a column for each record."""
    for name in records[0]:
        if name not in ("kind", "time"):
            cells = (f"{one[name]:,.4g}" if isinstance(one[name], float) else f"{one[name]:,}" for one in records)
            yield f"{name:26}" + "".join(f"{cell:>22}" for cell in cells)
