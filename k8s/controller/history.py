"""The history of a stage as its attempts leave it: checkpoints, images with which it ended well, and the time of the
slowest checkpoint. Clients, which do not see the artifact root, read the last two from annotations of the RayCluster.
"""

from __future__ import annotations

import glob
import json
from pathlib import Path

from deploy.history import add_good_image, merge_histories, read_good_images, write_good_images
from k8s.objects.api import Api
from k8s.objects.names import checkpoint_annotation, good_images_annotation
from k8s.objects.placement import pods_of
from k8s.objects.worker_group import WorkerGroup
from services.common.artifacts.manifest import MANIFEST
from services.common.process.telemetry import read_last_json_line

RUN_DIGEST = "[0-9a-f]" * 8
STEP_DIGITS = "[0-9]" * 8
MAX_CHECKPOINT_SECONDS = 86_400.0
"""A run's file that says more of its slowest checkpoint is damaged, and no drain waits for so long."""


def find_newest_checkpoints(root: Path, recipe: str) -> dict[str, int]:
    """The newest committed step of each run of a recipe, by the run's name. Raises `OSError`.

    Which of them a deployment continues follows from its corpus, too, so progress is that any of them has grown.
    """
    runs: dict[str, int] = {}
    for manifest in (root / "checkpoint").glob(f"{glob.escape(recipe)}-{RUN_DIGEST}/step-{STEP_DIGITS}/{MANIFEST}"):
        run, step = manifest.parts[-3], int(manifest.parts[-2].removeprefix("step-"))
        runs[run] = max(step, runs.get(run, 0))
    return runs


def record_good_image(api: Api, group: WorkerGroup, image: str) -> None:
    """Add the image to those with which the stage ended well, by digest where it has one.

    Raises `OSError` or `ValueError` where the root cannot keep it; the annotation has it all the same.
    """
    image = image if "@sha256:" in image else _digest_of_pods(api, group) or image
    root = Path(group.root)
    try:
        kept = read_good_images(root, group.name)
    except (OSError, ValueError):
        _annotate_good_images(api, group, add_good_image(group.good_images, image))
        raise
    images = add_good_image(merge_histories(kept, group.good_images), image)
    _annotate_good_images(api, group, images)
    if images != kept:
        write_good_images(root, group.name, images)


def _annotate_good_images(api: Api, group: WorkerGroup, images: list[str]) -> None:
    if images != group.good_images:
        _annotate(api, group, good_images_annotation(group.name), json.dumps(images))


def record_checkpoint_seconds(api: Api, group: WorkerGroup) -> None:
    """What the newest run of the root measured: the next drain must be longer. The trainer alone has runs."""
    if group.name != "trainer":
        return
    files = sorted(Path(group.root).glob("run/*/attempts.jsonl"), key=lambda file: file.stat().st_mtime)
    last = read_last_json_line(files[-1]) if files else None
    seconds = last.get("slowest_checkpoint_seconds") if last else None
    if isinstance(seconds, int | float) and 0 < seconds <= MAX_CHECKPOINT_SECONDS:
        _annotate(api, group, checkpoint_annotation(group.name), f"{seconds:.1f}")


def _digest_of_pods(api: Api, group: WorkerGroup) -> str:
    """The digest that the pods really ran; a tag may have moved."""
    pods = pods_of(api, group.name)
    found = [status["imageID"] for pod in pods for status in pod.get("status", {}).get("containerStatuses") or []]
    return next((image for image in found if "@sha256:" in image), "")


def _annotate(api: Api, group: WorkerGroup, annotation: str, text: str) -> None:
    api.merge("RayCluster", group.cluster["metadata"]["name"], {"metadata": {"annotations": {annotation: text}}})
