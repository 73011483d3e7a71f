"""A real S3 server on this machine, for tests. Its buckets begin empty and are gone when it ends."""

import http.client
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from jobs.storage.bucket import Bucket
from local.platform.ports import free_port

# `moto.server` as a store that does not support the header: it overwrites objects that it should only create. Two first
# commits of a table with the name `raced` come at the same moment.
_CARELESS = """
import sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

app = DomainDispatcherApplication(create_backend_app)
both = threading.Barrier(2)

def careless(environ, start_response):
    environ.pop("HTTP_IF_NONE_MATCH", None)
    if environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith("/raced/_delta_log/" + 19 * "0" + "1.json"):
        both.wait(60)
    return app(environ, start_response)

run_simple("127.0.0.1", int(sys.argv[1]), careless, threaded=True)
"""


@contextmanager
def serving(log: Path, *, careless: bool = False) -> Iterator[dict[str, str]]:
    """The environment for a lake on this server. With ``careless=True`` the store ignores `If-None-Match`."""
    port = free_port()
    sound = ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    command = [sys.executable, *(["-c", _CARELESS, str(port)] if careless else sound)]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            # Clients cache a bucket by its name, so each server needs another name.
            bucket = f"lakes-{port}"
            _make_bucket(server, f"{url}/{bucket}", log)
            yield {
                "LAKE_ROOT": f"s3a://{bucket}/tideline",
                "AWS_ENDPOINT_URL": url,
                "AWS_ALLOW_HTTP": "true",
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "tests",
                "AWS_SECRET_ACCESS_KEY": "tests",
                # Clients must not ask a cloud's metadata service for credentials.
                "AWS_EC2_METADATA_DISABLED": "true",
            }
        finally:
            server.kill()


def _make_bucket(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            assert httpx.put(url, trust_env=False).is_success
            return
        except httpx.TransportError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)


def copied(folder: Bucket, target: Path) -> Path:
    """Copy a bucket's folder to the disk, for code that reads files itself."""
    for file in folder.written():
        to = target / str(file.relative_to(folder))
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(file.read_bytes())
    return target


@contextmanager
def losing_answers(url: str) -> Iterator[str]:
    """The same server at another address: objects are created, but the first answer reports a failure."""
    lost: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            connection = http.client.HTTPConnection(urlsplit(url).netloc)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            content, status = answer.read(), answer.status
            if self.command == "PUT" and self.headers.get("If-None-Match") and self.path not in lost:
                lost.add(self.path)
                content, status = b"<Error><Code>InternalError</Code></Error>", 500
            self.send_response(status)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else len(content)
            self.send_header("Content-Length", str(length or 0))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else content)
            connection.close()

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

        def log_message(self, format: str, *words: object) -> None:
            """Log nothing: the test reports its failures itself."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}"
        finally:
            proxy.shutdown()
    assert lost, "no answer was lost"
