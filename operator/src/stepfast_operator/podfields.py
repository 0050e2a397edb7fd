"""Which fields of pods, nodes and CheckpointNodes are read: what `podview` looks at, and what a Reflector needs."""

from __future__ import annotations

from typing import Any, TypedDict

from stepfast.kube import Fields


class _Metadata(TypedDict, total=False):
    namespace: Any
    name: Any
    uid: Any
    resourceVersion: Any
    labels: Any
    generation: Any


class _PodMetadata(_Metadata, total=False):
    annotations: Any
    ownerReferences: Any
    finalizers: Any
    creationTimestamp: Any
    deletionTimestamp: Any
    deletionGracePeriodSeconds: Any


class _PodSpec(TypedDict, total=False):
    nodeName: Any
    schedulingGates: Any


class _PodStatus(TypedDict, total=False):
    phase: Any
    reason: Any
    message: Any
    conditions: Any
    containerStatuses: Any
    initContainerStatuses: Any


class _Pod(TypedDict, total=False):
    metadata: _PodMetadata
    spec: _PodSpec | None
    status: _PodStatus | None


class _NodeSpec(TypedDict, total=False):
    taints: Any
    unschedulable: Any


class _NodeStatus(TypedDict, total=False):
    conditions: Any
    allocatable: Any


class _Node(TypedDict, total=False):
    metadata: _Metadata
    spec: _NodeSpec | None
    status: _NodeStatus | None


class _Write(TypedDict, total=False):
    time: Any
    subresource: Any


class _ReportMetadata(_Metadata, total=False):
    managedFields: list[_Write] | None


class _Report(TypedDict, total=False):
    metadata: _ReportMetadata
    spec: Any
    status: Any


POD_FIELDS, NODE_FIELDS, REPORT_FIELDS = Fields(_Pod), Fields(_Node), Fields(_Report)
