"""The channels of alerts in tests: a real mail server, a real web server, and the connections that lead to them."""

import json
import threading
from email import message_from_bytes
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, Envelope, LoginPassword, Session

from local.platform.ports import free_port

PASSWORD = "never-in-a-log"


class Mailbox:
    """A mail server that takes every message of a client with the right password."""

    def __init__(self, port: int = 0) -> None:
        self.messages: list[Message] = []
        self.recipients: list[list[str]] = []
        self.server = Controller(
            self,
            hostname="127.0.0.1",
            port=port or free_port(),
            authenticator=self.authenticate,
            auth_require_tls=False,
        )

    def authenticate(self, server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        return AuthResult(success=isinstance(data, LoginPassword) and data.password == PASSWORD.encode(), handled=False)

    async def handle_DATA(self, server: Any, session: Session, envelope: Envelope) -> str:
        self.messages.append(message_from_bytes(envelope.content or b""))
        self.recipients.append(envelope.rcpt_tos)
        return "250 OK"

    @property
    def port(self) -> int:
        return int(self.server.port)

    @property
    def subjects(self) -> list[str]:
        return [str(message["Subject"]) for message in self.messages]

    def body(self, number: int) -> str:
        (part,) = self.messages[number].get_payload()
        return part.get_payload(decode=True).decode().replace("\r\n", "\n")

    def __enter__(self) -> "Mailbox":
        self.server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stop()


class Hooks:
    """A web server that takes the messages of Apprise to `json://`, or answers with an error."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.status = 200
        hooks = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hooks.said.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(hooks.status)
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    @property
    def titles(self) -> list[str]:
        return [said["title"] for said in self.said]

    def __enter__(self) -> "Hooks":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def mail_to(port: int, password: str = PASSWORD, **extra: Any) -> str:
    """The connection to a mail server on this machine, as Airflow reads it from the environment."""
    sender = {"from_email": "tideline@example.org", "to": "night@example.org, day@example.org"}
    plain = {"disable_tls": True, "disable_ssl": True}
    login = {"login": "tideline", "password": password}
    return json.dumps(
        {"conn_type": "smtp", "host": "127.0.0.1", "port": port, **login, "extra": {**sender, **plain, **extra}}
    )


def posts_to(*ports: int) -> str:
    """The connection to web servers on this machine, as Airflow reads it from the environment."""
    config = [{"path": f"json://user:{PASSWORD}@127.0.0.1:{port}", "tag": "alerts"} for port in ports]
    return json.dumps({"conn_type": "apprise", "extra": {"config": config}})
