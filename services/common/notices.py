"""Posts what a command has to tell to a webhook, as JSON whose `text` Slack shows.

On Kubernetes the pods reach no receiver: there the rules of k8s/monitoring tell the same, by Alertmanager.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import urllib3

from services.common.artifacts.store import Address, Artifact, Draft, M, Workspace, publish_once
from services.common.artifacts.upstream import stage_command
from services.common.errors import RecipeError
from services.common.process.entry_point import exit_code_for
from services.common.recipe.schema import WEBHOOK_VARIABLE, NoticeCondition, Notify, Recipe, Stage

logger = logging.getLogger(__name__)

RETRIES = urllib3.Retry(
    total=3,
    backoff_factor=0.5,
    status_forcelist=(429, 500, 502, 503, 504),
    allowed_methods=None,
    redirect=False,
    raise_on_status=False,
)
TIMEOUT_SECONDS = 4.0
"""Seconds for a connection, and for an answer. With the retries, a receiver that is gone costs a command's end 20 s."""

Post = Callable[[NoticeCondition, str], None]
"""Tells a condition with a sentence; returns at once."""


@contextmanager
def notifying(notify: Notify, subject: str, next_command: str) -> Iterator[Post]:
    """Yield a function that posts notices about `subject`, and post `failed` where the block ends with an error.

    A notice that the receiver does not take after RETRIES is logged and dropped.
    """
    url = read_webhook(notify)
    with ThreadPoolExecutor(1, thread_name_prefix="notices") as sender:

        def post(condition: NoticeCondition, text: str) -> None:
            if url and condition in notify.conditions:
                sender.submit(post_json, url, f"*{subject}: {condition}*\n{text}\nnext: `{next_command}`")

        try:
            yield post
        except BaseException as error:
            post("failed", f"exit code {exit_code_for(error)}: {error}")
            raise


def read_webhook(notify: Notify) -> str:
    """Return the URL of the webhook, or "" for none. It leaves the environment, so that no worker inherits it.

    Raises `RecipeError` where `notify.webhook` names a variable or a file that is not there.
    """
    kind, _, name = (notify.webhook or f"env:{WEBHOOK_VARIABLE}").partition(":")
    if kind == "file":
        try:
            return Path(name).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise RecipeError(f"notify.webhook: {name} cannot be read: {error.strerror}") from error
    url = os.environ.pop(name, "").strip()
    if notify.webhook and not url:
        raise RecipeError(f"notify.webhook: environment variable {name} is not set")
    return url


def post_json(url: str, text: str) -> None:
    """Post `{"text": text}`. The URL is a password, and is in no log."""
    try:
        with urllib3.PoolManager(retries=RETRIES, timeout=TIMEOUT_SECONDS) as pool:
            status = pool.request("POST", url, json={"text": text}).status
    except urllib3.exceptions.HTTPError as error:
        logger.warning("a notice was not sent: %s", type(getattr(error, "reason", error)).__name__)
    else:
        if status >= 300:
            logger.warning("a notice was not sent: the webhook answered %s", status)


def publish_with_notices(
    address: Address,
    manifest_type: type[M],
    stage: Stage,
    recipe: Recipe,
    recipe_path: Path,
    build: Callable[[Workspace], Draft],
) -> tuple[Artifact[M], bool]:
    """Call `publish_once`, and tell that the artifact is published, or why not; nothing where it was published."""
    subject, command = f"{stage} {address.name}/{address.id}", stage_command(stage, recipe_path, address.root)
    with notifying(recipe.notify, subject, command) as post:
        artifact, is_new = publish_once(address, manifest_type, stage, recipe, build)
        if is_new:
            post("done", f"published {address.path}")
        return artifact, is_new
