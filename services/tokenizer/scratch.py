"""The scratch folder of a corpus: what an interrupted command leaves for the next one."""

from __future__ import annotations

from pathlib import Path

from services.common.artifacts.corpus import Vocabulary
from services.common.artifacts.store import Workspace, discard
from services.common.recipe.schema import Recipe, fingerprint
from services.tokenizer.atomic_file import TEMPORARY_SUFFIX
from services.tokenizer.corpus_inputs import CorpusInputs
from services.tokenizer.encoding.encoder_choice import EncoderChoice

VOCABULARY = "vocabulary"
"""Name of the vocabulary's file in scratch. In the corpus its name is `Vocabulary.path`."""
VOCABULARY_MARKER = "vocabulary.json"
"""Name of the marker in scratch that has the checksum of the vocabulary's file."""


def plan_folder_of(workspace: Workspace, recipe: Recipe, inputs: CorpusInputs) -> Path:
    """Return the folder of the plan. Its name follows from all that the plan is made from."""
    uris = [source.uri for source in recipe.corpus.sources]
    listed = [[uri, listing.digest] for uri, listing in zip(uris, inputs.listings, strict=True)]
    key = fingerprint([listed, recipe.corpus.split_bytes, recipe.corpus.max_document_bytes])
    return workspace.scratch / f"plan-{key[:16]}"


def open_partition_folder(workspace: Workspace, plan: Path, vocabulary: Vocabulary, encoder: EncoderChoice) -> Path:
    """Return the folder for the encoded partitions, and discard what no task of this command can use.

    The folder's name follows from the plan, the vocabulary and the encoder. So two commands that share a folder write
    the same bytes to each of its files, and a command that was frozen cannot change another command's results. Folders
    of other names are discarded, and so are temporary files of killed writers. Both are listed before the lease is
    checked: a newer holder of the lease may have added folders since, which are not in the list.
    """
    folder = workspace.scratch / fingerprint([plan.name, vocabulary.sha256, encoder])[:16]
    kept = {folder, plan, workspace.scratch / VOCABULARY, workspace.scratch / VOCABULARY_MARKER}
    stale = [path for path in workspace.scratch.iterdir() if path not in kept]
    for path in [*stale, *folder.glob(f"*/*{TEMPORARY_SUFFIX}")]:
        discard(path, workspace.lease)
    folder.mkdir(exist_ok=True)
    return folder
