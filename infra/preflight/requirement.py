"""What does not fit, and how a person is told of it."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import DeviceError


@dataclass(frozen=True)
class Finding:
    """Something that does not fit."""

    what: str
    where: str
    got: str
    expected: str
    command: str
    """That a person runs next."""

    @property
    def text(self) -> str:
        return (
            f"{self.what}\n      where     {self.where}\n      got       {self.got}\n"
            f"      expected  {self.expected}\n      next      {self.command}"
        )


Look = tuple[str, list[Finding]]  # what was seen, in a line, and what of it does not fit


def require_fit(findings: list[Finding]) -> None:
    if findings:
        lines = "".join(f"\n  - {finding.text}" for finding in findings)
        raise DeviceError(f"{len(findings)} of what is needed is not there, nothing was changed:{lines}")
