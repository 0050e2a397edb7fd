"""From a URI to its store. Third-party packages are imported here, and only for the storage that needs
them."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from stepfast.errors import SpecError, StorageForbidden
from stepfast.storage.base import Probe, Store
from stepfast.storage.local import LocalStore
from stepfast.storage.retry import Retry

OPTIONS_VARIABLE = "STEPFAST_STORAGE_OPTIONS"
_CONNECTION_VARIABLE = "AZURE_STORAGE_CONNECTION_STRING"
_AZURE = frozenset({"abfs", "abfss", "az"})
_PACKAGES = {"fsspec": "stepfast[storage]", "adlfs": "stepfast[azure]"}


def open_store(
    uri: str,
    *,
    options: Mapping[str, object] | None = None,
    deadline_seconds: float = 60.0,
    probe: Probe | None = None,
) -> Store:
    """The store behind a path, a `file://` URI, or any URI that fsspec knows.

    `options` are the storage options of fsspec (of adlfs for `abfs://`, `abfss://` and `az://`); those in the
    environment variable STEPFAST_STORAGE_OPTIONS (JSON) stand in where they are silent. Azure credentials
    come from the options, from AZURE_STORAGE_CONNECTION_STRING, or else from DefaultAzureCredential. Every
    operation of the store is retried for at most `deadline_seconds`.

    Raises SpecError for a URI or options that cannot be understood, StorageForbidden where a package or a
    credential is missing.
    """
    retry = Retry(deadline_seconds=deadline_seconds)
    scheme, separator, _ = uri.partition("://")
    if not separator or scheme == "file":
        return LocalStore(_local_path(uri), retry=retry, probe=probe)
    merged = {**_environment_options(), **(options or {})}
    if scheme in _AZURE:
        return _open_azure(uri, merged, retry, probe)
    return _open_objects(uri, scheme, merged, retry, probe)


def _local_path(uri: str) -> str:
    if not uri:
        raise SpecError("storageUri", "is empty")
    if "://" not in uri:
        return os.path.expanduser(uri)
    parts = urlsplit(uri)
    if parts.netloc not in {"", "localhost"} or not parts.path:
        raise SpecError("storageUri", f"{uri!r} names no absolute path of this machine: file:///path")
    return unquote(parts.path)


def _environment_options() -> dict[str, object]:
    text = os.environ.get(OPTIONS_VARIABLE, "")
    if not text:
        return {}
    try:
        options = json.loads(text)
    except ValueError as error:
        raise SpecError(OPTIONS_VARIABLE, f"is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise SpecError(OPTIONS_VARIABLE, "is not a JSON object")
    return options


def _open_objects(uri: str, scheme: str, options: Mapping[str, object], retry: Retry, probe: Probe | None) -> Store:
    _require("fsspec", uri)
    import fsspec

    from stepfast.storage.objects import ObjectStore

    try:
        kind = fsspec.get_filesystem_class(scheme)
    except ValueError as error:
        raise SpecError("storageUri", f"{uri!r}: {error}") from error
    except ImportError as error:
        raise StorageForbidden(f"{uri!r} needs a package that is not installed: {error}") from error
    # A listing from a cache would hide what other nodes wrote.
    settled = {"use_listings_cache": False, **kind._get_kwargs_from_urls(uri), **options}
    filesystem = fsspec.filesystem(scheme, **settled)
    return ObjectStore(
        filesystem, kind._strip_protocol(uri), uri=uri, in_memory=scheme == "memory", retry=retry, probe=probe
    )


def _open_azure(uri: str, options: Mapping[str, object], retry: Retry, probe: Probe | None) -> Store:
    container, prefix, account = _azure_location(uri)
    # An instance of our own: we close its connections.
    settled = {**account, **options, "use_listings_cache": False, "skip_instance_cache": True}
    _check_credentials(uri, account, options)
    _require("fsspec", uri)
    _require("adlfs", uri)
    import adlfs

    from stepfast.storage.azure import AzureStore

    try:
        filesystem = adlfs.AzureBlobFileSystem(**settled)
    except ValueError as error:
        raise StorageForbidden(f"{uri!r}: {error}") from error
    return AzureStore(filesystem, container, prefix, uri=uri, retry=retry, probe=probe)


def _azure_location(uri: str) -> tuple[str, str, dict[str, object]]:
    """Container, prefix, and what the URI says about the account, as options of adlfs.

    `abfss://container@account.dfs.core.windows.net/prefix`, `abfs://container/prefix`, and
    `abfs://account.dfs.core.windows.net/container/prefix` are in use.
    """
    _, _, rest = uri.partition("://")
    authority, _, path = rest.partition("/")
    container, separator, host = authority.partition("@")
    if not separator and (".dfs." in authority or ".blob." in authority):
        host = authority
        container, _, path = path.partition("/")
    if not container:
        raise SpecError("storageUri", f"{uri!r} names no container")
    account: dict[str, object] = {}
    if host:
        name, _, suffix = host.partition(".")
        domain = suffix.removeprefix("dfs.").removeprefix("blob.")
        account["account_name"] = name
        if domain != "core.windows.net":  # sovereign clouds and private endpoints
            account["account_host"] = f"{name}.blob.{domain}"
    return container, path.strip("/"), account


def _check_credentials(uri: str, account: Mapping[str, object], options: Mapping[str, object]) -> None:
    """Refuses what adlfs would decide silently: it prefers a connection string to all else, wherever it is
    from."""
    from_environment = os.environ.get(_CONNECTION_VARIABLE, "")
    connection = str(options.get("connection_string") or from_environment)
    if not connection:
        return
    explicit = sorted({"account_key", "sas_token", "credential", "client_id"} & options.keys())
    if explicit and not options.get("connection_string"):
        raise StorageForbidden(
            f"{uri!r}: {_CONNECTION_VARIABLE} is set and would win over {', '.join(explicit)}: unset it"
        )
    fields = dict(field.lower().split("=", 1) for field in connection.split(";") if "=" in field)
    named = fields.get("accountname")
    if named and account.get("account_name", named) != named:
        raise StorageForbidden(
            f"{uri!r} is in the account {account['account_name']!r}, the connection string is of {named!r}"
        )


def _require(package: str, uri: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise StorageForbidden(f"{uri!r} needs {package}: pip install {_PACKAGES[package]!r} ({error})") from error
