"""The tools that tests share: a wait that explains its end, a recipe with changes, a seed that can be repeated."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from services.common.testing.recipes import recipe_text
from services.common.testing.seeds import draw_seed
from services.common.testing.waiting import wait_until


def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_wait_ends_with_what_the_process_said() -> None:
    said = pytest.raises(AssertionError, match="ended with 1 before it happened: no such thing")
    with start("import sys; sys.exit('no such thing')") as process, said:
        wait_until(lambda: False, process=process)


def test_a_change_adds_a_key_replaces_one_or_takes_a_section_away() -> None:
    changed = tomllib.loads(recipe_text(name="ä", train__seed=7, train__max_steps=1, tokenizer__train=None))

    assert (changed["name"], changed["train"]) == ("ä", {"max_steps": 1, "seed": 7})
    assert "tokenizer" not in changed
    assert "max_steps" not in tomllib.loads(recipe_text(train__max_steps=None))["train"]


def test_a_seed_is_printed_and_can_be_drawn_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEST_SEED", raising=False)
    seed = draw_seed()
    assert f"TEST_SEED={seed}\n" in capsys.readouterr().out

    monkeypatch.setenv("TEST_SEED", str(seed))
    assert draw_seed() == seed
