"""A run's newest checkpoint as a model of transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from services.trainer.conversion.configuration import Dtype
from services.trainer.conversion.export import export
from services.trainer.runs.run import open_run


def load_checkpoint(run: str, root: str | Path = "fsx", dtype: Dtype = "float32") -> tuple[Any, Any]:
    """Return the model of the run's newest intact checkpoint, and its tokenizer.

    `run` is a name or a unique prefix, as `millrace runs` lists them. The export passes through TMPDIR, which needs
    room for the weights in `dtype`; `millrace export` keeps it. Raises `ArtifactError` for damage and where there is
    no checkpoint yet, `RecipeError` for an unknown run.
    """
    root = Path(root).absolute()
    opened = open_run(root, run)
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        exported = export(opened, Path(folder) / opened.name, dtype=dtype)
        model = AutoModelForCausalLM.from_pretrained(exported)  # nosec B615 # a folder of this machine
        return model, AutoTokenizer.from_pretrained(exported)  # nosec B615
