"""A world whose operator reaches the API server through a wire, which can be cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from testcluster.controlplane import KubernetesClient
from testoperator.running import run_to_end
from testoperator.wire import Wire
from testoperator.world import World


def kubeconfig_through(wire: Wire, api: KubernetesClient, folder: Path) -> Path:
    """Of the same API server."""
    document = yaml.safe_load(api.kubeconfig.read_text())
    for cluster in document["clusters"]:
        cluster["cluster"]["server"] = wire.url
    path = folder / "kubeconfig"
    path.write_text(json.dumps(document))
    return path


def play_behind_a_wire(
    api: KubernetesClient, scenario: Callable[[World, Wire], Awaitable[None]], *, seconds: float = 100
) -> None:
    """The world itself does not go through it."""

    async def run() -> None:
        async with World.open(api.kubeconfig) as world:
            url = urlsplit(str(world.kube._api.configuration.host))
            assert url.hostname is not None
            async with Wire(url.hostname, url.port or 443).laid() as wire:
                await asyncio.wait_for(scenario(world, wire), seconds)

    run_to_end(run())
