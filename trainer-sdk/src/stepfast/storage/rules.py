"""Which storages jobs may name, for the agent, which writes there, and for the operator, which reads. Pure.

Each opens what a job names. With its own identity it opens only what its administrator said: a host of the job's choice
would be sent that identity's token.
"""

from __future__ import annotations

from dataclasses import dataclass

_REMOTE = ("abfs", "abfss", "az", "s3")  # that a job's credentials may open; no path of this machine is among them


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRules:
    """`root`: where jobs are saved that name nothing. That and what the administrator allows is for all jobs."""

    root: str | None = None
    allowed: tuple[str, ...] = ()

    def refusal(self, uri: str, *, has_credentials: bool) -> str | None:
        """Why a job may not use the storage; None when it may. `has_credentials`: it brings its own."""
        known = {_plain(allowed) for allowed in (self.root, *self.allowed) if allowed}
        if _plain(uri) in known or (has_credentials and uri.partition("://")[0] in _REMOTE):
            return None
        if has_credentials:
            return f"a secret opens storages of {', '.join(f'{scheme}://' for scheme in _REMOTE)}, not {uri!r}"
        return (
            f"the storage {uri!r} is neither the root of this cluster nor allowed by its administrator "
            "(storage.allowed): name a secret with credentials for it (checkpoint.secretRef)"
        )


def _plain(uri: str) -> str:
    return uri.rstrip("/")
