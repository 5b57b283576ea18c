"""Flips a bit of an artifact in a copy of a root, and checks that the commands find it and name the place."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from services.common.artifacts.corpus import CorpusManifest, shard_path
from services.common.errors import ArtifactError
from services.trainer.data import sample_indices
from tests.soak.audit import Finding, call_artifacts
from tests.soak.plan import SHORT_STEPS, Copied, Cycle

FILES: dict[Copied, str] = {  # of a corpus row see `_find_row_of_first_step`
    "the vocabulary": "corpus/*/*/tokenizer/*",
    "the compile cache": "compile_cache/*/*/graphs/**/*.so",
    "a checkpoint": "checkpoint/*/*/*.safetensors",
}
READ_BY_TRAINER: tuple[Copied, ...] = ("a corpus row", "the compile cache")
OTHER_SEED = 99
"""Value of `train.seed` of a run that has no checkpoint yet, and so reads the corpus and the cache."""


@dataclass(frozen=True)
class CopyCheck:
    """The answers of commands about a copy with a flipped bit."""

    copied: Copied
    outcome: str
    findings: Sequence[Finding]


def check_copy(root: Path, copy: Path, copied: Copied, cycle: Cycle, call: Callable[..., tuple[int, str]]) -> CopyCheck:
    """Copy the root, flip a bit there, and run `verify`, and a training where that reads the file."""
    shutil.copytree(root, copy)
    try:
        chance = random.Random(f"{cycle.number} {copied}")
        if copied == "a corpus row":
            path, within = _find_row_of_first_step(copy)
        else:
            path, within = chance.choice(sorted(copy.glob(FILES[copied]))), None
        _flip(path, chance, within)
        answers = {"verify": call_artifacts("verify", copy)}
        if copied in READ_BY_TRAINER:
            new_run = (
                "--root",
                str(copy),
                f"--train.seed={OTHER_SEED}",
                "--launch=inline",
                f"--train.max_steps={SHORT_STEPS}",
            )
            answers["trainer"] = call("trainer", *new_run)
        wanted = ArtifactError.exit_code
        findings = [
            Finding(
                f"{command} does not name the damage",
                f"exit code {code}, expected {wanted} and {path.name}: {text}",
                path,
            )
            for command, (code, text) in answers.items()
            if code != wanted or path.name not in text
        ]
        return CopyCheck(copied, f"exit code {wanted} of {' and '.join(answers)}, file named", findings)
    finally:
        shutil.rmtree(copy)


def _find_row_of_first_step(root: Path) -> tuple[Path, tuple[int, int]]:
    """Return the shard with a row that the first step of a training uses, and the place of the row's ids in the file:
    their first byte and their number of bytes.
    """
    [folder] = [path.parent for path in root.glob("corpus/*/*/manifest.json")]
    manifest = CorpusManifest.read(folder)
    payload = manifest.corpus
    [row] = sample_indices(payload.num_samples("train"), manifest.recipe["train"]["data_seed"], 0, 1).tolist()
    shard, at = divmod(row, payload.rows_per_shard)
    path = folder / shard_path("train", shard)
    with pa.ipc.open_file(str(path)) as reader:
        ids = reader.get_batch(0).column("input_ids")[at].values.to_numpy().tobytes()
    return path, (path.read_bytes().index(ids), len(ids))


def _flip(path: Path, chance: random.Random, within: tuple[int, int] | None) -> None:
    content = bytearray(path.read_bytes())
    first, count = within or (0, len(content))
    content[first + chance.randrange(count)] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
