"""Computes the losses of a validation split independently: tokens by pyarrow alone, logits by transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from services.common.program.process_group import ProcessGroup
from services.common.testing.recipes import load_with
from services.trainer.checkpoints.loader import load_weights
from services.trainer.checkpoints.lookup import choose_checkpoint
from services.trainer.conversion.export import export
from services.trainer.evaluation.losses import Evaluation
from services.trainer.evaluation.validation import Validation
from services.trainer.job import Job, RunCorpus
from services.trainer.runs.run import open_run
from services.trainer.tests.builders import make_program, write_recipe


def read_split(corpus: Path) -> tuple[Tensor, list[int]]:
    """Return the tokens of the validation split, and the positions at which its documents begin."""
    tokens: list[int] = []
    begins: list[int] = []
    for path in [*sorted((corpus / "validation").glob("*.arrow")), corpus / "validation" / "tail" / "tail.arrow"]:
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_file(file).read_all().to_pydict()
        for row, starts in zip(table["input_ids"], table["doc_starts"], strict=True):
            begins += [len(tokens) + start for start in starts]
            tokens += row
    return torch.tensor(tokens), begins


def target_losses(job: Job, folder: Path, *, within_documents: bool = False) -> npt.NDArray[np.float64]:
    """Return the losses of the split's targets, by the model that the run exports to `folder`: entry p - 1 is that of
    the token at position p.

    A context begins at each row, and with `within_documents` at each document, too.
    """
    import transformers  # noqa: PLC0415 - takes seconds

    model = transformers.AutoModelForCausalLM.from_pretrained(export(open_run(job.root, job.run), folder))
    tokens, begins = read_split(job.corpus.path)
    contexts = [*range(0, len(tokens) - 1, job.recipe.corpus.sequence_length)]
    contexts = sorted({*contexts, *(begins if within_documents else ())} - {len(tokens) - 1})
    losses = []
    for first, end in zip(contexts, [*contexts[1:], len(tokens) - 1], strict=True):
        with torch.no_grad():
            logits = model(tokens[None, first:end]).logits[0].double()
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[first + 1 : end + 1], reduction="none"))
    return np.asarray(torch.cat(losses))


def evaluate_here(job: Job, corpus: RunCorpus | None = None, tokens: int | None = None, **overrides: str) -> Evaluation:
    """Evaluate the newest checkpoint of the run in this process, with another recipe than the run's."""
    recipe = load_with(write_recipe(job.root.parent), **overrides)
    program = make_program(recipe)
    load_weights(job, program, ProcessGroup(0, 1), lambda: choose_checkpoint(job.checkpoint_collection, None))
    evaluation = Validation(recipe, corpus or job.corpus, tokens).evaluate(program)
    assert evaluation
    return evaluation
