"""Why something cannot run on this machine. Owns nothing but the error and its message."""

from __future__ import annotations


class Unavailable(Exception):
    """The machine lacks what the cluster needs; the message says what, and how to get it."""
