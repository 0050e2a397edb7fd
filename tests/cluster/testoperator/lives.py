"""`stepfast-operator` as tests need it: `python -m testoperator.lives MODE [OPTIONS…]`.

crashing: every request that changed something is the last one of its process, which SIGKILL ends before it learns of
the answer; the next process follows at once, as a kubelet restarts a container. (The Lease and Events do not count:
they are beside what is done.) They are forked, so that a life costs no imports.
deaf: kopf tells of nothing, as one whose watcher died, and a second counts as five minutes.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import kopf

from stepfast.kube import Kube
from stepfast_operator import __main__ as operator
from stepfast_operator import handlers, jobwatch

_BESIDE = ("/leases", "/events")


def crash_after_effects() -> None:
    real = Kube._request

    async def request(self: Kube, method: str, path: str, *rest: Any, **options: Any) -> Any:
        answer = await real(self, method, path, *rest, **options)
        if method != "GET" and not any(part in path for part in _BESIDE):
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    Kube._request = request  # type: ignore[method-assign] # the point of it


def live_on() -> None:
    """Until a life ends by itself; standard output gets a line for each."""
    while (pid := os.fork()) != 0:
        _, status = os.waitpid(pid, 0)
        print("a life is over", flush=True)
        if os.WIFEXITED(status):
            os._exit(os.waitstatus_to_exitcode(status))


def go_deaf() -> None:
    def silent(*_: object) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        def login(**kwargs: Any) -> Any:
            return kopf.login_with_kubeconfig(**kwargs)

        return registry

    handlers.registry_of = silent  # type: ignore[assignment] # takes whatever it is given
    jobwatch._LIST_SECONDS = 0.2
    real = jobwatch.JobWatch.age_seconds
    jobwatch.JobWatch.age_seconds = lambda self: 300 * real(self)  # type: ignore[method-assign] # time flies


if __name__ == "__main__":
    mode = sys.argv.pop(1)
    if mode == "crashing":
        live_on()
        crash_after_effects()
    elif mode == "deaf":
        go_deaf()
    operator.main()
