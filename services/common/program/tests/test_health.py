"""Health measurements of sharded models are those of an unsharded model in plain torch, and change nothing."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.common.program.buckets import make_buckets
from services.common.program.health import name_groups
from services.common.program.mesh import Mesh
from services.common.program.optimizer import learning_rate
from services.common.program.tests import work
from services.common.program.tests.work import Measured
from services.common.program.transformer import Transformer
from services.common.recipe.schema import Recipe
from services.common.testing.models import initialize
from services.common.testing.recipes import make_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("health")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Measured]:
    """Results of one worker, with each of the models."""
    return {
        name: work.measure_health_on(Mesh(0, data_parallel_size=1), folder, **overrides)
        for name, overrides in work.HEALTH_MODELS.items()
    }


@pytest.fixture(scope="module")
def together(folder: Path) -> list[dict[str, Measured]]:
    """Results of two workers, by model and layout."""
    return work.run_on_workers(work.measure_health_on_all, 2, folder)


def group_of(name: str, num_layers: int) -> str:
    if name.endswith(("norm.weight", "layernorm.weight")):
        return "norms"
    if "layers." not in name:
        return "head" if name.startswith("lm_head") else "embedding"
    layer = int(name.split(".")[2])
    assert num_layers == 2
    return f"layers {layer}-{layer}"


def measure_in_plain_torch(recipe: Recipe) -> dict[str, float | dict[str, float]]:
    """Train by torch's AdamW and clip, and measure the last step by differences of weights."""
    model, settings = Transformer(recipe.model, recipe.corpus.sequence_length), recipe.optimizer
    initialize(model, recipe.model, recipe.train.seed)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )
    seen: list[Tensor] = []
    model.model.norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].detach()))
    for step in range(work.HEALTH_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        tokens_NBS = work.tokens_of(recipe, step)
        optimizer.zero_grad()
        for tokens_BS in tokens_NBS:
            logits_TV = model.logits(tokens_BS[:, :-1]).flatten(0, 1)
            (F.cross_entropy(logits_TV, tokens_BS[:, 1:].flatten()) / len(tokens_NBS)).backward()
        squares = {name: float(p.grad.square().sum()) for name, p in parameters.items() if p.grad is not None}
        before = {name: p.detach().clone() for name, p in parameters.items()}
        torch.nn.utils.clip_grad_norm_(parameters.values(), settings.max_grad_norm)
        optimizer.step()
    seen.clear()
    with torch.no_grad():
        largest = max(float(model.logits(tokens_BS[:, :-1]).max()) for tokens_BS in tokens_NBS)
    sums: dict[str, dict[str, float]] = {kind: defaultdict(float) for kind in ("gradient", "update", "weight")}
    for name, parameter in parameters.items():
        group_name = group_of(name, recipe.model.num_hidden_layers)
        sums["gradient"][group_name] += squares[name]
        sums["update"][group_name] += float((parameter.detach() - before[name]).square().sum())
        sums["weight"][group_name] += float(before[name].square().sum())
    return {
        "gradient_norms": {name: math.sqrt(each) for name, each in sums["gradient"].items()},
        "update_ratios": {name: math.sqrt(each / sums["weight"][name]) for name, each in sums["update"].items()},
        "largest_logit": largest,
        "activation_rms": math.sqrt(sum(float(each.square().mean()) for each in seen) / len(seen)),
    }


@pytest.mark.parametrize("model", ["plain", "one key-value head, 301 ids"])
def test_the_numbers_are_those_of_a_whole_model_in_plain_torch(
    folder: Path, alone: dict[str, Measured], together: list[dict[str, Measured]], model: str
) -> None:
    """Two tensor-parallel workers of a model with one key-value head both hold its weights, which count once."""
    expected = measure_in_plain_torch(make_recipe(folder, **work.HEALTH_MODELS[model]))
    layouts = [alone[model], *(results[f"{model}, {layout}"] for results in together for layout in work.HEALTH_LAYOUTS)]
    for health, _ in layouts:
        for name, value in expected.items():
            assert health[name] == pytest.approx(value, rel=2e-5), name


@pytest.mark.parametrize("model", work.HEALTH_MODELS)
def test_the_numbers_have_the_same_bits_for_one_and_two_model_replicas_and_change_no_bit(
    folder: Path, alone: dict[str, Measured], together: list[dict[str, Measured]], model: str
) -> None:
    for results in together:
        for layout in ("data 2", "data 2, ZeRO-1"):
            assert results[f"{model}, {layout}"] == alone[model], layout
    mesh = Mesh(0, data_parallel_size=1)
    assert work.measure_health_on(mesh, folder, False, **work.HEALTH_MODELS[model])[1] == alone[model][1]


@pytest.mark.parametrize(
    ("num_layers", "groups"),
    [
        (1, ["layers 0-0"]),
        (6, ["layers 0-1", "layers 2-2", "layers 3-4", "layers 5-5"]),
        (126, ["layers 000-031", "layers 032-062", "layers 063-094", "layers 095-125"]),
    ],
)
def test_layers_form_at_most_four_groups_that_hold_each_layer_once(
    folder: Path, num_layers: int, groups: list[str]
) -> None:
    for is_tied in ("false", "true"):
        recipe = make_recipe(folder, model__num_hidden_layers=str(num_layers), model__tie_word_embeddings=is_tied)
        with torch.device("meta"):
            model = Transformer(recipe.model, recipe.corpus.sequence_length)
        buckets = make_buckets(dict(model.named_parameters()), model.shardings(), 1)
        names = name_groups(buckets, num_layers)
        assert list(dict.fromkeys(names)) == ["embedding", *groups, *["head"] * (is_tied == "false"), "norms"]
        for name in groups:
            first, last = map(int, name.split()[1].split("-"))
            assert names.count(name) == last - first + 1
