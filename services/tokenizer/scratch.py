"""The scratch folder of a corpus: what an interrupted command leaves for the next one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from services.common.artifacts.corpus import Vocabulary
from services.common.artifacts.manifest import write_durably
from services.common.artifacts.store import Workspace, discard
from services.common.recipe.schema import fingerprint
from services.tokenizer.atomic_file import TEMPORARY_SUFFIX
from services.tokenizer.corpus_plan import CorpusPlan
from services.tokenizer.encoding.encoder_choice import EncoderChoice

PLAN = "plan.json"
VOCABULARY = "vocabulary"
"""Name of the vocabulary's file in scratch. In the corpus its name is `Vocabulary.path`."""


def open_partition_folder(
    workspace: Workspace, plan: CorpusPlan, vocabulary: Vocabulary, encoder: EncoderChoice
) -> Path:
    """Return the folder for the encoded partitions, and discard what no task of this command can use.

    The folder's name follows from the partitions, the vocabulary and the encoder. So two commands that share a folder
    write the same bytes to each of its files, and a command that was frozen cannot change another command's results.
    Folders of other names are discarded, and so are temporary files of killed writers. Both are listed before the
    lease is checked: a newer holder of the lease may have added folders since, which are not in the list.
    """
    partitions = [dataclasses.asdict(partition) for partition in plan.partitions]
    folder = workspace.scratch / fingerprint([partitions, vocabulary.sha256, encoder])[:16]
    kept = {folder, workspace.scratch / VOCABULARY}
    stale = [path for path in workspace.scratch.iterdir() if path not in kept]
    for path in [*stale, *folder.glob(f"*{TEMPORARY_SUFFIX}")]:
        discard(path, workspace.lease)
    folder.mkdir(exist_ok=True)
    if not (folder / PLAN).exists():
        write_durably(folder / PLAN, json.dumps(partitions, indent=1).encode())
    return folder
