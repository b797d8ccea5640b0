"""S3 through boto3, which is imported at the first use."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

from tdp_megatron.errors import TdpError
from tdp_megatron.indexed.object_storage import S3_PREFIX, ObjectIdentity, ObjectStore, TransientError

__all__ = ["S3Store", "parse_s3_path"]

CONNECT_TIMEOUT_SECONDS = 10
READ_TIMEOUT_SECONDS = 30
"""Longest silence of a server before the attempt counts as failed."""
CONNECTIONS = 32

_PIECE = 1 << 20

# Codes of answers that are not 5xx and still mean "later": throttling, and a connection too slow for the server.
_LATER = frozenset(
    {
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "RequestTimeout",
        "TooManyRequests",
        "InternalError",
        "ServiceUnavailable",
    }
)


def parse_s3_path(url: str) -> tuple[str, str]:
    """Bucket and key of ``s3://bucket/key``.

    Raises:
        ValueError: one of them is missing.
    """
    bucket, _, key = url.removeprefix(S3_PREFIX).partition("/")
    if not url.startswith(S3_PREFIX) or not bucket or not key:
        raise ValueError(f"{url} must be s3://BUCKET/KEY")
    return bucket, key


class S3Store(ObjectStore):
    """Objects of S3 and its look-alikes; credentials, region and endpoint come from where boto3 finds them."""

    _shared: ClassVar[S3Store | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        try:
            import boto3
            import botocore.config
            import botocore.exceptions
        except ImportError as error:
            raise TdpError("s3:// paths need the package boto3: pip install 'tdp-megatron[s3]'") from error
        self._exceptions: Any = botocore.exceptions
        # One attempt: who calls tries again, also when a transfer breaks, which botocore does not.
        config = botocore.config.Config(
            connect_timeout=CONNECT_TIMEOUT_SECONDS,
            read_timeout=READ_TIMEOUT_SECONDS,
            max_pool_connections=CONNECTIONS,
            retries={"total_max_attempts": 1, "mode": "standard"},
        )
        self._client: Any = boto3.session.Session().client("s3", config=config)

    @classmethod
    def shared(cls) -> S3Store:
        """The one client of the process."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
            return cls._shared

    @classmethod
    def forget_shared(cls) -> None:
        """Make the next use open connections of its own, as after a fork."""
        cls._lock = threading.Lock()
        cls._shared = None

    def stat(self, url: str) -> ObjectIdentity:
        bucket, key = parse_s3_path(url)
        with self._translated(url, None):
            answer = self._client.head_object(Bucket=bucket, Key=key)
        return ObjectIdentity(url, int(answer["ContentLength"]), str(answer["ETag"]))

    def stream(self, identity: ObjectIdentity, offset: int, length: int) -> Iterator[bytes]:
        bucket, key = parse_s3_path(identity.path)
        with self._translated(identity.path, identity):
            answer = self._client.get_object(
                Bucket=bucket, Key=key, Range=f"bytes={offset}-{offset + length - 1}", IfMatch=identity.version
            )
            with contextlib.closing(answer["Body"]) as body:
                self._check_answer(answer, identity, offset)
                while piece := body.read(_PIECE):
                    yield piece

    def check_unchanged(self, identity: ObjectIdentity, at_once: bool) -> None:
        """Nothing to do: each read asks for this version or none."""

    @staticmethod
    def _check_answer(answer: dict[str, Any], identity: ObjectIdentity, offset: int) -> None:
        # Look-alikes of S3 may ignore the condition or the range.
        if answer.get("ETag") != identity.version:
            raise identity.changed(f"version {answer.get('ETag')} now")
        place = str(answer.get("ContentRange", ""))
        if not place.startswith(f"bytes {offset}-"):
            raise TransientError(f"asked for bytes from {offset} on, the answer has {place or 'the whole object'}")

    @contextlib.contextmanager
    def _translated(self, url: str, identity: ObjectIdentity | None) -> Iterator[None]:
        known = self._exceptions
        try:
            yield
        except known.ClientError as error:
            raise _client_error(error, url, identity) from error
        except (known.NoCredentialsError, known.PartialCredentialsError) as error:
            raise PermissionError(errno.EACCES, f"no credentials: {error}", url) from error
        except known.ParamValidationError as error:
            raise ValueError(f"{url}: {error}") from error
        except (known.ConnectionError, known.HTTPClientError, known.IncompleteReadError) as error:
            raise TransientError(str(error)) from error
        except known.BotoCoreError as error:
            raise OSError(errno.EIO, str(error), url) from error


def _client_error(error: Any, url: str, identity: ObjectIdentity | None) -> Exception:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if status >= 500 or status == 429 or code in _LATER:
        return TransientError(f"the server answered {status} {code}")
    if identity is not None and status in (404, 412, 416):
        return identity.changed({404: "it is gone now", 412: "another version now", 416: "shorter now"}[status])
    if status == 404:
        what = "the bucket does not exist" if code == "NoSuchBucket" else os.strerror(errno.ENOENT)
        return FileNotFoundError(errno.ENOENT, what, url)
    if status in (401, 403):
        # S3 says so about missing objects as well, unless the bucket may be listed.
        return PermissionError(errno.EACCES, f"access denied, or no such object ({status} {code})", url)
    return OSError(errno.EIO, f"the server answered {status} {code}: {error}", url)


os.register_at_fork(after_in_child=S3Store.forget_shared)
