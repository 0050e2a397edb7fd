"""Stepfast: checkpoints that do not stall training, and training that does not lose work.

Importing this package costs nothing: no third-party package, no torch. The SDK for training code is
`stepfast.torch`; errors are in `stepfast.errors`.
"""

TYPE_CHECKING = False  # type checkers take it for true; `typing` would be most of what this import costs
if TYPE_CHECKING:
    from stepfast.step import Tier

__all__ = ["Tier", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "Tier":
        from stepfast.step import Tier

        return Tier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
