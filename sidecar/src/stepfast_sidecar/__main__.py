"""Starts the agent."""

from __future__ import annotations

import asyncio
import logging
import sys

from stepfast.errors import AgentError
from stepfast_sidecar.agent import Agent
from stepfast_sidecar.config import parse_config

UNPERSISTED_STATUS = 3


def main() -> None:
    """Reads the command line and serves until SIGTERM; exits with status 3 when memory still holds what the storage
    does not, so that whoever started it keeps the memory.
    """
    config = parse_config(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s stepfast-agent %(levelname)s %(message)s")

    async def serve() -> bool:
        return await Agent(config).run()

    try:
        is_idle = asyncio.run(serve())
    except (AgentError, OSError) as error:
        sys.exit(f"stepfast-agent: {error}")
    if not is_idle:
        logging.getLogger(__name__).error("%s holds steps that are not persisted", config.memory_dir)
        sys.exit(UNPERSISTED_STATUS)


if __name__ == "__main__":
    main()
