"""What an error of the Azure SDK means to a caller of the storage. Importing this imports the SDK."""

from __future__ import annotations

import aiohttp
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError

from stepfast.errors import ObjectNotFound, StorageError, StorageForbidden, StorageFull, StorageUnavailable

AZURE_ERRORS: tuple[type[Exception], ...] = (AzureError, aiohttp.ClientError, TimeoutError, OSError)
"""All that a call of the SDK raises: its own errors, and what its HTTP client lets through."""

# Refusals by their codes, where the status alone would say something else.
_PASSING = frozenset({"ContainerBeingDeleted", "AccountBeingCreated", "OperationTimedOut", "ServerBusy"})
_FULL = frozenset({"InsufficientStorage", "AccountQuotaExceeded", "QuotaExceeded", "BlockCountExceedsLimit"})


def azure_error(error: Exception, doing: str) -> StorageError:
    """The StorageError that says the same; `doing` names operation and path."""
    if isinstance(error, HttpResponseError):
        return _response_error(error, doing)
    if isinstance(error, TimeoutError):
        return StorageUnavailable(f"{doing}: no answer in time")
    # Connections refused, reset or cut short; names that do not resolve.
    return StorageUnavailable(f"{doing}: {_first_line(error)}")


def error_code(error: HttpResponseError) -> str:
    """The service's own name for the error, empty when it gave none."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


def _response_error(error: HttpResponseError, doing: str) -> StorageError:
    code, status = error_code(error), error.status_code
    message = f"{doing}: {' '.join(str(part) for part in (status, code) if part)} {_first_line(error)}".strip()
    if code == "ContainerNotFound":
        # An empty listing would look like a job that never saved: a wrong name must be loud.
        return StorageForbidden(f"{doing}: the container does not exist; create it")
    if status == 507 or code in _FULL:
        return StorageFull(message)
    if code in _PASSING or status in {408, 429}:
        return _unavailable(message, error)
    if status == 404:
        return ObjectNotFound(message)
    if status is None and isinstance(error, ClientAuthenticationError):
        return StorageForbidden(message)  # no credential was found at all
    if status is not None and 400 <= status < 500:
        return StorageForbidden(message)
    return _unavailable(message, error)


def _unavailable(message: str, error: HttpResponseError) -> StorageUnavailable:
    """With what the service said of when to come back: seconds, or milliseconds in a header of its own."""
    unavailable = StorageUnavailable(message)
    headers = getattr(error.response, "headers", {})
    for header, unit_seconds in (("x-ms-retry-after-ms", 0.001), ("Retry-After", 1.0)):
        text = str(headers.get(header, ""))
        if text.isdigit():
            unavailable.retry_after_seconds = int(text) * unit_seconds
            break
    return unavailable


def _first_line(error: Exception) -> str:
    # The SDK's messages carry request ids and XML below the first line.
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
