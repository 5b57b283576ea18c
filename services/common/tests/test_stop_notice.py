"""A checkpoint that takes too long for the notice of a stop is said while there is time to do something."""

from __future__ import annotations

import pytest

from services.common.process.shutdown import NOTICE_VARIABLE, check_notice


def test_a_checkpoint_that_is_too_slow_for_the_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTICE_VARIABLE, "300")

    assert check_notice(100.0) == ""
    told = check_notice(121.0)

    assert "took 121.0 s, and this container has a termination notice of 300 s" in told
    assert "sets 363 s" in told


def test_a_laptop_gives_all_the_time_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NOTICE_VARIABLE, raising=False)

    assert check_notice(1e6) == ""
