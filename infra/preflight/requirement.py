"""Requirements that are not met: each a text that says what, got, expected, and the next command."""

from __future__ import annotations

from collections.abc import Iterable

from services.common.errors import DeviceError

CheckResult = tuple[str, list[str]]  # what was seen, in one line, and the requirements that are not met


def require_met(problems: Iterable[str]) -> None:
    """Raises `DeviceError` with all problems, if there are any."""
    if lines := [f"\n  - {each}" for each in problems]:
        are = "requirement is" if len(lines) == 1 else "requirements are"
        raise DeviceError(f"{len(lines)} {are} not met; nothing was changed:{''.join(lines)}")
