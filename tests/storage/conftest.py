"""A real S3 server in a process of its own, and a proxy before it that fails on demand."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest

from tdp_megatron.indexed import IndexedDatasetBuilder, object_storage
from tdp_megatron.indexed.s3 import S3Store
from tdp_megatron.indexed.transfers import BLOCKS

BUCKET = "corpora"


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """URL of a moto server on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, "the S3 server has ended"
            try:
                urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


class FaultyProxy:
    """Forwards to ``target``; each fault in ``faults`` hits one answer to a GET of a ``.bin``, or of any of ``suffix``.

    A fault is an HTTP status, ``"reset"`` (connection closed before an answer), ``"stall"`` (no answer until
    ``release``), ``("short", n)`` (connection closed after n bytes), ``"whole"`` (the range is ignored), or a callable
    that is run before the answer.
    """

    def __init__(self, target: str) -> None:
        self.release = threading.Event()
        self.reset()
        self._lock = threading.Lock()
        proxy, host = self, target.removeprefix("http://")

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy.handle(self, host)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *args: Any) -> None:
                pass  # broken connections are the point

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def reset(self) -> None:
        """No faults, and no requests so far."""
        self.release.set()
        self.faults: list[Any] = []
        self.suffix = ".bin"
        self.methods: tuple[str, ...] = ("GET",)
        self.requests: list[tuple[str, str, str | None]] = []
        self.release = threading.Event()

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def ranges(self, suffix: str = ".bin") -> list[str | None]:
        """Ranges of the GETs so far."""
        return [given for method, path, given in self.requests if method == "GET" and path.endswith(suffix)]

    def handle(self, request: BaseHTTPRequestHandler, host: str) -> None:
        fault = None
        path = request.path.partition("?")[0]
        with self._lock:
            self.requests.append((request.command, path, request.headers.get("Range")))
            if path.endswith(self.suffix) and request.command in self.methods and self.faults:
                fault = self.faults.pop(0)
        if callable(fault):
            fault()
        elif isinstance(fault, int):
            code = "SlowDown" if fault >= 429 else "AccessDenied"
            body = f"<Error><Code>{code}</Code></Error>".encode() if request.command == "GET" else b""
            request.send_response(fault)
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)
            return
        elif fault in ("reset", "stall"):
            if fault == "stall":
                self.release.wait(60)
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        connection = http.client.HTTPConnection(host, timeout=30)
        headers = {k: v for k, v in request.headers.items() if not (fault == "whole" and k.lower() == "range")}
        connection.request(request.command, request.path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                request.send_header(name, value)
        request.end_headers()
        if isinstance(fault, tuple):
            request.wfile.write(body[: fault[1]])
            request.wfile.flush()
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)
        else:
            request.wfile.write(body)
        connection.close()


@pytest.fixture(scope="session")
def session_proxy(s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyProxy]:
    """The proxy that boto3 is pointed to, once for all tests: making a client takes half a second."""
    faulty = FaultyProxy(s3_endpoint)
    nothing = tmp_path_factory.mktemp("aws")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", str(nothing / "config"))
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(nothing / "credentials"))
        patch.setenv("AWS_ENDPOINT_URL_S3", faulty.url)
        S3Store.forget_shared()
        yield faulty
        S3Store.forget_shared()
    faulty.close()


@pytest.fixture
def proxy(session_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyProxy]:
    """The proxy without faults, and caches of the test's own."""
    session_proxy.reset()
    BLOCKS.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg-cache"))
    monkeypatch.setattr(object_storage, "BACKOFF_SECONDS", 0.001)
    yield session_proxy
    BLOCKS.clear()


@pytest.fixture(scope="session")
def s3_client(s3_endpoint: str, session_proxy: FaultyProxy) -> Any:
    """A client that goes to the server directly."""
    client = boto3.session.Session().client("s3", endpoint_url=s3_endpoint)
    client.create_bucket(Bucket=BUCKET)
    return client


@pytest.fixture
def bucket(s3_client: Any, proxy: FaultyProxy) -> Any:
    """An empty bucket, and a client for it."""
    for entry in s3_client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        s3_client.delete_object(Bucket=BUCKET, Key=entry["Key"])
    return s3_client


@pytest.fixture
def upload(bucket: Any, tmp_path: Path) -> Callable[..., str]:
    """Writes a pair of files, locally and to the bucket; returns the URL prefix."""

    def upload(tokens: np.ndarray, lengths: Any, key: str = "en/x", dtype: type = np.uint16) -> str:
        local = tmp_path / "local"
        local.mkdir(exist_ok=True)
        with IndexedDatasetBuilder(local / "x.bin", dtype) as builder:
            builder.add_sequences(tokens, lengths, np.ones(len(lengths), dtype=np.int64))
            builder.finalize(local / "x.idx")
        for suffix in ("bin", "idx"):
            bucket.upload_file(str(local / f"x.{suffix}"), BUCKET, f"{key}.{suffix}")
        return f"s3://{BUCKET}/{key}"

    return upload
