"""The task of a worker before any text is read: it cuts the files of one block into file ranges.

To cut a file, a task opens the file and reads a footer or a first line; text and the documentation of Python are cut by
their sizes. The result is kept in the plan's folder: when a command is repeated, no file of the block is opened again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.tokenizer.plan_folder import RANGE, PlanFolder
from services.tokenizer.sources.documents import cut_file, require_column
from services.tokenizer.sources.input_files import BLOCK_FILES


@dataclass(frozen=True)
class CutTask:
    """The input of `cut_block`, which is sent to a worker process."""

    plan: Path
    block: int
    split_bytes: int
    max_document_bytes: int
    requires_column: bool
    """Whether one of the files must have the source's column. The last files of many may be parts of nulls alone."""


def cut_block(task: CutTask) -> None:
    """Run the task, unless its result is there. Two processes that run the same task write the same bytes."""
    folder = PlanFolder(task.plan)
    if folder.read_cut(task.block) is not None:
        return
    files = folder.read_block(task.block)
    if task.requires_column:
        require_column(files, task.max_document_bytes)
    cut = [
        (BLOCK_FILES * task.block + row, file_range.begin, file_range.end, file_range.bytes)
        for row, file in enumerate(files)
        for file_range in cut_file(file, task.split_bytes)
    ]
    folder.write_cut(task.block, np.array(cut, RANGE))
