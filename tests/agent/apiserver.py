"""The few requests of an API server that an agent makes, over real HTTP: list, watch, create and patch the status of
CheckpointNodes, read a Node. Each can be made to fail. Loaded by a fixture in conftest.py.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

_NODES = "/apis/stepfast.dev/v1alpha1/checkpointnodes"


class ApiServer:
    """One node, and its CheckpointNode once somebody creates it. `failing`: what a kind of request is answered with."""

    def __init__(self, node: str = "node-a") -> None:
        self.node, self.node_uid = node, str(uuid.uuid4())
        self.failing: dict[str, int] = {}  # list, watch, create, patch, node: HTTP status; 0: no answer
        self.requests: list[str] = []
        self.statuses: list[dict[str, Any]] = []  # as they were patched
        self.found: dict[str, Any] | None = None
        self._version = itertools.count(100)
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._oldest = 0  # resource versions before it are gone
        self._changed = threading.Condition()
        self._closed = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"api": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def kubeconfig(self) -> str:
        """As JSON, which is YAML."""
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "clusters": [{"name": "test", "cluster": {"server": self.url}}],
                "users": [{"name": "test", "user": {"token": "the-token"}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            }
        )

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # ------------------------------------------------------------ what the operator and the cluster do

    def request(self, *requests: dict[str, str]) -> int:
        """Replaces `spec.requests`; returns the generation."""
        return self._specify(requests=list(requests))

    def name_gangs(self, *gangs: dict[str, Any]) -> int:
        """Replaces `spec.gangs`; returns the generation."""
        return self._specify(gangs=list(gangs))

    def _specify(self, **fields: Any) -> int:
        with self._changed:
            assert self.found is not None
            self.found["spec"] = {**self.found["spec"], **fields}
            self.found["metadata"]["generation"] += 1
            self._note("MODIFIED")
            return int(self.found["metadata"]["generation"])

    def delete(self) -> None:
        with self._changed:
            self._note("DELETED")
            self.found = None

    def forget_versions(self) -> None:
        """Ends every watch; whoever goes on from an earlier version is told 410."""
        with self._changed:
            self._oldest = next(self._version)
            self._changed.notify_all()

    def _note(self, kind: str) -> None:
        assert self.found is not None
        version = next(self._version)
        self.found["metadata"]["resourceVersion"] = str(version)
        self._events.append((version, kind, json.loads(json.dumps(self.found))))
        self._changed.notify_all()

    # ------------------------------------------------------------ what the agent does

    def create(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._changed:
            if self.found is not None:
                return 409, {"reason": "AlreadyExists", "message": "it is there"}
            self.found = json.loads(json.dumps(body))
            self.found["metadata"] |= {"uid": str(uuid.uuid4()), "generation": 1}
            self._note("ADDED")
            return 201, self.found

    def list(self) -> tuple[int, dict[str, Any]]:
        with self._changed:
            items = [self.found] if self.found is not None else []
            return 200, {"items": items, "metadata": {"resourceVersion": str(next(self._version))}}

    def patch(self, kind: str, body: Any) -> tuple[int, dict[str, Any]]:
        with self._changed:
            if self.found is None:
                return 404, {"message": "not found"}
            match kind:
                case "application/merge-patch+json":
                    status = merged(self.found.get("status"), body["status"])
                case "application/json-patch+json":
                    (change,) = body
                    assert (change["op"], change["path"]) == ("add", "/status")
                    status = change["value"]
                case _:
                    return 415, {"message": f"no patch is a {kind}"}
            self.found["status"] = status
            self.statuses.append(status)
            self._note("MODIFIED")
            return 200, self.found

    def watch(self, version: int) -> Iterator[dict[str, Any]]:
        if version < self._oldest:
            yield {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
            return
        begin = self._oldest
        yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}
        told = [version]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over(begin) or self._after(told[-1]))
                if self._is_over(begin):
                    return
                events = self._after(told[-1])
            for number, kind, found in events:
                told.append(number)
                yield {"type": kind, "object": found}

    def _is_over(self, begin: int) -> bool:
        return self._closed or self._oldest != begin or "watch" in self.failing

    def _after(self, version: int) -> list[tuple[int, str, dict[str, Any]]]:
        return [event for event in self._events if event[0] > version]

    def fail(self, **kinds: int) -> None:
        """From now on; watches that run are ended when `watch` is among them."""
        with self._changed:
            self.failing = kinds
            self._changed.notify_all()

    def wait_closed(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)


def merged(old: Any, patch: Any) -> Any:
    """As RFC 7386 has it: what the patch does not name stays."""
    if not isinstance(patch, dict):
        return patch
    kept = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = merged(kept.get(name), value)
    return kept


class _Handler(BaseHTTPRequestHandler):
    api: ApiServer

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(split.query).items()}
        if split.path == f"/api/v1/nodes/{self.api.node}":
            self._answer("node", lambda: (200, {"metadata": {"name": self.api.node, "uid": self.api.node_uid}}))
            return
        assert split.path == _NODES, self.path
        assert query["fieldSelector"] == f"metadata.name={self.api.node}", self.path
        if query.get("watch") != "true":
            self._answer("list", self.api.list)
        elif not self._fails("watch"):
            self._stream(int(query["resourceVersion"]))

    def do_POST(self) -> None:
        body = self._body()
        assert self.path == _NODES
        self._answer("create", lambda: self.api.create(body))

    def do_PATCH(self) -> None:
        body = self._body()
        assert re.fullmatch(f"{_NODES}/{self.api.node}/status", self.path), self.path
        assert "NaN" not in json.dumps(body)
        self._answer("patch", lambda: self.api.patch(self.headers["Content-Type"], body))

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _fails(self, kind: str) -> bool:
        assert self.headers["Authorization"].lower() == "bearer the-token"
        self.api.requests.append(kind)
        code = self.api.failing.get(kind)
        if code is None:
            return False
        if code == 0:
            self.api.wait_closed(60)
        else:
            self._send(code, {"kind": "Status", "code": code, "message": f"made to fail: {kind}"})
        return True

    def _answer(self, kind: str, action: Any) -> None:
        if not self._fails(kind):
            self._send(*action())

    def _send(self, code: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, version: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        try:
            for event in self.api.watch(version):
                self.wfile.write(json.dumps(event).encode() + b"\n")
        except OSError:
            return  # the agent went away

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""
