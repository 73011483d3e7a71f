"""A real S3 server on this machine, for tests: its buckets are empty, and gone with it."""

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

from jobs.bucket import Bucket
from local.ports import free_port


@contextmanager
def serving(log: Path) -> Iterator[dict[str, str]]:
    """The environment of one whose lake lies there."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            # Clients remember a bucket by its name.
            bucket = f"lakes-{port}"
            _make_bucket(server, f"{url}/{bucket}", log)
            yield {
                "LAKE_ROOT": f"s3a://{bucket}/tideline",
                "AWS_ENDPOINT_URL": url,
                "AWS_ALLOW_HTTP": "true",
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "tests",
                "AWS_SECRET_ACCESS_KEY": "tests",
                # Nobody asks a cloud's machines who they are.
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
    """What lies in a folder of a bucket, on the disk: for those who read files themselves."""
    for file in folder.written():
        to = target / str(file.relative_to(folder))
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(file.read_bytes())
    return target


@contextmanager
def losing_answers(url: str) -> Iterator[str]:
    """The same server at another address: what is to be created is created, and answered as if it had failed."""
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
            """The test says what matters."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}"
        finally:
            proxy.shutdown()
    assert lost, "no answer was lost"
