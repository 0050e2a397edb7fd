"""How a process becomes a rank: it finds the other ranks of its gang, and its node's agent, in agreement with them."""

from __future__ import annotations

import logging
import os
import time
import uuid
from dataclasses import replace

from stepfast.environment import Environment
from stepfast.errors import AgentUnavailable
from stepfast.messages import VERSION, Hello
from stepfast.step import run_id
from stepfast.torch.gang import Gang, find_gang
from stepfast.torch.link import AgentLink

log = logging.getLogger("stepfast")

AGENT_START_SECONDS = 10.0  # how long an agent is looked for that does not answer yet


def join_gang(environment: Environment) -> tuple[Gang, Environment]:
    """The gang, and the environment as the gang knows it. Waits for no other rank. Raises GangError."""
    gang = find_gang(environment.gang_scope or environment.run)
    if environment.world_size == 1 and gang.world_size > 1:  # the script started its ranks itself
        environment = replace(environment, local_rank=gang.rank, local_world_size=gang.world_size, node=0)
    environment = replace(environment, rank=gang.rank, world_size=gang.world_size)
    if not environment.is_run_unique:
        # torchrun's id may be used again (a fixed --rdzv-id, a requeued job): parts of two runs must never mix.
        own = run_id(uuid.uuid4().hex[:12], 1)
        run = gang.update("run", lambda agreed: agreed or own)
        environment = replace(environment, run=run, is_run_unique=True)
    return gang, environment


def join_agent(environment: Environment, gang: Gang, *, with_all: bool = True) -> AgentLink | None:
    """The link to the node's agent, or None: for all ranks, when every rank calls it (`with_all`)."""
    if environment.socket is None:
        if environment.rank == 0:
            log.info("stepfast: no agent (STEPFAST_SOCKET): saves go straight to %s", environment.storage_uri)
        return None
    hello = Hello(
        version=VERSION, job=str(environment.job), run=environment.run, rank=environment.rank,
        local_rank=environment.local_rank, world_size=environment.world_size,
        local_world_size=environment.local_world_size, node=environment.node, pid=os.getpid(),
        storage_uri=environment.storage_uri, memory_bytes=environment.memory_bytes,
        max_to_keep=environment.max_to_keep, resume_step=environment.resume_step or 0,
    )  # fmt: skip
    link, absence = None, ""
    try:
        link = _find_agent(environment.socket, hello)
    except AgentUnavailable as error:
        absence = str(error)
    if not with_all and absence:
        log.warning("stepfast: %s; saves go straight to %s", absence, environment.storage_uri)
    if not with_all:
        return link
    # With an agent here and none there no step would ever be whole: an agent waits for all ranks of its node.
    absences = [text for text in gang.exchange("agent", absence) if text]
    if not absences:
        return link
    if link is not None:
        link.close()
    log.warning("stepfast: %s; saves go straight to %s", absence or absences[0], environment.storage_uri)
    return None


def _find_agent(socket: str, hello: Hello) -> AgentLink:
    """The link to an agent that may be starting. Raises AgentUnavailable."""
    deadline = time.monotonic() + AGENT_START_SECONDS
    while True:
        try:
            return AgentLink(socket, hello)
        except AgentUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
