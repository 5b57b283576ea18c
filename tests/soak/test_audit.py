"""The audit of a soak finds a planted fault of each kind, and nothing in what an orderly run leaves."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from services.common.artifacts.checkpoint import CheckpointManifest, checkpoint_id, shard_name
from services.common.artifacts.store import Address, Draft, Workspace, publish_once
from services.common.program.llama import parameter_shapes
from services.common.program.state import StateKind, StateSlice
from services.common.recipe.schema import STAGES, Recipe
from services.common.testing.artifacts import CORPUS, make_payload, publish
from services.common.testing.recipes import make_recipe
from services.trainer.checkpoints.index import tabulate, write_index
from services.trainer.checkpoints.shards import write_shard
from tests.soak.audit import (
    Finding,
    audit_artifacts,
    audit_misses,
    audit_output,
    audit_steps,
    audit_weights,
    digest_state,
    explain_exit_code,
    find_orphans,
)
from tests.soak.plan import KINDS, LONG_EVERY, plan_cycle

TOKENS_PER_STEP = 8
LOSSES = {step: 5.0 / step for step in range(1, 9)}


def record(step: int, **changes: Any) -> dict[str, Any]:
    begins = {"is_first_of_process": step == 1}
    return {"step": step, "loss": LOSSES[step], "tokens": step * TOKENS_PER_STEP, **begins, **changes}


def audit(folder: Path, records: Sequence[dict[str, Any]]) -> list[str]:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return [f"{finding.what}: {finding.detail}" for finding in audit_steps(path, LOSSES, TOKENS_PER_STEP)]


def test_a_run_that_goes_back_to_a_checkpoint_after_a_kill_has_lost_and_repeated_nothing(tmp_path: Path) -> None:
    again = [record(4, is_first_of_process=True), *map(record, range(5, 9))]
    assert audit(tmp_path, [record(step) for step in range(1, 9)]) == []
    assert audit(tmp_path, [*map(record, range(1, 7)), *again]) == []


def test_a_lost_a_repeated_and_another_sample_are_found_with_their_steps(tmp_path: Path) -> None:
    whole = [record(step) for step in range(1, 9)]
    assert audit(tmp_path, whole[:4] + whole[5:]) == ["samples were lost: step 6 follows step 4"]
    assert audit(tmp_path, whole[:7]) == ["samples were lost: the last step is 7, expected 8"]
    assert audit(tmp_path, whole[:5] + whole[4:]) == [
        "samples were repeated: step 5 follows step 5 in the same process"
    ]
    jump = record(7, is_first_of_process=True)
    assert audit(tmp_path, [*whole[:4], jump, whole[7]]) == ["samples were lost: step 7 follows step 4"]
    (other,) = audit(tmp_path, [*whole[:5], record(6, loss=LOSSES[5]), *whole[6:]])
    assert "step 6 has 1.0, expected 0.83" in other
    assert len(audit(tmp_path, [*whole[:5], record(6, tokens=5 * TOKENS_PER_STEP), *whole[6:]])) == 1


def test_a_compile_miss_is_found(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    warm, cold = {"graphs_compiled": 0, "new_cache_files": 0}, {"graphs_compiled": 2, "new_cache_files": 7}
    path.write_text(json.dumps(warm) + "\n", encoding="utf-8")
    assert audit_misses(path) == []
    path.write_text(f"{json.dumps(warm)}\n{json.dumps(cold)}\n", encoding="utf-8")
    [finding] = audit_misses(path)
    assert finding.detail == "2 graphs, 7 files"


def publish_state(root: Path, recipe: Recipe, change: float = 0.0) -> Path:
    """Publish a checkpoint of the recipe's model, of which one weight is greater by `change`."""
    run, file, step = "small-00000000", shard_name(0), 3
    state = make_payload(run, step)
    tensors = {
        StateSlice.whole(kind, name, shape): torch.full(tuple(shape), 0.5)
        for kind in get_args(StateKind)
        for name, shape in parameter_shapes(recipe.model).items()
    }
    next(tensor for piece, tensor in tensors.items() if "model.norm.weight" in piece.key)[7] += change

    def build(workspace: Workspace) -> Draft:
        write_shard(workspace.files, file, state.shards[file], tensors)
        write_index(workspace.files, state.shards[file], tabulate((piece, 0) for piece in tensors))
        return Draft(state, (CORPUS,))

    address = Address(root, "checkpoint", run, checkpoint_id(step))
    return publish_once(address, CheckpointManifest, "trainer", recipe, build)[0].path


def test_one_changed_weight_is_found_by_name(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    expected = digest_state(publish_state(tmp_path / "straight", recipe))
    assert audit_weights(publish_state(tmp_path / "same", recipe), expected) == []
    [finding] = audit_weights(publish_state(tmp_path / "other", recipe, change=1e-6), expected)
    assert "model.norm.weight" in finding.detail
    assert "," not in finding.detail


def test_orphans_and_damage_are_found_by_their_paths(tmp_path: Path) -> None:
    root = tmp_path / "fsx"
    folder = publish(root, make_recipe(tmp_path))[0].path
    logs = root / "run" / "small-00000000" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-00000.log").touch()
    assert find_orphans(root) == []

    orphans = [
        folder / "graphs" / "four.bin",
        folder.with_name(f"{folder.name}.0123abcd.partial"),
        logs.parent / "metrics.held.jsonl",
        root / "run" / "small-00000000.lock",
    ]
    orphans[1].mkdir()
    for path in orphans:
        if not path.is_dir():
            path.touch()
    assert sorted(finding.place for finding in find_orphans(root)) == sorted(orphans)

    for path in orphans:
        path.rmdir() if path.is_dir() else path.unlink()
    assert audit_artifacts(root) == []
    content = bytearray((folder / "graphs/two.bin").read_bytes())
    content[17] ^= 1
    (folder / "graphs/two.bin").write_bytes(content)
    [finding] = audit_artifacts(root)
    assert "graphs/two.bin" in finding.detail


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
        (-signal.SIGKILL, {"kill a worker"}, False),
    ],
)
def test_an_exit_code_has_to_be_the_documented_one_of_a_fault(
    exit_code: int, kinds: set[str], is_documented: bool
) -> None:
    assert (explain_exit_code(exit_code, kinds, was_killed=False) is None) == is_documented


def test_a_traceback_is_found(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text("training: 1/2 steps\nTraceback (most recent call last):\n  ...\nValueError: 7\n", encoding="utf-8")
    [finding] = audit_output(log)
    assert isinstance(finding, Finding)
    assert "ValueError: 7" in finding.detail
    assert str(log) in str(finding)


def test_a_cycle_follows_from_the_seed_and_cycles_have_faults_of_all_kinds_and_stages() -> None:
    cycles = [plan_cycle(7, number) for number in range(80)]
    assert cycles == [plan_cycle(7, number) for number in range(80)]
    assert cycles[0] != plan_cycle(8, 0)
    faults = [fault for cycle in cycles for fault in cycle.faults]
    assert {fault.kind for fault in faults} == {*KINDS}
    assert {fault.stage for fault in faults} == {*STAGES}
    assert {workers for cycle in cycles for workers in cycle.workers} == {1, 2, 4}
    assert {cycle.launch for cycle in cycles} == {"inline", "ray"}
    assert all(cycle.launch == "inline" for cycle in cycles[LONG_EVERY - 1 :: LONG_EVERY])
