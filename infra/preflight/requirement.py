"""Describes requirements that are not met."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import DeviceError


@dataclass(frozen=True)
class Finding:
    """A requirement that is not met."""

    what: str
    where: str
    got: str
    expected: str
    command: str
    """The command to run, or the value to write, next."""

    @property
    def text(self) -> str:
        return (
            f"{self.what}\n      where     {self.where}\n      got       {self.got}\n"
            f"      expected  {self.expected}\n      next      {self.command}"
        )


CheckResult = tuple[str, list[Finding]]  # what was seen, in one line, and the requirements that are not met


def require_fit(findings: list[Finding]) -> None:
    """Raises `DeviceError` with all findings, if there are any."""
    if findings:
        lines = "".join(f"\n  - {finding.text}" for finding in findings)
        are = "requirement is" if len(findings) == 1 else "requirements are"
        raise DeviceError(f"{len(findings)} {are} not met; nothing was changed:{lines}")
