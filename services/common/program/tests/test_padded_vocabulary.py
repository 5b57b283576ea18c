"""A vocabulary that its workers cannot share evenly, or that has more rows than ids, trains as one without padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.common.program.initial_weights import VOCABULARY_WEIGHTS
from services.common.program.mesh import Mesh
from services.common.program.state import StateSlice
from services.common.program.tests import work
from services.common.program.transformer import parameter_shapes
from services.common.testing.recipes import make_recipe


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, work.Trained]]:
    """Results of 4 workers."""
    if torch.__version__ < "2.10":
        pytest.skip("the heap of a worker is damaged in one of five runs over torch 2.9's gloo")
    return work.run_on_workers(work.train_odd_vocabularies, work.WORKERS, tmp_path_factory.mktemp("workers"))


@pytest.fixture(scope="module", params=work.ODD_VOCABULARIES)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, work.Trained]:
    """A vocabulary, and the results of one worker that trains with it."""
    folder, overrides = tmp_path_factory.mktemp("alone"), work.ODD_VOCABULARIES[request.param]
    return request.param, work.train_on(Mesh(0, data_parallel_size=1), folder, work.MANY_STEPS, **overrides)


@pytest.mark.parametrize("shares", work.SPLIT_MESHES)
def test_workers_that_share_an_odd_vocabulary_train_as_one(
    tmp_path: Path, together: list[dict[str, work.Trained]], alone: tuple[str, work.Trained], shares: str
) -> None:
    vocabulary, expected = alone
    found = [results[f"{vocabulary}, {shares}"] for results in together]

    assert all(each["numbers"] == found[0]["numbers"] for each in found)
    for name, numbers in expected["numbers"].items():
        # 3.1e-6 between a worker and four of them after six steps on a processor with AVX-512.
        assert found[0]["numbers"][name] == pytest.approx(numbers, rel=5e-6, abs=0), name
    shapes = parameter_shapes(make_recipe(tmp_path, **work.PARALLEL, **work.ODD_VOCABULARIES[vocabulary]).model)
    for whole, tensor in work.assemble(found, shapes).items():  # no checkpoint has the workers' padding
        torch.testing.assert_close(tensor.flatten(), expected["state"][whole.key], rtol=0, atol=5e-5)


@pytest.mark.parametrize("changes", [{"model__tie_word_embeddings": "true"}, work.WITH_ROUNDED_WEIGHTS])
def test_rows_of_padding_change_no_loss_and_stay_zero(tmp_path: Path, changes: dict[str, str]) -> None:
    mesh = Mesh(0, data_parallel_size=1)
    plain = work.train_on(mesh, tmp_path, work.MANY_STEPS, **changes)
    padded = work.train_on(mesh, tmp_path, work.MANY_STEPS, model__padded_vocab_size="310", **changes)

    assert padded["numbers"]["loss"][0] == plain["numbers"]["loss"][0]
    tolerance = 1e-6 if "train__dtype" not in changes else 1e-4  # blocks of the gradient's norm have other bounds
    for name, numbers in plain["numbers"].items():
        assert padded["numbers"][name] == pytest.approx(numbers, rel=tolerance, abs=0), name
    pieces = {StateSlice.parse(key): tensor for key, tensor in padded["state"].items()}
    rows = [tensor.view(310, -1)[300:] for piece, tensor in pieces.items() if piece.name in VOCABULARY_WEIGHTS]
    assert len(rows) == (3 if "model__tie_word_embeddings" in changes else 6)
    assert not any(each.any() for each in rows)
