"""What a backend is to the operator: eyes and hands for one job. Every backend passes one contract suite
(tests/contracts/test_backend_contract.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stepfast.errors import StepfastError
from stepfast_operator.actions import LaunchGang, StopMode
from stepfast_operator.observed import Committed, Observed
from stepfast_operator.record import Status


class QueueRefused(StepfastError):
    """Whoever is to admit or schedule the gang as a whole is not there, or takes nothing from the operator. The message
    says what to do.
    """


class LaunchPostponed(StepfastError):
    """The gang cannot be launched for now, through no fault of its own: nothing of it lives. The message says why."""


class Backend(Protocol):
    """One job's world. Effects may be applied twice; none returns before what it promises holds."""

    async def observe(self, status: Status) -> Observed:
        """One look at everything but the committed steps. `gang` is that of `status.current`; `live_runs`
        may leave out runs other than the current one only while an attempt is open and its gang was launched
        from here."""

    async def read_steps(self) -> Sequence[Committed]:
        """The usable committed steps, newest last. Raises StorageError."""

    async def supersede_after(self, step: int) -> None:
        """Marks the committed steps above this one superseded. Raises StorageError."""

    async def launch(self, launch: LaunchGang) -> None:
        """Starts the gang, after making sure that nothing of an earlier run lives. Raises QueueRefused,
        LaunchPostponed.
        """

    async def stop(self, runs: Sequence[str], mode: StopMode) -> None:
        """Asks the gangs of these runs to end, or ends them: with KILL nothing of them lives on return."""

    async def start_agent(self) -> None:
        """Starts the agent when it is gone."""

    async def flush(self, run: str) -> None:
        """Asks the agents to persist all they hold of the run, and of it after its in-place restarts; what is observed
        from here on tells what is left, but for the nodes that `awaited_agents` names.

        Raises AgentUnavailable.
        """

    async def request_save(self, run: str) -> None:
        """Asks all ranks to save at the next step that they agree on, and to wait there. Raises
        AgentUnavailable.
        """

    async def set_spares(self, count: int, avoided_nodes: Sequence[str]) -> None:
        """Has so many spares wait for places, none on these nodes; more of them are ended, and those that have no place
        and keep off other nodes, too, are made anew.
        """

    async def leave_queue(self, attempt: int) -> None:
        """Tells whoever admits the gang that nothing of it, up to that attempt, will run again."""

    async def delete_job(self) -> None:
        """Deletes the job's object, as long as it is still the one that was observed; what it owns goes with it."""

    async def write_status(self, status: Status) -> None:
        """Makes the status durable. On one machine, once a gang was launched, that may have to wait: no other one is
        launched before.
        """
