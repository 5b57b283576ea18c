"""The world changes while a command waits: one step for each of its polls."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Script = Callable[..., None]
"""Takes the steps of the polls to come, in their order."""


def script_polls(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Replace `time.sleep` by the scripted steps. A poll without a step left fails the test."""

    def script(*steps: Callable[[], object]) -> None:
        left = list(steps)

        def sleep(seconds: float) -> None:
            assert left, "it waits for ever"
            left.pop(0)()

        monkeypatch.setattr("time.sleep", sleep)

    script()
    return script
