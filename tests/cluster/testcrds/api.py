"""Plain requests to an API server: what it answers to a TrainingJob or a CheckpointNode."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import config

from stepfast_operator.spec import API_VERSION
from testcrds.manifests import manifest

TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    body: dict[str, Any]

    @property
    def message(self) -> str:
        return str(self.body.get("message", ""))


class Api:
    """Plain requests to the API server, as an administrator, in one namespace."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._client = config.new_client_from_config(config_file=str(kubeconfig))  # type: ignore[no-untyped-call]  # has no types
        self.namespace = namespace
        self._root = f"/apis/{API_VERSION}"

    def send(
        self, method: str, path: str, body: Any = None, *, accept: str = "application/json", **query: str
    ) -> Answer:
        headers = {"Accept": accept, "Content-Type": "application/json"}
        request = self._client.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        response = self._client.call_api(*request, _request_timeout=TIMEOUT_SECONDS)
        text = response.read().decode()
        is_json = text.startswith("{")  # what is not served is told in plain text
        return Answer(status=response.status, body=json.loads(text) if is_json else {"message": text})

    def jobs(self, name: str = "", part: str = "") -> str:
        return "/".join(filter(None, (self._root, "namespaces", self.namespace, "trainingjobs", name, part)))

    def nodes(self, name: str = "", part: str = "") -> str:
        return "/".join(filter(None, (self._root, "checkpointnodes", name, part)))

    def dry_run(self, spec: Any, name: str = "job") -> Answer:
        """Whether a job would be created, read strictly."""
        return self.send("POST", self.jobs(), manifest(spec, name), dryRun="All", fieldValidation="Strict")

    def create(self, spec: Any) -> str:
        """The name of a new job."""
        name = f"job-{uuid.uuid4().hex[:8]}"
        answer = self.send("POST", self.jobs(), manifest(spec, name), fieldValidation="Strict")
        assert answer.status == 201, answer.message
        return name

    def change(self, name: str, *, part: str = "", **values: Any) -> Answer:
        """Writes the object anew with other values of spec or status."""
        document = self.send("GET", self.jobs(name)).body
        return self.send("PUT", self.jobs(name, part), {**document, **values}, fieldValidation="Strict")

    def report(self, name: str, status: dict[str, Any]) -> Answer:
        return self.change(name, part="status", status=status)

    def close(self) -> None:
        self.send("DELETE", f"/api/v1/namespaces/{self.namespace}")
        self._client.close()
