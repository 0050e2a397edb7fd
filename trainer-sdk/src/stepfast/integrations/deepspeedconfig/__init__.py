"""Old and broken DeepSpeed configurations made valid for the release that is current, every change with its reason.

Pure: data in, data out; neither DeepSpeed nor torch is imported. What a release takes stands in `keys`, what older
releases called otherwise or took in another shape in the modules of the steps; `migration` is their order.
"""

from __future__ import annotations

from stepfast.integrations.deepspeedconfig.draft import Absent, Json, Problem, Rewrite, Undecided
from stepfast.integrations.deepspeedconfig.keys import RELEASE
from stepfast.integrations.deepspeedconfig.migration import Fixed, fix

__all__ = ["RELEASE", "Absent", "Fixed", "Json", "Problem", "Rewrite", "Undecided", "fix"]
