"""Who asks AWS, and where: boto3's clients of one region, and the errors that a user can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    ClientError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)

from services.common.errors import DeviceError, TryAgain

STACK_TAG = "millrace.dev/stack"  # on everything that terraform makes; its value is the stack's name
SIGN_IN = "aws sts get-caller-identity shows who you are; aws sso login, AWS_PROFILE or AWS_ACCESS_KEY_ID sign in"
DENIED = (
    "AccessDenied",
    "AccessDeniedException",
    "UnauthorizedOperation",
    "AuthFailure",
    "UnrecognizedClientException",
)
NOT_SIGNED_IN = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)
BUSY = ("RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException")
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired")


class Account:
    """Clients are made once each. AWS_ENDPOINT_URL points them elsewhere, as it does every tool of AWS."""

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
        """Every item below `key` of every page of an answer."""
        for page in self.client(service).get_paginator(operation).paginate(**arguments):
            yield from page[key]


@contextmanager
def explaining_refusals(what: str) -> Iterator[None]:
    """Turn no credentials, no rights and no network into an error that says what to do."""
    try:
        yield
    except NOT_SIGNED_IN as error:
        raise DeviceError(f"{what}: no credentials for AWS ({error}). {SIGN_IN}") from error
    except (EndpointConnectionError, HTTPClientError) as error:
        raise TryAgain(
            f"{what}: AWS does not answer: {error}. Is there a network, and is AWS_ENDPOINT_URL right?"
        ) from error
    except ClientError as error:
        code = error.response["Error"]["Code"]
        if code in EXPIRED:
            raise DeviceError(f"{what}: the credentials have expired. {SIGN_IN}") from error
        if code in DENIED:
            raise DeviceError(
                f"{what}: refused by AWS, {error}. Your principal lacks the right that it names. {SIGN_IN}"
            ) from error
        if code in BUSY or error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500:
            raise TryAgain(f"{what}: AWS is busy or broken: {error}. Try again in a minute") from error
        raise DeviceError(f"{what}: {error}") from error


def is_absent(error: ClientError) -> bool:
    """Does AWS say that there is no such thing?"""
    code = error.response["Error"]["Code"]
    return "NotFound" in code or code in ("NoSuchBucket", "NoSuchEntity")
