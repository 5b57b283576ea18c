"""Files that cannot be opened or mapped for want of a limit are intact: the limit is named, the exit code 4."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.trainer.conversion.export import export
from services.trainer.conversion.nxd.layout import NxdLayout
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.run import open_run
from services.trainer.tests.builders import write_recipe
from services.trainer.tests.runs import REPOSITORY
from services.trainer.tests.test_import import ALONE

# Does each work once as it is, so that everything is imported, and then again with a limit that leaves no room at all.
_PROGRAM = """
import json, mmap, os, resource, sys
from pathlib import Path

from services.common.artifacts.__main__ import main as artifacts
from services.common.artifacts.checkpoint import CheckpointManifest
from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import open_artifact
from services.common.artifacts.token_stream import TokenStream
from services.common.process.entry_point import exit_code_of
from services.common.program.llama import parameter_shapes
from services.common.recipe.file import load_recipe
from services.trainer.conversion.hugging_face import open_weights
from services.trainer.conversion.nxd.checkpoint import NxdWeights
from services.trainer.checkpoints.shards import ShardReader

limit, corpus, checkpoint, whole, nxd, recipe_file = sys.argv[1], *map(Path, sys.argv[2:])
recipe = load_recipe(recipe_file)
model = recipe.model
shapes = parameter_shapes(model)
opened, state = open_artifact(corpus, CorpusManifest), open_artifact(checkpoint, CheckpointManifest)

def read_weights():
    with open_weights(whole, shapes) as read:
        read("model.norm.weight")

works = {
    "verify": lambda: artifacts(["verify", str(corpus)]),
    "verify checkpoint": lambda: artifacts(["verify", str(checkpoint)]),
    "tokens": lambda: len(TokenStream(corpus, opened.manifest.corpus, "train").read([0])) - 1,
    "shards": lambda: bool(ShardReader(state, shapes)) - 1,
    "hugging face": lambda: read_weights() or 0,
    "nxd": lambda: bool(NxdWeights(nxd, model)) - 1,
    "recipe": lambda: bool(load_recipe(recipe_file)) - 1,
}
before = {name: exit_code_of(work) for name, work in works.items()}

held = []
if limit == "vm.max_map_count":
    try:
        while True:
            held.append(mmap.mmap(-1, mmap.PAGESIZE))
    except OSError:
        pass
elif limit == "RLIMIT_NOFILE":
    most = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
else:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE, resource.getrlimit(resource.RLIMIT_AS)[1]))
after = {name: exit_code_of(work) for name, work in works.items()}
held.clear()
resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
print(json.dumps([before, after]))
"""


@pytest.fixture(scope="module")
def trained(new_shared_job: Callable[..., Job]) -> list[str]:
    """Make the inputs that the program reads: a corpus, a checkpoint, two exports of it, and the recipe."""
    job = new_shared_job(train__max_steps="1")
    train(job, ALONE)
    run = open_run(job.root, job.run)
    exports = [export(run, job.root / "whole"), export(run, job.root / "nxd", NxdLayout(1))]
    return [str(path) for path in (job.corpus.path, run.checkpoint.path, *exports, write_recipe(job.root.parent))]


@pytest.mark.parametrize(
    ("limit", "advice", "refused"),
    [
        ("RLIMIT_NOFILE", "ulimit -n", {"verify", "tokens", "shards", "hugging face", "nxd", "recipe"}),
        pytest.param("RLIMIT_AS", "ulimit -v", {"tokens", "shards", "hugging face", "nxd"}, marks=pytest.mark.slow),
        pytest.param(
            "vm.max_map_count",
            "sysctl -w vm.max_map_count=",
            {"tokens", "shards", "hugging face", "nxd"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_limit_keeps_from_being_opened_is_not_called_damaged(
    trained: list[str], limit: str, advice: str, refused: set[str]
) -> None:
    most = Path("/proc/sys/vm/max_map_count")
    if not most.exists() or int(most.read_text(encoding="ascii")) > 2**18:
        pytest.skip("needs Linux, and a vm.max_map_count that can be used up in a second")

    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, limit, *trained],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert set(before.values()) == {0}
    assert set(after.values()) <= {0, 4}, after
    assert {name for name, code in after.items() if code == 4} >= refused
    assert advice in done.stderr
    assert limit in done.stderr
    assert "amaged" not in done.stderr
    assert "DAMAGED" not in done.stdout
