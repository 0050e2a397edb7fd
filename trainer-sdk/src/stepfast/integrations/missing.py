"""What a module here says when its framework is not installed, or cannot be imported."""

from __future__ import annotations


def missing(package: str, error: ImportError | None = None) -> ImportError:
    """The error that says what to install. `error`: what came of the import; None: that the package is not there."""
    name = package.partition("[")[0]
    if error is None or (isinstance(error, ModuleNotFoundError) and error.name == name):
        return ImportError(f"stepfast.integrations needs {package} here, which is not installed: pip install {package}")
    return ImportError(
        f"stepfast.integrations needs {package} here, and the one that is installed cannot be imported, or is too old: "
        f"{error}. docs/integrations.md has the releases that are tested: pip install --upgrade {package}"
    )
