"""The attempt of a command, where something starts the same command again and again and knows when one is over.

A deploy Job on Kubernetes and AWS Batch do: each begins an attempt when the one before has ended, or was given up. They
name it in the command's environment, and a lock that an earlier attempt of the same series left is not waited for.
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
    """One of several that follow each other: no two of a series are meant to run at once."""

    series: str
    """Name of the series of attempts, which no other has: the id of the deployment or of the job."""
    number: int

    def __str__(self) -> str:
        return f"{self.series}/{self.number}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The attempt that a text names; None for a text that names none."""
        found = _FORM.fullmatch(text)
        return cls(found[1], int(found[2])) if found else None

    def follows(self, other: Attempt) -> bool:
        """Is it a later one of the same series?"""
        return self.series == other.series and self.number > other.number


def this_attempt() -> Attempt | None:
    """The attempt that this process is part of; None where nobody counts them.

    Raises `DeviceError` for a variable that names none.
    """
    text = os.environ.get(ATTEMPT_VARIABLE, "")
    if not text:
        return None
    attempt = Attempt.parse(text)
    if attempt is None:
        raise DeviceError(
            f"{ATTEMPT_VARIABLE}={text[:60]!a}: expected the name of a series of attempts and a number, such as "
            f"trainer-0a1b2c/2. Unset it where you start the command yourself."
        )
    return attempt
