"""Storage: one small protocol (`base`), a local file system (`local`), everything else through fsspec
(`objects`)."""

from stepfast.storage.base import ObjectInfo, Store, Upload
from stepfast.storage.open import open_store

__all__ = ["ObjectInfo", "Store", "Upload", "open_store"]
