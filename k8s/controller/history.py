"""What an attempt leaves: checkpoints, and for the next deployment annotations of the RayCluster."""

from __future__ import annotations

import glob
import json
from pathlib import Path

from k8s.objects.api import Api
from k8s.objects.names import checkpoint_annotation, good_images_annotation
from k8s.objects.placement import pods_of
from k8s.objects.worker_group import Stage
from services.common.artifacts.manifest import MANIFEST
from services.common.telemetry import read_last_json_line

GOOD_IMAGES_KEPT = 5
RUN_DIGEST = "[0-9a-f]" * 8
STEP_DIGITS = "[0-9]" * 8


def newest_checkpoints(root: Path, recipe: str) -> dict[str, int]:
    """The newest committed step of each run of a recipe, by the run's name. Raises `OSError`.

    Which of them a deployment continues follows from its corpus, too, so progress is that any of them has grown.
    """
    runs: dict[str, int] = {}
    for manifest in (root / "checkpoint").glob(f"{glob.escape(recipe)}-{RUN_DIGEST}/step-{STEP_DIGITS}/{MANIFEST}"):
        run, step = manifest.parts[-3], int(manifest.parts[-2].removeprefix("step-"))
        runs[run] = max(step, runs.get(run, 0))
    return runs


def remember_good_image(api: Api, stage: Stage, image: str) -> None:
    """Add the image to those with which the stage ended well, by digest where it has one."""
    image = image if "@sha256:" in image else _digest_of_pods(api, stage) or image
    known = stage.good_images
    digests = [each.rpartition("@")[2] for each in known]
    if image.rpartition("@")[2] not in digests:  # one that was rolled back to keeps its place in the order
        _annotate(api, stage, good_images_annotation(stage.name), json.dumps([*known, image][-GOOD_IMAGES_KEPT:]))


def remember_checkpoint_seconds(api: Api, stage: Stage) -> None:
    """What the newest run of the root measured: the next drain must be longer. The trainer alone has runs."""
    if stage.name != "trainer":
        return
    files = sorted(Path(stage.root).glob("run/*/attempts.jsonl"), key=lambda file: file.stat().st_mtime)
    last = read_last_json_line(files[-1]) if files else None
    if last and last.get("slowest_checkpoint_seconds"):
        _annotate(api, stage, checkpoint_annotation(stage.name), f"{last['slowest_checkpoint_seconds']:.1f}")


def _digest_of_pods(api: Api, stage: Stage) -> str:
    """The digest that the pods really ran; a tag may have moved."""
    pods = pods_of(api, stage.name)
    found = [status["imageID"] for pod in pods for status in pod.get("status", {}).get("containerStatuses") or []]
    return next((image for image in found if "@sha256:" in image), "")


def _annotate(api: Api, stage: Stage, annotation: str, text: str) -> None:
    api.merge("RayCluster", stage.cluster["metadata"]["name"], {"metadata": {"annotations": {annotation: text}}})
