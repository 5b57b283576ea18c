"""A refusal of AWS becomes an error that says what to do, and an overload becomes one to try again."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError, NoCredentialsError, TokenRetrievalError, UnauthorizedSSOTokenError

from infra.account.session import Account, explaining_refusals
from services.common.errors import DeviceError, TryAgain


def refusal(code: str, status: int) -> ClientError:
    answer = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "DescribeJobs")


@pytest.mark.parametrize(
    ("error", "expected", "said"),
    [
        (NoCredentialsError(), DeviceError, "aws sso login"),
        (UnauthorizedSSOTokenError(), DeviceError, "aws sso login"),
        (TokenRetrievalError(provider="sso", error_msg="expired"), DeviceError, "aws sso login"),
        (refusal("ServerException", 500), TryAgain, "job: "),
        (refusal("TooManyRequestsException", 429), TryAgain, "job: "),
        (refusal("ClientException", 400), DeviceError, "job: "),
    ],
)
def test_what_aws_refuses_is_told_from_what_it_could_not_do_now(
    error: Exception, expected: type[Exception], said: str
) -> None:
    with pytest.raises(expected, match=said), explaining_refusals("job"):
        raise error


def test_a_profile_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(DeviceError, match=r"AWS_PROFILE: .*nobody"):
        Account("us-west-2")
