"""Makes boto3 clients for one region, and turns their errors into ones that a user can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, EndpointConnectionError, HTTPClientError

from services.common.errors import DeviceError, TryAgain

STACK_TAG = "millrace.dev/stack"  # terraform tags everything that it makes with the stack's name
SIGN_IN = (
    "aws sts get-caller-identity shows your principal; aws sso login, AWS_PROFILE or AWS_ACCESS_KEY_ID choose another"
)
BUSY = ("RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException")


class Account:
    """An AWS account in one region. AWS_ENDPOINT_URL sends its requests elsewhere, as for every AWS tool."""

    def __init__(self, region: str) -> None:
        self.region = region
        with explaining_refusals("AWS_PROFILE"):
            self._session = boto3.Session(region_name=region)
        self._clients: dict[str, Any] = {}

    def client(self, service: str) -> Any:
        if service not in self._clients:
            config = Config(connect_timeout=10, read_timeout=60)
            self._clients[service] = self._session.client(service, config=config)
        return self._clients[service]

    def pages(self, service: str, operation: str, key: str, **arguments: Any) -> Iterator[Any]:
        """Yields every item under `key` in every page of an answer."""
        for page in self.client(service).get_paginator(operation).paginate(**arguments):
            yield from page[key]

    def find(self, service: str, operation: str, **arguments: Any) -> dict[str, Any] | None:
        """The answer to one request; None if AWS says that the resource does not exist."""
        try:
            answer: dict[str, Any] = getattr(self.client(service), operation)(**arguments)
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if "NotFound" in code or code in ("NoSuchBucket", "NoSuchEntity"):
                return None
            raise
        return answer


def tags_of(found: dict[str, Any]) -> dict[str, str]:
    """The tags of a resource as most services describe it."""
    return {pair["Key"]: pair["Value"] for pair in found.get("Tags") or []}


@contextmanager
def explaining_refusals(what: str) -> Iterator[None]:
    """Turns missing credentials, rights and networks into errors that say what to do; `what` names the attempt.

    Raises `DeviceError`, or `TryAgain` if AWS is busy or does not answer.
    """
    try:
        yield
    except (EndpointConnectionError, HTTPClientError) as error:
        raise TryAgain(
            f"{what}: AWS does not answer: {error}. Check the network and AWS_ENDPOINT_URL, then try again"
        ) from error
    except BotoCoreError as error:  # no credentials, an unknown profile, a sign-in that has expired
        raise DeviceError(f"{what}: no usable AWS credentials ({error}). {SIGN_IN}") from error
    except ClientError as error:
        is_failing = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500
        if is_failing or error.response["Error"]["Code"] in BUSY:
            raise TryAgain(f"{what}: AWS is overloaded or failing: {error}. Try again in a minute") from error
        raise DeviceError(f"{what}: AWS refused the request: {error}. {SIGN_IN}") from error
