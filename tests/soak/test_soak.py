"""The audit of a soak finds a planted fault of each kind, and nothing in what a short soak leaves."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from services.common.recipe.schema import STAGES
from services.common.testing.artifacts import publish
from services.common.testing.commands import run_python
from services.common.testing.recipes import make_recipe
from services.common.testing.seeds import draw_seed
from services.trainer.tests.runs import flip_a_bit
from tests.soak.audit import (
    audit_artifacts,
    audit_misses,
    audit_output,
    audit_steps,
    explain_exit_code,
    find_orphans,
)
from tests.soak.plan import KINDS, LONG_EVERY, plan_cycle

TOKENS_PER_STEP = 8
LOSSES = {step: 5.0 / step for step in range(1, 9)}


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return path


def record(step: int, **changes: Any) -> dict[str, Any]:
    is_first = {"is_first_of_process": step == 1}
    return {"step": step, "loss": LOSSES[step], "tokens": step * TOKENS_PER_STEP, **is_first, **changes}


WHOLE = [record(step) for step in range(1, 9)]
AGAIN = [record(4, is_first_of_process=True), *WHOLE[4:]]


@pytest.mark.parametrize(
    ("records", "found"),
    [
        (WHOLE, []),
        ([*WHOLE[:6], *AGAIN], []),
        (WHOLE[:4] + WHOLE[5:], ["samples were lost: step 6 follows step 4"]),
        (WHOLE[:7], ["samples were lost: the last step is 7, expected 8"]),
        (WHOLE[:5] + WHOLE[4:], ["samples were repeated: step 5 follows step 5 in the same process"]),
        (
            [*WHOLE[:4], record(7, is_first_of_process=True), WHOLE[7]],
            ["samples were lost: step 7 follows step 4"],
        ),
        ([*WHOLE[:4], record(5, loss=2.0), *WHOLE[5:]], ["another loss: step 5 has 2.0, expected 1.0"]),
        ([*WHOLE[:5], record(6, tokens=40), *WHOLE[6:]], ["another number of tokens: step 6 has 40, expected 48"]),
    ],
)
def test_steps_that_a_run_lost_repeated_or_changed_are_found(
    tmp_path: Path, records: list[dict[str, Any]], found: list[str]
) -> None:
    path = write_lines(tmp_path / "metrics.jsonl", records)
    assert [f"{each.what}: {each.detail}" for each in audit_steps(path, LOSSES, TOKENS_PER_STEP)] == found


def test_a_compile_miss_and_a_traceback_are_found(tmp_path: Path) -> None:
    warm, cold = {"graphs_compiled": 0, "new_cache_files": 0}, {"graphs_compiled": 2, "new_cache_files": 7}
    assert audit_misses(write_lines(tmp_path / "attempts.jsonl", [warm])) == []
    [miss] = audit_misses(write_lines(tmp_path / "attempts.jsonl", [warm, cold]))
    assert miss.detail == "2 graphs, 7 files"
    log = tmp_path / "trainer-0.log"
    log.write_text("training: 1/2 steps\nTraceback (most recent call last):\n  ...\nValueError: 7\n", encoding="utf-8")
    [traceback] = audit_output(log)
    assert "ValueError: 7" in traceback.detail


def test_orphans_and_damage_are_found_by_their_paths(tmp_path: Path) -> None:
    root = tmp_path / "fsx"
    folder = publish(root, make_recipe(tmp_path))[0].path
    run = root / "run" / "small-00000000"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "rank-00000.log").touch()
    assert find_orphans(root) == audit_artifacts(root) == []

    orphans = [folder / "graphs" / "four.bin", run / "metrics.held.jsonl", run.with_name("small-00000000.lock")]
    for path in orphans:
        path.touch()
    orphans.append(folder.with_name(f"{folder.name}.0123abcd.partial"))
    orphans[-1].mkdir()
    assert sorted(finding.place for finding in find_orphans(root)) == sorted(orphans)

    flip_a_bit(folder / "graphs/two.bin")
    damage, left_over = audit_artifacts(root)
    assert "graphs/two.bin" in damage.detail
    assert orphans[-1].name in left_over.detail


@pytest.mark.parametrize(
    ("exit_code", "kinds", "is_documented"),
    [
        (0, {"kill a worker"}, True),
        (75, {"freeze a worker"}, True),
        (75, set(), False),
        (5, {"fill the root's disk"}, True),
        (5, {"kill a worker"}, False),
        (130, {"SIGINT"}, True),
        (1, {"SIGINT"}, False),
        (-signal.SIGKILL, {"kill the command"}, True),
        (-signal.SIGKILL, {"kill a worker"}, False),
    ],
)
def test_an_exit_code_has_to_be_the_documented_one_of_a_fault(
    exit_code: int, kinds: set[str], is_documented: bool
) -> None:
    assert (explain_exit_code(exit_code, kinds) is None) == is_documented


def test_a_cycle_follows_from_the_seed_and_cycles_have_faults_of_all_kinds_and_stages() -> None:
    cycles = [plan_cycle(7, number) for number in range(80)]
    assert cycles == [plan_cycle(7, number) for number in range(80)]
    assert cycles[0] != plan_cycle(8, 0)
    faults = [fault for cycle in cycles for fault in cycle.faults]
    assert {fault.kind for fault in faults} == {*KINDS}
    assert {fault.stage for fault in faults} == {*STAGES}
    assert {workers for cycle in cycles for workers, _ in cycle.layouts} == {1, 2, 4}
    assert {cycle.launch for cycle in cycles} == {"inline", "ray"}
    assert all(cycle.launch == "inline" for cycle in cycles[LONG_EVERY - 1 :: LONG_EVERY])


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.skipif(os.getuid() != 0, reason="only root mounts file systems")
def test_the_audit_of_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    options = ("--minutes", "1", "--seed", str(draw_seed()), "--folder", str(tmp_path / "soak"))
    done = run_python(["-m", "tests.soak", *options])
    assert done.returncode == 0, done.stdout
    assert "| fault | count | outcomes |" in done.stdout
