"""Starts the agent."""

from __future__ import annotations

import asyncio
import logging
import sys

from stepfast.errors import AgentError
from stepfast_sidecar.agent import Agent
from stepfast_sidecar.config import parse_config


def main() -> None:
    """Reads the command line and serves until SIGTERM."""
    config = parse_config(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s stepfast-agent %(levelname)s %(message)s")

    async def serve() -> None:
        await Agent(config).run()

    try:
        asyncio.run(serve())
    except (AgentError, OSError) as error:
        sys.exit(f"stepfast-agent: {error}")


if __name__ == "__main__":
    main()
