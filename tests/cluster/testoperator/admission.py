"""Admission rules that deny pods, as clusters have them: a policy of the API server's own, and a webhook."""

from __future__ import annotations

import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any

from aiohttp import web

from stepfast.kube import Kube, KubeError
from testcluster.controlplane import ApiServer
from testoperator.polling import until

_API = "/apis/admissionregistration.k8s.io/v1"
_PODS = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
WHY = "the registry cannot be reached"


class Rule(StrEnum):
    """Who denies, and with what: the policy answers 422 Invalid, a webhook that names no code 400, and some webhooks
    speak as if they were the API's own validation.
    """

    POLICY = "policy"
    WEBHOOK = "webhook"
    WEBHOOK_AS_VALIDATION = "webhook that names fields"


_STATUS: dict[Rule, Any] = {
    Rule.WEBHOOK: {"message": WHY},
    Rule.WEBHOOK_AS_VALIDATION: {
        "message": WHY,
        "code": 422,
        "reason": "Invalid",
        "details": {"causes": [{"reason": "FieldValueInvalid", "message": WHY, "field": "spec.containers[0].image"}]},
    },
}


@asynccontextmanager
async def denied(api: ApiServer, kube: Kube, namespace: str, names: str, rule: Rule) -> AsyncIterator[None]:
    """Meanwhile no pod is made in the namespace whose name begins so."""
    made = _policy(kube, namespace, names) if rule is Rule.POLICY else _webhook(api, kube, namespace, names, rule)
    async with made:
        probe = {"metadata": {"name": f"{names}probe"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}

        async def is_denied() -> bool:
            try:
                await kube.create(f"/api/v1/namespaces/{namespace}/pods?dryRun=All", probe)
            except KubeError as error:
                return WHY in str(error)
            return False

        await until("it is denied", is_denied)
        yield


def _in(namespace: str) -> Any:
    return {"matchLabels": {"kubernetes.io/metadata.name": namespace}}


@asynccontextmanager
async def _policy(kube: Kube, namespace: str, names: str) -> AsyncIterator[None]:
    metadata = {"name": namespace}
    policy = {
        "matchConstraints": {"resourceRules": [_PODS]},
        "validations": [{"expression": f"!object.metadata.name.startsWith('{names}')", "message": WHY}],
    }
    binding = {
        "policyName": namespace, "validationActions": ["Deny"],
        "matchResources": {"namespaceSelector": _in(namespace)},
    }  # fmt: skip
    kinds = (("validatingadmissionpolicies", policy), ("validatingadmissionpolicybindings", binding))
    try:
        for kind, spec in kinds:
            await kube.create(f"{_API}/{kind}", {"metadata": metadata, "spec": spec})
        yield
    finally:
        for kind, _ in kinds:
            await kube.delete(f"{_API}/{kind}/{namespace}")


@asynccontextmanager
async def _webhook(api: ApiServer, kube: Kube, namespace: str, names: str, rule: Rule) -> AsyncIterator[None]:
    async def review(request: web.Request) -> web.Response:
        asked = (await request.json())["request"]
        is_allowed = not asked["name"].startswith(names)
        response = {"uid": asked["uid"], "allowed": is_allowed, **({} if is_allowed else {"status": _STATUS[rule]})}
        return web.json_response({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response})

    app, path = web.Application(), f"{_API}/validatingwebhookconfigurations"
    app.router.add_post("/", review)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # As the API server itself: its certificate is for the address.
    context.load_cert_chain(api.credentials.path("api.crt"), api.credentials.path("api.key"))
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, api.address, 0, ssl_context=context)
        await site.start()
        [(host, port)] = [address[:2] for address in runner.addresses]
        hook = {
            "name": "images.example.com", "admissionReviewVersions": ["v1"], "sideEffects": "None", "rules": [_PODS],
            "namespaceSelector": _in(namespace),
            "clientConfig": {
                "url": f"https://{host}:{port}/",
                "caBundle": base64.b64encode(api.credentials.authority.read_bytes()).decode(),
            },
        }  # fmt: skip
        await kube.create(path, {"metadata": {"name": namespace}, "webhooks": [hook]})
        yield
    finally:
        await kube.delete(f"{path}/{namespace}")
        await runner.cleanup()
