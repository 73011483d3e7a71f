"""The channels of alerts, from Airflow connections: e-mail, and all services that Apprise supports.

Each service of Apprise is a channel of its own. If one service fails, the others do not repeat their messages.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException

from jobs.refusal import Refusal

if TYPE_CHECKING:
    from airflow.sdk import Connection

SMTP = "tideline_smtp"
APPRISE = "tideline_apprise"
# A task that has ended has 20 s for its callbacks ([core] task_success_overtime).
_SMTP_SECONDS = 8


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message: a subject, a text, a link, and whether it is good news."""

    subject: str
    text: str
    link: str | None
    good: bool


Send = Callable[[Message], None]


def channels() -> dict[str, Send]:
    """Every channel that a connection describes, by a name without secrets."""
    mail, apprise = _connection(SMTP), _connection(APPRISE)
    found: dict[str, Send] = {"smtp": partial(_mail, mail)} if mail else {}
    return {**found, **dict(_services(apprise))} if apprise else found


def _connection(conn_id: str) -> "Connection | None":
    try:
        return BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        return None


def _mail(connection: "Connection", message: Message) -> None:
    from airflow.providers.smtp.hooks.smtp import SmtpHook

    class Mail(SmtpHook):
        """A hook that gives up in time, unless the connection sets other limits. The next delivery tries again."""

        timeout = int(connection.extra_dejson.get("timeout", _SMTP_SECONDS))
        smtp_retry_limit = int(connection.extra_dejson.get("retry_limit", 0))

    recipients = connection.extra_dejson.get("to")
    if not recipients:
        raise Refusal(f"connection {SMTP!r} has no recipient: set `to` in its extra to an address or a list")
    lines = [*message.text.splitlines(), *([message.link] if message.link else [])]
    with Mail(smtp_conn_id=SMTP) as mail:
        mail.send_email_smtp(to=recipients, subject=message.subject, html_content=_html(lines, message.link))


def _html(lines: list[str], link: str | None) -> str:
    """The lines as HTML, because the provider sends HTML only."""
    shown = (f'<a href="{escape(line)}">{escape(line)}</a>' if line == link else escape(line) for line in lines)
    return "<br>\n".join(shown)


def _services(connection: "Connection") -> Iterator[tuple[str, Send]]:
    from airflow.providers.apprise.hooks.apprise import AppriseHook
    from apprise import Apprise

    config = connection.extra_dejson.get("config") and AppriseHook(APPRISE).get_config_from_conn(connection)
    entries = config if isinstance(config, list) else [config]
    for number, entry in enumerate(entries, start=1):
        services = Apprise()
        if isinstance(entry, dict) and services.add(entry.get("path") or ""):
            yield from ((_name(service), partial(_notify, service)) for service in services)
        else:
            yield f"apprise_{number}", partial(_refuse, number)


def _name(service: Any) -> str:
    return f"apprise_{hashlib.sha256(service.url(privacy=False).encode()).hexdigest()[:12]}"


def _notify(service: Any, message: Message) -> None:
    from apprise import Apprise, NotifyFormat, NotifyType

    one = Apprise()
    one.add(service)
    # The provider's own `notify` does not report that a service has rejected a message.
    taken = one.notify(
        title=message.subject,
        body="\n".join([message.text, *([message.link] if message.link else [])]),
        body_format=NotifyFormat.TEXT,
        notify_type=NotifyType.SUCCESS if message.good else NotifyType.FAILURE,
    )
    if not taken:
        raise Refusal(f"{service.service_name} of connection {APPRISE!r} rejected the message: check its address")


def _refuse(number: int, message: Message) -> None:
    raise Refusal(
        f"entry {number} in the config of connection {APPRISE!r} is no address that Apprise knows: "
        'write {"path": "slack://…"}, or a list of such entries'
    )
