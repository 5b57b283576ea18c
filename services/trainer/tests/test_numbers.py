"""The same recipe gives the same numbers: losses that this program gave once, which no change of its shape may move.

Other CPUs round otherwise, hence the tolerance.
"""

from __future__ import annotations

import json

import pytest

from services.trainer.tests.builders import NewJob
from services.trainer.tests.numbers import GOLDEN, train_golden


def test_fifty_steps_give_the_losses_that_they_gave(new_job: NewJob) -> None:
    found, golden = train_golden(new_job), json.loads(GOLDEN.read_text(encoding="utf-8"))

    assert found.keys() == golden.keys()
    for name, expected in golden.items():
        assert found[name] == pytest.approx(expected, rel=1e-5), name
