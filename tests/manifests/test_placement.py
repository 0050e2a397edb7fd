"""Which nodes a job's pods may run on: as the Kubernetes scheduler decides it of the same pods and nodes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfast.errors import SpecError
from stepfast_operator.document import JSON, decode
from stepfast_operator.placement import placement_of
from stepfast_operator.podview import NodeView, node_of
from stepfast_operator.spec import TrainingSpec

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
LABELS = {"pool": "a100", "zone": "1", "empty": "", "gpus": "8", "big": "9223372036854775807", "word": "eight"}


def node(*taints: JSON, unschedulable: bool = False) -> NodeView:
    spec = {"taints": list(taints), "unschedulable": unschedulable}
    return node_of({"metadata": {"name": "node-a", "labels": LABELS}, "spec": spec})


def admits(view: NodeView, template: JSON, **spec: Any) -> bool:
    document = {"trainer": {"command": ["torchrun", "t.py"]}, "template": {"spec": template}, **spec}
    return placement_of(decode(TrainingSpec, document, "spec")).admits(view)


def required(*terms: JSON) -> JSON:
    return {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(terms)}}}}


def label(key: str, operator: str, *values: str) -> JSON:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def name(operator: str, *values: str) -> JSON:
    return {"matchFields": [{"key": "metadata.name", "operator": operator, "values": list(values)}]}


REQUIREMENTS: dict[str, tuple[JSON, bool]] = {
    "In": (label("pool", "In", "v100", "a100"), True),
    "In, other value": (label("pool", "In", "v100"), False),
    "In, without the label": (label("gpu", "In", ""), False),
    "In, the empty value": (label("empty", "In", ""), True),
    "In, no values": (label("pool", "In"), False),
    "NotIn": (label("pool", "NotIn", "v100"), True),
    "NotIn, its value": (label("pool", "NotIn", "v100", "a100"), False),
    "NotIn, without the label": (label("gpu", "NotIn", "a100"), True),
    "Exists": (label("empty", "Exists"), True),
    "Exists, without the label": (label("gpu", "Exists"), False),
    "DoesNotExist": (label("gpu", "DoesNotExist"), True),
    "DoesNotExist, with the label": (label("empty", "DoesNotExist"), False),
    "Gt": (label("gpus", "Gt", "7"), True),
    "Gt, by number and not by text": (label("gpus", "Gt", "10"), False),
    "Gt, its value": (label("gpus", "Gt", "8"), False),
    "Gt, below zero": (label("gpus", "Gt", "-1"), True),
    "Gt, of 64 bits": (label("big", "Gt", "9223372036854775806"), True),
    "Lt": (label("gpus", "Lt", "10"), True),
    "Lt, its value": (label("gpus", "Lt", "8"), False),
    "Lt, of a word": (label("word", "Lt", "10"), False),
    "Gt, a word": (label("gpus", "Gt", "seven"), False),
    "Gt, a fraction": (label("gpus", "Gt", "7.5"), False),
    "Gt, without the label": (label("gpu", "Gt", "0"), False),
    "Gt, two values": (label("gpus", "Gt", "1", "2"), False),
    "no operator of Kubernetes": (label("pool", "Like", "a100"), False),
    "name": (name("In", "node-a"), True),
    "other name": (name("In", "node-b"), False),
    "any name but this": (name("NotIn", "node-a"), False),
    "any name but another": (name("NotIn", "node-b"), True),
    "all requirements of a term": (
        {
            "matchExpressions": label("pool", "Exists")["matchExpressions"]
            + label("zone", "In", "2")["matchExpressions"]
        },
        False,
    ),
    "labels and name": ({**label("pool", "Exists"), **name("In", "node-a")}, True),
    "labels, but not the name": ({**label("pool", "Exists"), **name("In", "node-b")}, False),
    "name, but not the labels": ({**label("gpu", "Exists"), **name("In", "node-a")}, False),
    "a term without requirements": ({}, False),
    "a term with empty lists": ({"matchExpressions": [], "matchFields": None}, False),
}


@pytest.mark.parametrize(("term", "expected"), REQUIREMENTS.values(), ids=REQUIREMENTS)
def test_node_is_chosen_by_a_term_whose_requirements_all_hold(term: JSON, expected: bool) -> None:
    assert admits(node(), required(term)) is expected


HELD, BROKEN = label("pool", "Exists"), label("pool", "DoesNotExist")
CHOICES: dict[str, tuple[JSON, bool]] = {
    "nothing said": ({}, True),
    "selector": ({"nodeSelector": {"pool": "a100", "zone": "1"}}, True),
    "selector, one label differs": ({"nodeSelector": {"pool": "a100", "zone": "2"}}, False),
    "selector, without the label": ({"nodeSelector": {"gpu": ""}}, False),
    "no selector": ({"nodeSelector": None}, True),
    "one of two terms": (required(BROKEN, HELD), True),
    "none of two terms": (required(BROKEN, BROKEN), False),
    "no terms": (required(), False),
    "selector and affinity": ({"nodeSelector": {"pool": "a100"}, **required(HELD)}, True),
    "selector, but not the affinity": ({"nodeSelector": {"pool": "a100"}, **required(BROKEN)}, False),
    "affinity, but not the selector": ({"nodeSelector": {"pool": "v100"}, **required(HELD)}, False),
    "preferred alone": ({"affinity": {"nodeAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": BROKEN}]}}}, True),
    "affinity that says nothing": ({"affinity": {"nodeAffinity": {REQUIRED: None}}}, True),
    "no affinity": ({"affinity": None}, True),
}  # fmt: skip


@pytest.mark.parametrize(("template", "expected"), CHOICES.values(), ids=CHOICES)
def test_selector_must_match_and_one_term_of_the_affinity(template: JSON, expected: bool) -> None:
    assert admits(node(), template) is expected


def taint(effect: str = "NoSchedule", key: str = "sku", value: str = "gpu") -> JSON:
    return {"key": key, "effect": effect, **({"value": value} if value else {})}


SKU: JSON = {"key": "sku", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"}
TAINTS: dict[str, tuple[list[JSON], list[JSON], bool]] = {
    "tolerated": ([taint()], [SKU], True),
    "not tolerated": ([taint()], [], False),
    "advice": ([taint("PreferNoSchedule")], [], True),
    "NoExecute": ([taint("NoExecute")], [], False),
    "NoExecute, tolerated for a while": ([taint("NoExecute")], [
        {"key": "sku", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}], True),
    "other effect": ([taint("NoExecute")], [SKU], False),
    "every effect": ([taint("NoExecute"), taint()], [{"key": "sku", "operator": "Exists"}], True),
    "other value": ([taint(value="cpu")], [SKU], False),
    "other key": ([taint(key="pool")], [SKU], False),
    "Equal is what is meant without an operator": ([taint()], [{"key": "sku", "value": "gpu"}], True),
    "no value, and Equal": ([taint(value="")], [{"key": "sku", "operator": "Equal"}], True),
    "a value, and Equal without one": ([taint()], [{"key": "sku", "operator": "Equal"}], False),
    "Exists": ([taint()], [{"key": "sku", "operator": "Exists", "effect": "NoSchedule"}], True),
    "every key": ([taint(), taint(key="pool", effect="NoExecute")], [{"operator": "Exists"}], True),
    "every key of one effect": ([taint(), taint(key="pool", effect="NoExecute")], [
        {"operator": "Exists", "effect": "NoSchedule"}], False),
    "no operator of Kubernetes": ([taint()], [{"key": "sku", "operator": "Like", "value": "gpu"}], False),
    "each taint needs its own": ([taint(), taint(key="pool")], [SKU], False),
    "each taint has its own": ([taint(), taint(key="pool")], [SKU, {"key": "pool", "operator": "Exists"}], True),
}  # fmt: skip


@pytest.mark.parametrize(("taints", "tolerations", "expected"), TAINTS.values(), ids=TAINTS)
def test_every_taint_that_keeps_pods_off_must_be_tolerated(
    taints: list[JSON], tolerations: list[JSON], expected: bool
) -> None:
    assert admits(node(*taints), {"tolerations": tolerations}) is expected


def test_cordoned_node_is_none_unless_that_is_tolerated() -> None:
    assert not admits(node(unschedulable=True), {})
    cordoned = {"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"}
    assert admits(node(unschedulable=True), {"tolerations": [cordoned]})


def test_what_is_added_to_the_template_is_tolerated() -> None:
    spot = node(taint(key="kubernetes.azure.com/scalesetpriority", value="spot"))
    assert not admits(spot, {})
    assert admits(spot, {}, spot={"tolerate": True})


def test_taint_named_as_what_the_pods_ask_for_is_tolerated_by_admission() -> None:
    view = node(taint(key="nvidia.com/gpu", value="present"))
    assert not admits(view, {})
    trainer = {"command": ["t"], "resourcesPerNode": {"limits": {"nvidia.com/gpu": 8, "memory": "1Gi"}}}
    assert admits(view, {}, trainer=trainer)
    assert not admits(node(taint(key="memory")), {}, trainer=trainer)


MISSHAPEN: dict[str, tuple[JSON, str]] = {
    "selector": ({"nodeSelector": ["a100"]}, "nodeSelector: expected an object"),
    "toleration": ({"tolerations": ["sku"]}, r"tolerations\[0\]: expected an object"),
    "affinity": ({"affinity": {"nodeAffinity": {REQUIRED: []}}}, f"affinity.nodeAffinity.{REQUIRED}: expected an obj"),
    "terms": ({"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": {}}}}},
        "nodeSelectorTerms: expected a list"),
    "term": (required(HELD, "pool"), r"nodeSelectorTerms\[1\]: expected an object"),
    "requirements": (required({"matchExpressions": {}}), r"nodeSelectorTerms\[0\].matchExpressions: expected a list"),
    "requirement": (required({"matchFields": [1]}), r"matchFields\[0\]: expected an object"),
    "values": (required(label("a", "In") | {"matchFields": [{"values": "node-a"}]}),
        r"matchFields\[0\].values: expected a list"),
}  # fmt: skip


@pytest.mark.parametrize(("template", "message"), MISSHAPEN.values(), ids=MISSHAPEN)
def test_what_is_not_of_a_pods_shape_names_its_field(template: JSON, message: str) -> None:
    with pytest.raises(SpecError, match=rf"^spec\.template\.spec\..*{message}"):
        admits(node(), template)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
REQUIREMENT = st.dictionaries(
    st.sampled_from(["key", "operator", "values", "effect", "value"]), ANY_JSON | st.just("Gt")
)


@given(requirement=REQUIREMENT, toleration=REQUIREMENT, selector=ANY_JSON)
def test_whatever_the_template_says_is_refused_or_answered(requirement: JSON, toleration: JSON, selector: JSON) -> None:
    template = {
        **required({"matchExpressions": [requirement]}), "tolerations": [toleration], "nodeSelector": selector
    }  # fmt: skip
    try:
        answer = admits(node(taint()), template)
    except SpecError as error:
        refused = str(error)
    else:
        refused = ""
        assert answer in (True, False)
    assert not refused or refused.startswith("spec.template.spec")
