"""What the operator answers to a kubelet's probes."""

from __future__ import annotations

import pytest

from stepfast_operator.serving import DEAD_WATCH_SECONDS, health_answer

LONG = DEAD_WATCH_SECONDS + 60


@pytest.mark.parametrize(
    ("ages", "owed", "dead"),
    [
        pytest.param({"pods": 3.0, "nodes": 40.0}, 0.0, "", id="all are heard of"),
        pytest.param({"pods": 3.0, "nodes": LONG}, 0.0, "nodes: nothing heard for 240 s", id="one is not"),
        pytest.param({"pods": 3.0, "nodes": 40.0}, LONG, "trainingjobs: nothing heard for 240 s", id="kopf's is not"),
        pytest.param({"pods": LONG, "nodes": LONG + 9}, LONG, "", id="the API server is away"),
    ],
)
def test_watch_that_is_silent_while_others_hear_is_dead(ages: dict[str, float], owed: float, dead: str) -> None:
    answer = health_answer(lambda: ages, lambda: owed)()
    assert (answer.status, answer.text) == ((503, f"{dead}\n") if dead else (200, "ok\n"))
