"""Python reads this first in each process of a framework's tests: what they want, and what stands in for the store."""

import importlib
import os

for _name in os.environ.get("UPSTREAM_MODULES", "").split():
    importlib.import_module(_name)
