"""The file that says which account jobs go to."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.batch.config import read_config
from services.common.errors import RecipeError
from tests.deploy.batch.builders import write_config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"CPU_QUEUE": ""}, "CPU_QUEUE=: .*make infra-up STACK=batch"),
        ({"TRAINIUM_QUEU": "q"}, "TRAINIUM_QUEU=q: Extra"),
        ({"NAME": '"millrace"'}, "KEY=VALUE"),
        ({"CPU_MAX_NODES": "0"}, "CPU_MAX_NODES=0: "),
        ({"EXECUTION_ROLE": ""}, "HF_TOKEN_SECRET .*EXECUTION_ROLE"),
        ({"EXECUTION_ROLE": "", "HF_TOKEN_SECRET": ""}, "WEBHOOK_SECRET .*EXECUTION_ROLE"),
        ({"WEBHOOK_SECRET": "https://hooks.example.com/services/T0"}, "WEBHOOK_SECRET=.*arn:"),
        ({"CHECKPOINT_GB": "13B"}, "CHECKPOINT_GB=13B: "),
        ({"NOTICE_SECONDS": "-1"}, "NOTICE_SECONDS=-1: "),
    ],
)
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        read_config(write_config(tmp_path / "config.txt", **changes))


def test_a_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"config\.txt"):
        read_config(tmp_path / "config.txt")
