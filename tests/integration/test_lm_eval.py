"""lm-evaluation-harness gives an exported model the bits per byte that its run reported.

`make test-slow PEER=lm-eval` installs the harness into a folder of its own, which LM_EVAL names.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.common.artifacts.corpus import CorpusManifest
from services.common.artifacts.store import Artifact, open_artifact
from services.common.testing import fork_server
from services.common.testing.recipes import write_recipe
from services.common.vocabularies.codec import load_codec
from services.trainer.conversion.tokenizer import sample_documents
from services.trainer.evaluation.records import read_evaluations
from services.trainer.runs.run import vocabulary_file
from tests.command import call

FOLDER_VARIABLE = "LM_EVAL"
TASK = {
    "task": "validation",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}


@pytest.fixture(scope="module")
def lm_eval() -> Any:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        pytest.skip("lm_eval is not installed: run make test-slow PEER=lm-eval")
    sys.path.append(str(Path(folder).absolute()))
    import lm_eval  # type: ignore[import-not-found] # noqa: PLC0415

    return lm_eval


def write_text_and_recipe(folder: Path) -> Path:
    """Write a recipe whose validation split fits into one row, where `block_causal` shows each document alone."""
    (folder / "text").mkdir()
    for number in range(200):
        text = f"Note {number}: entry {number * 7} follows </s>  entry {number * 3}.\nIt is as naïve as {number + 1}."
        (folder / "text" / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return write_recipe(
        folder,
        corpus__sequence_length=2048,
        corpus__validation_fraction=0.1,
        corpus__sources=[{"uri": str(folder / "text")}],
        tokenizer__train__vocab_size=340,
        tokenizer__encoder="reference",
        model__vocab_size=340,
        model__num_key_value_heads=2,
        batch__micro_batch_size=1,
        batch__global_batch_size=1,
        optimizer__decay_steps=40,
        train__max_steps=40,
        train__attention_mask="block_causal",
    )


def write_task(folder: Path, corpus: Artifact[CorpusManifest]) -> Path:
    """Write the harness's task, whose documents are the validation documents of the corpus."""
    payload = corpus.manifest.corpus
    codec = load_codec(vocabulary_file(corpus), payload.vocabulary)
    documents = [codec.decode(ids[1:-1].tolist()) for ids in sample_documents(corpus, "validation", 10**9)]
    assert len(documents) == payload.splits["validation"].documents > 5
    assert payload.splits["validation"].tokens <= payload.sequence_length
    task = folder / "task"
    task.mkdir()
    (task / "documents.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    described = TASK | {"dataset_kwargs": {"data_files": {"test": str(task / "documents.json")}}}
    (task / "validation.yaml").write_text(json.dumps(described))  # JSON is YAML
    return task


def test_the_harness_gets_the_bits_per_byte_of_the_run(
    lm_eval: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, root = write_text_and_recipe(tmp_path), tmp_path / "fsx"
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def run(stage: str, *arguments: str) -> None:
        done = call(capfd, f"services.{stage}.__main__", *arguments, "--root", str(root))
        assert done.returncode == 0, done.stderr

    with fork_server.forking_workers():
        run("tokenizer", "--recipe", str(recipe))
        run("trainer", "train", "--recipe", str(recipe), "--allow-cold-compile", "--compile.enabled=false")
        [run_folder] = [path.parent for path in root.glob("run/*/run.json")]
        run("trainer", "export", run_folder.name, "--output", str(tmp_path / "exported"))
    [corpus] = [open_artifact(path.parent, CorpusManifest) for path in root.glob("corpus/*/*/manifest.json")]
    reported = read_evaluations(run_folder)[-1]

    found = score(lm_eval.simple_evaluate, tmp_path / "exported", write_task(tmp_path, corpus))

    assert reported["step"] == 40
    assert found == pytest.approx(reported["bits_per_byte"], rel=1e-5)


def score(evaluate: Callable[..., Any], model: Path, task: Path) -> float:
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found] # noqa: PLC0415

    results = evaluate(
        model="hf",
        # The harness puts BOS before a text itself; with the tokenizer's there would be two.
        model_args={"pretrained": str(model), "dtype": "float32", "add_bos_token": False},
        tasks=[TASK["task"]],
        task_manager=TaskManager(include_path=str(task), include_defaults=False),
        device="cpu",
        batch_size=1,
        bootstrap_iters=0,
    )
    return float(results["results"][TASK["task"]]["bits_per_byte,none"])
