"""Records the history of a stage: its checkpoints, good images, and the time of its slowest checkpoint.

Clients do not see the artifact root, so they read the last two from annotations of the RayCluster.
"""

from __future__ import annotations

import glob
import json
from pathlib import Path

from deploy.good_images import add_good_image, merge_histories, read_good_images, write_good_images
from k8s.objects.api import Api
from k8s.objects.names import CHECKPOINT_SECONDS, GOOD_IMAGES, stage_annotation
from k8s.objects.worker_group import WorkerGroup
from services.common.artifacts.manifest import MANIFEST
from services.common.process.telemetry import read_last_json_line

RUN_DIGEST = "[0-9a-f]" * 8
STEP_DIGITS = "[0-9]" * 8


def find_newest_checkpoints(root: Path, recipe: str) -> dict[str, int]:
    """Find the newest committed step of every run of a recipe, by the name of the run. Raises `OSError`.

    The run that a deployment continues depends on its corpus as well, so a newer step of any run counts as progress.
    """
    runs: dict[str, int] = {}
    for manifest in (root / "checkpoint").glob(f"{glob.escape(recipe)}-{RUN_DIGEST}/step-{STEP_DIGITS}/{MANIFEST}"):
        run, step = manifest.parts[-3], int(manifest.parts[-2].removeprefix("step-"))
        runs[run] = max(step, runs.get(run, 0))
    return runs


def record_good_image(api: Api, group: WorkerGroup, image: str) -> None:
    """Add the image to those with which the stage ended with exit code 0.

    Raises `OSError` or `ValueError` when it cannot be kept under the root; the annotation has it nevertheless.
    """
    images = add_good_image(group.good_images, image)
    try:
        root = Path(group.root)
        images = add_good_image(merge_histories(read_good_images(root, group.name), group.good_images), image)
        write_good_images(root, group.name, images)
    finally:
        _annotate(api, group, stage_annotation(group.name, GOOD_IMAGES), json.dumps(images))


def record_checkpoint_seconds(api: Api, group: WorkerGroup) -> None:
    """Record the slowest checkpoint of the trainer's newest run, which the next drain must exceed."""
    if group.name != "trainer":
        return
    files = sorted(Path(group.root).glob("run/*/attempts.jsonl"), key=lambda file: file.stat().st_mtime)
    last = read_last_json_line(files[-1]) if files else None
    seconds = last.get("slowest_checkpoint_seconds") if last else None
    if seconds:
        _annotate(api, group, stage_annotation(group.name, CHECKPOINT_SECONDS), f"{seconds:.1f}")


def _annotate(api: Api, group: WorkerGroup, annotation: str, text: str) -> None:
    api.merge("RayCluster", group.cluster["metadata"]["name"], {"metadata": {"annotations": {annotation: text}}})
