"""A refusal of AWS becomes an error that says what to do, and an overload becomes one to try again."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError, TokenRetrievalError, UnauthorizedSSOTokenError

from infra.account.session import Account, explaining_refusals
from services.common.errors import DeviceError, TryAgain


@pytest.mark.parametrize(
    "error", [UnauthorizedSSOTokenError(), TokenRetrievalError(provider="sso", error_msg="expired")]
)
def test_a_sign_in_that_has_expired_says_how_to_sign_in(error: Exception) -> None:
    with pytest.raises(DeviceError, match="aws sso login"), explaining_refusals("job"):
        raise error


def test_a_profile_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(DeviceError, match=r"AWS_PROFILE: .*nobody"):
        Account("us-west-2")


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("ServerException", 500, TryAgain),
        ("TooManyRequestsException", 429, TryAgain),
        ("ClientException", 400, DeviceError),
    ],
)
def test_what_aws_could_not_do_now_is_tried_again(code: str, status: int, expected: type[Exception]) -> None:
    answer = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    with pytest.raises(expected, match="job: "), explaining_refusals("job"):
        raise ClientError(answer, "DescribeJobs")
