"""The channels that carry notices: a webhook, whose JSON Slack takes, and an SNS topic of AWS.

The webhook's URL is a password: whoever has it can post. It is read from the environment or from a file, and appears in
no file, no log and no error.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Protocol

from services.common.input.files import read_file
from services.common.notices.notice import Notice
from services.common.notices.variables import TOPIC_VARIABLE, WEBHOOK_VARIABLE
from services.common.recipe.schema import Notify

SOCKET_SECONDS = 4.0
_REFUSALS = (400, 413, 422)
"""Statuses that say that this notice will never be taken. Others may end: a webhook can be made again."""
_MAX_URL_BYTES = 8_192


class NotSent(Exception):
    """A channel did not take a notice. The message holds no address."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final
        """Whether the receiver will never take this notice."""


class Channel(Protocol):
    name: str

    def takes(self, notice: Notice) -> bool:
        """Tell whether this channel carries the notice."""
        ...

    def send(self, notice: Notice) -> None:
        """Send a notice. Raises `NotSent`."""
        ...


class Webhook:
    """Posts notices to a URL of Slack, or of another receiver that takes the same JSON."""

    name = "webhook"

    def __init__(self, url: str) -> None:
        self._url = url
        # Without redirects: the next host could be anybody's, and a POST becomes a GET there.
        self._opener = urllib.request.build_opener(_NoRedirect())

    def __repr__(self) -> str:
        return "Webhook(***)"

    def takes(self, notice: Notice) -> bool:
        return True

    def send(self, notice: Notice) -> None:
        request = urllib.request.Request(
            self._url,
            data=json.dumps(render_slack(notice)).encode(),
            headers={
                "Content-Type": "application/json",
                "User-Agent": "millrace",
                # Draft draft-ietf-httpapi-idempotency-key-header, for receivers that drop a repeated notice.
                "Idempotency-Key": json.dumps(f"{notice.subject}/{notice.key}"),
            },
        )
        try:
            with self._opener.open(request, timeout=SOCKET_SECONDS):
                return
        except urllib.error.HTTPError as error:
            error.close()
            raise NotSent(f"it answered {error.code}", is_final=error.code in _REFUSALS) from None
        except urllib.error.URLError as error:
            reason = error.reason
            text = reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__
            raise NotSent(text) from None
        except TimeoutError:
            raise NotSent(f"no answer within {SOCKET_SECONDS:.0f} s") from None


class Topic:
    """Publishes notices to an SNS topic, with the credentials of the pod, the job or the user."""

    name = "topic"

    def __init__(self, arn: str = "") -> None:
        self._arn = arn
        """ARN for notices that name no topic of their own; empty for none."""

    def takes(self, notice: Notice) -> bool:
        return bool(notice.topic or self._arn)

    def send(self, notice: Notice) -> None:
        try:
            # Imported here, because few runs publish to SNS.
            import botocore.config  # noqa: PLC0415
            import botocore.exceptions  # noqa: PLC0415
            import botocore.session  # noqa: PLC0415
        except ImportError:
            raise NotSent("this image has no botocore", is_final=True) from None
        arn = notice.topic or self._arn
        config = botocore.config.Config(
            connect_timeout=SOCKET_SECONDS, read_timeout=SOCKET_SECONDS, retries={"total_max_attempts": 1}
        )
        try:
            client = botocore.session.get_session().create_client("sns", region_name=arn.split(":")[3], config=config)
            client.publish(TopicArn=arn, Subject=_subject(notice), Message=render_text(notice))
        except botocore.exceptions.ClientError as error:
            raise NotSent(f"AWS answered {error.response.get('Error', {}).get('Code')}") from None
        except botocore.exceptions.BotoCoreError as error:
            raise NotSent(type(error).__name__) from None


def open_channels(notify: Notify, environment: MutableMapping[str, str] = os.environ) -> tuple[list[Channel], str]:
    """Return the channels of a process, and a sentence about a webhook whose address cannot be read, or "".

    A webhook's variable is taken out of the environment, so that no process started later has it.
    """
    channels: list[Channel] = []
    url, problem = _read_url(notify.webhook or f"env:{WEBHOOK_VARIABLE}", environment)
    if url:
        channels.append(Webhook(url))
    topic = notify.topic or environment.get(TOPIC_VARIABLE, "")
    if topic:
        channels.append(Topic(topic))
    return channels, problem


def _read_url(place: str, environment: MutableMapping[str, str]) -> tuple[str, str]:
    kind, _, name = place.partition(":")
    if kind == "env":
        url = environment.pop(name, "").strip()
        if not url:
            is_wanted = name != WEBHOOK_VARIABLE
            return "", f"environment variable {name}, which notify.webhook names, is not set" if is_wanted else ""
    else:
        try:
            url = read_file(Path(name), max_bytes=_MAX_URL_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            return "", f"{name}, which notify.webhook names, cannot be read: {type(error).__name__}"
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_address = False
    if not is_address or not re.fullmatch(r"[!-~]+", url):
        return "", f"the value of {place} is no http or https address"
    return url, ""


def render_text(notice: Notice) -> str:
    """Return a notice as plain text, with a line each for the report, the next command and the runbook."""
    return "\n".join([notice.title, notice.text, *(f"{name}: {value}" for name, value in notice.links.items())])


def render_slack(notice: Notice) -> dict[str, Any]:
    """Return the JSON of a notice for an incoming webhook of Slack (docs.slack.dev, "Sending messages using incoming
    webhooks"); `text` is shown where blocks are not.
    """
    links = "\n".join(f"{name}: `{_escape(value)}`" for name, value in notice.links.items())
    blocks = [_section(f"*{_escape(notice.title)}*\n{_escape(notice.text)}"), *([_section(links)] if links else [])]
    return {"text": _escape(render_text(notice)), "blocks": blocks}


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text}}


def _escape(text: str) -> str:
    """Escape the three characters with which Slack's markup begins, such as `<!channel>`, which calls everybody."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _subject(notice: Notice) -> str:
    """Return a subject as SNS takes it: at most 100 printable ASCII characters, of which the first is no blank."""
    text = "".join(each if " " <= each <= "~" else "?" for each in f"Millrace {notice.title}")
    return text[:100]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect: the opener then raises the answer as an `HTTPError`."""
