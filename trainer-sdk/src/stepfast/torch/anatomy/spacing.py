"""How often a running training may be looked at closely. Pure."""

from __future__ import annotations

import math

SHARE = 0.005  # of training's time: what looking may cost; half of what is promised, since one sample tells of the next
FIRST_STEP = 3  # the first ones allocate what stays, and compile what is compiled


def steps_between(extra_seconds: float, step_seconds: float, *, share: float = SHARE) -> int:
    """Steps from one sample to the next, so that samples cost less than `share` of training.

    `extra_seconds`: what a sample took beyond a plain step, with all that was made of it; `step_seconds`: a plain one.
    """
    if step_seconds <= 0:
        return 1
    return max(1, math.ceil(extra_seconds / (share * step_seconds)))
