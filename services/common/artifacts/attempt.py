"""Reads the number of this attempt at a command, where a scheduler starts the same command again and again.

A deploy Job on Kubernetes and AWS Batch begin an attempt only when the one before has ended, or was given up. They name
it in the command's environment. No attempt waits for a lock that an earlier attempt of its series left behind.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Self

from services.common.errors import DeviceError

ATTEMPT_VARIABLE = "MILLRACE_ATTEMPT"

_FORM = re.compile(r"([A-Za-z0-9_.:-]{1,200})/([0-9]{1,6})")


@dataclass(frozen=True)
class Attempt:
    """An attempt of a series, in which no two attempts are meant to run at the same time."""

    series: str
    """Unique name of the series: the id of the deployment or of the job."""
    number: int

    def __str__(self) -> str:
        return f"{self.series}/{self.number}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the attempt that a text names; None for a text that names none."""
        found = _FORM.fullmatch(text)
        return cls(found[1], int(found[2])) if found else None

    def follows(self, other: Attempt) -> bool:
        """Tell whether this attempt is a later one of the same series."""
        return self.series == other.series and self.number > other.number


def this_attempt() -> Attempt | None:
    """Return the attempt that this process belongs to; None where MILLRACE_ATTEMPT is not set.

    Raises `DeviceError` where the variable names no attempt.
    """
    text = os.environ.get(ATTEMPT_VARIABLE, "")
    if not text:
        return None
    attempt = Attempt.parse(text)
    if attempt is None:
        raise DeviceError(
            f"{ATTEMPT_VARIABLE}={text[:60]!a}: expected the name of a series and the attempt's number, such as "
            f"trainer-0a1b2c/2. Unset the variable where you start the command yourself."
        )
    return attempt
