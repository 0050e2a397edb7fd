"""Python reads this first in each process of a framework's tests: what stands in for the framework's own store."""

import importlib
import os

if _name := os.environ.get("UPSTREAM_STAND_IN"):
    importlib.import_module(f"for_{_name}")
