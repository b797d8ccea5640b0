"""Objects behind NVIDIA's Multi-Storage Client, which is imported at the first use."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from tdp_megatron.errors import TdpError
from tdp_megatron.indexed.object_storage import ObjectIdentity, ObjectStore, TransientError

__all__ = ["MultiStorageStore"]

CHECK_SECONDS = 30.0
"""The client cannot read "this version or none", so that an object is looked at again after this long."""


class MultiStorageStore(ObjectStore):
    """Objects of ``msc://PROFILE/PATH``; profiles are what the client's own configuration says."""

    _shared: ClassVar[MultiStorageStore | None] = None

    def __init__(self) -> None:
        try:
            import multistorageclient
            import multistorageclient.types
        except ImportError as error:
            raise TdpError(
                "msc:// paths need the package multi-storage-client: pip install 'tdp-megatron[msc]'"
            ) from error
        self._msc: Any = multistorageclient
        self._range: Any = multistorageclient.types.Range
        self._retryable: Any = multistorageclient.types.RetryableError
        self._looked_at: dict[ObjectIdentity, float] = {}

    @classmethod
    def shared(cls) -> MultiStorageStore:
        """The one of the process; the client itself opens new connections after a fork."""
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    def stat(self, url: str) -> ObjectIdentity:
        with self._translated(url):
            client, path = self._msc.resolve_storage_client(url)
            found = client.info(path)
        if getattr(found, "type", "file") != "file":
            raise FileNotFoundError(errno.ENOENT, "is a folder", url)
        identity = ObjectIdentity(url, int(found.content_length), str(found.etag or found.last_modified))
        self._looked_at[identity] = time.monotonic()
        return identity

    def stream(self, identity: ObjectIdentity, offset: int, length: int) -> Iterator[bytes]:
        try:
            with self._translated(identity.path):
                client, path = self._msc.resolve_storage_client(identity.path)
                yield client.read(path, byte_range=self._range(offset=offset, size=length))
        except FileNotFoundError as error:
            raise identity.changed("it is gone now") from error
        except OSError:
            # A range beyond the end fails in as many ways as there are stores.
            self.check_unchanged(identity, at_once=True)
            raise

    def check_unchanged(self, identity: ObjectIdentity, at_once: bool) -> None:
        if not at_once and time.monotonic() - self._looked_at.get(identity, 0.0) < CHECK_SECONDS:
            return
        try:
            now = self.stat(identity.path)
        except FileNotFoundError as error:
            raise identity.changed("it is gone now") from error
        if now != identity:
            raise identity.changed(f"{now.size} bytes, version {now.version} now")

    @contextlib.contextmanager
    def _translated(self, url: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "no such object", url) from error
        except PermissionError as error:
            raise PermissionError(errno.EACCES, str(error), url) from error
        except (self._retryable, ConnectionError, TimeoutError) as error:
            raise TransientError(str(error)) from error
        except RuntimeError as error:
            # What its providers make of all other failures.
            raise OSError(errno.EIO, str(error), url) from error
