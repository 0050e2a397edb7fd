"""What a module here says when its framework is not installed."""

from __future__ import annotations


def missing(package: str) -> ImportError:
    """The error that says what to install."""
    return ImportError(f"stepfast.integrations needs {package} here, which is not installed: pip install {package}")
