"""Runs that continue one of NxD, and checkpoints for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from services.common.errors import ArtifactError, RecipeError
from services.common.launch.launcher import WorkerEnvironment
from services.common.program.llama import parameter_shapes
from services.common.recipe.schema import Model
from services.trainer.conversion.export import export
from services.trainer.conversion.nxd.checkpoint import NxdWeights, write_nxd_model
from services.trainer.conversion.nxd.layout import NxdLayout
from services.trainer.conversion.weight_import import digest_weights
from services.trainer.inspection.sample import load_weights
from services.trainer.job import Job
from services.trainer.loop import train
from services.trainer.run import open_run
from services.trainer.tests.builders import write_recipe
from services.trainer.tests.runs import call_trainer, checkpoints, train_alone

RANK_0, RANK_3 = "dp_rank_00_tp_rank_00_pp_rank_00.pt", "dp_rank_00_tp_rank_03_pp_rank_00.pt"
MASTERS = "sharded_master_weights"
ALONE = WorkerEnvironment(rank=0, world_size=1, launch="inline")
Weights = dict[str, Tensor]
Files = dict[str, Weights]
"""What the files in a checkpoint's `model` hold, by their names."""


def llama(num_key_value_heads: int = 2, **changes: Any) -> Model:
    values = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 12, "num_hidden_layers": 2}
    return Model(**values | {"num_attention_heads": 8, "num_key_value_heads": num_key_value_heads} | changes)


def draw_weights(model: Model) -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(model).items()}


def describe_files(model: Model, weights: Weights, layout: NxdLayout, num_stages: int = 1) -> Files:
    """As NxD's modules hold the weights, written down rank by rank and head by head."""
    size, copies = layout.tensor_parallel_size, layout.kv_size_multiplier
    heads, key_value_heads, head_dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    group = heads // key_value_heads // copies  # query heads that look at one copy of a key-value head
    files: Files = {}
    for rank in range(size):

        def rows(name: str, dim: int = 0, rank: int = rank) -> Tensor:
            length = weights[name].shape[dim] // size
            return weights[name].narrow(dim, rank * length, length).clone()

        per_rank = key_value_heads * copies // size
        held = [(number % key_value_heads, number // key_value_heads) for number in range(key_value_heads * copies)]
        mine = held[rank * per_rank : (rank + 1) * per_rank]  # which head, and which copy of it
        queries = [(head * copies + copy) * group + number for head, copy in mine for number in range(group)]

        def pick(name: str, numbers: list[int], dim: int = 0) -> Tensor:
            each = weights[name].split(head_dim, dim)
            return torch.cat([each[number] for number in numbers], dim)

        for stage in range(num_stages):
            state: Weights = {}
            if stage == 0:
                state["model.embed_tokens.weight"] = rows("model.embed_tokens.weight")
            for number in range(model.num_hidden_layers)[stage::num_stages]:
                layer = f"model.layers.{number}."
                attention = f"{layer}self_attn."
                q = pick(f"{attention}q_proj.weight", queries)
                k, v = (pick(f"{attention}{letter}_proj.weight", [head for head, _ in mine]) for letter in "kv")
                match layout.qkv_linear, layout.fuse_qkv:
                    case False, False:
                        named = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v}
                    case False, True:
                        named = {"qkv_proj.weight": torch.cat((q, k, v))}
                    case True, False:
                        named = {"qkv_proj.weight_q": q, "qkv_proj.weight_k": k, "qkv_proj.weight_v": v}
                    case _:
                        named = {"qkv_proj.weight_qkv": torch.cat((q, k, v))}
                state |= {attention + name: tensor for name, tensor in named.items()}
                state[f"{attention}o_proj.weight"] = pick(f"{attention}o_proj.weight", queries, dim=1)
                gate, up = rows(f"{layer}mlp.gate_proj.weight"), rows(f"{layer}mlp.up_proj.weight")
                state[f"{layer}mlp.gate_up_proj.weight"] = torch.cat((gate, up))
                state[f"{layer}mlp.down_proj.weight"] = rows(f"{layer}mlp.down_proj.weight", dim=1)
                for norm in ("input_layernorm", "post_attention_layernorm"):
                    state[f"{layer}{norm}.weight"] = weights[f"{layer}{norm}.weight"].clone()
            if stage == num_stages - 1:
                state["model.norm.weight"] = weights["model.norm.weight"].clone()
                head = "model.embed_tokens" if model.tie_word_embeddings else "lm_head"
                state["lm_head.weight"] = rows(f"{head}.weight")
            files[f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"] = state
    return files


def save_files(folder: Path, files: Mapping[str, Any], kind: str = "model") -> Path:
    """As `nxd.save_checkpoint` leaves them, of a tag with this folder."""
    (folder / kind).mkdir(parents=True)
    for name, content in files.items():
        torch.save(content, folder / kind / name)
    for marker in ("checkpoint", "done"):
        (folder / marker).write_text("1")
    return folder


def save_files_by_tensor(folder: Path, files: Mapping[str, Any], reference: type, kind: str = "model") -> Path:
    """As `save_files`, of a run with `use_xser`."""
    for name, content in files.items():
        tensors = folder / kind / f"{name}.tensors"
        tensors.mkdir(parents=True)
        count = 0

        def save(value: Any, tensors: Path = tensors) -> Any:
            nonlocal count
            if isinstance(value, dict):
                return {key: save(each) for key, each in value.items()}
            if not isinstance(value, Tensor):
                return value
            torch.save(value, tensors / f"tensor_{count}.pt")
            referring = reference()
            referring.tid, count = count, count + 1
            return referring

        torch.save(save(content), folder / kind / name)
    for marker in ("checkpoint", "done"):
        (folder / marker).write_text("1")
    return folder


@pytest.fixture
def tensor_reference() -> Iterator[type]:
    """A class that is pickled under the name of torch_xla's, which need not be here."""
    name = "torch_xla.utils.serialization"
    module = ModuleType(name)
    reference = type("TensorReference", (), {"__module__": name})
    module.__dict__["TensorReference"] = reference
    with pytest.MonkeyPatch.context() as patch:
        for each in ("torch_xla", "torch_xla.utils"):
            if each not in sys.modules:
                patch.setitem(sys.modules, each, ModuleType(each))
        patch.setitem(sys.modules, name, module)
        yield reference


def read_all(folder: Path, model: Model) -> Weights:
    weights = NxdWeights(folder, model)
    return {name: weights.read(name) for name in parameter_shapes(model)}


def are_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


LAYOUTS = [
    (llama(8), NxdLayout(1)),
    (llama(8), NxdLayout(2, fuse_qkv=True)),
    (llama(8), NxdLayout(4, qkv_linear=True, fuse_qkv=True)),
    (llama(2), NxdLayout(2)),
    (llama(2), NxdLayout(2, qkv_linear=True)),
    (llama(2), NxdLayout(4, 2, qkv_linear=True)),
    (llama(2), NxdLayout(4, 4, qkv_linear=True, fuse_qkv=True)),
    (llama(4), NxdLayout(2, 2, qkv_linear=True, fuse_qkv=True)),
    (llama(2, tie_word_embeddings=True), NxdLayout(2, 2, qkv_linear=True)),
]


def layout_name(value: object) -> str:
    if isinstance(value, Model):
        return f"kv{value.num_key_value_heads}" + "-tied" * value.tie_word_embeddings
    assert isinstance(value, NxdLayout)
    return (
        f"tp{value.tensor_parallel_size}-x{value.kv_size_multiplier}"
        + "-linear" * value.qkv_linear
        + ("-fused" * value.fuse_qkv)
    )


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=layout_name)
def test_weights_come_back_from_nxd_bit_for_bit(tmp_path: Path, model: Model, layout: NxdLayout) -> None:
    weights = draw_weights(model)

    write_nxd_model(tmp_path, model, layout, lambda names: {name: weights[name] for name in names})

    assert are_equal(read_all(tmp_path, model), weights)
    expected = describe_files(model, weights, layout)
    found = {path.name: torch.load(path, weights_only=True) for path in (tmp_path / "model").iterdir()}
    assert found.keys() == expected.keys()
    assert all(are_equal(state, expected[name]) for name, state in found.items())
    assert (tmp_path / "done").read_text() == (tmp_path / "checkpoint").read_text() == "1"


@pytest.mark.parametrize(
    ("num_key_value_heads", "layout"),
    [
        (8, NxdLayout(2, fuse_qkv=True)),
        (2, NxdLayout(2)),
        (2, NxdLayout(2, qkv_linear=True)),
        (2, NxdLayout(4, 2, qkv_linear=True)),
        (2, NxdLayout(4, 2, qkv_linear=True, fuse_qkv=True)),
        (4, NxdLayout(8, 2, qkv_linear=True, fuse_qkv=True)),
        (2, NxdLayout(8, 4, qkv_linear=True)),
    ],
)
def test_the_files_are_those_of_nxds_converter(tmp_path: Path, num_key_value_heads: int, layout: NxdLayout) -> None:
    """With one key-value head on a rank, or none copied: for several the converter leaves out what the layers have."""
    converter = pytest.importorskip(
        "neuronx_distributed.scripts.checkpoint_converter", reason="NxD is in the neuron images alone"
    ).CheckpointConverterBase()
    model = llama(num_key_value_heads, intermediate_size=16)
    weights = draw_weights(model)
    write_nxd_model(tmp_path, model, layout, lambda names: {name: weights[name] for name in names})

    config = model.model_dump()
    options = Namespace(
        tp_size=layout.tensor_parallel_size,
        pp_size=1,
        ep_size=1,
        kv_size_multiplier=layout.kv_size_multiplier,
        qkv_linear=layout.qkv_linear,
        fuse_qkv=layout.qkv_linear and layout.fuse_qkv,
        hw_backend="trn1",
        pad_attn_heads=False,
        i_tp_round_factor=0,
        model_style="hf",
        n_layers=model.num_hidden_layers,
    )
    full = dict(weights)
    if layout.fuse_qkv and not layout.qkv_linear:
        full = converter.coalesce_qkv(full, config, layout.tensor_parallel_size)
    for rank in range(layout.tensor_parallel_size):
        theirs = converter.convert_full_state_to_tp(full, options, rank, 0, 0, ["model.layers.1"], config)
        ours = torch.load(tmp_path / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt", weights_only=True)
        assert are_equal(ours, theirs)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_tensor", [False, True], ids=["whole", "xser"])
def test_a_checkpoint_as_nxd_saves_it_is_read(
    tmp_path: Path, tensor_reference: type, num_stages: int, dtype: torch.dtype, by_tensor: bool
) -> None:
    model, layout = llama(), NxdLayout(4, 2, qkv_linear=True)
    weights = {name: weight.to(dtype) for name, weight in draw_weights(model).items()}
    files = describe_files(model, weights, layout, num_stages)
    for state in files.values():
        state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    if by_tensor:
        save_files_by_tensor(tmp_path, files, tensor_reference)
    else:
        save_files(tmp_path, files)

    assert are_equal(read_all(tmp_path, model), {name: weight.float() for name, weight in weights.items()})


WRITE_BY_TENSOR = """
import sys, torch, torch_xla, torch_xla.utils.serialization
for path in sys.argv[1:]:
    state = {name: tensor.to(torch_xla.device()) for name, tensor in torch.load(path, weights_only=True).items()}
    torch_xla.utils.serialization.save(state, path, master_only=False)
"""


@pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla is in the neuron images and .venv-torch29 alone")
def test_what_torch_xla_writes_tensor_by_tensor_is_read(tmp_path: Path) -> None:
    model, layout = llama(), NxdLayout(2, qkv_linear=True)
    weights = draw_weights(model)
    save_files(tmp_path, describe_files(model, weights, layout))
    paths = sorted(str(path) for path in (tmp_path / "model").iterdir())
    subprocess.run([sys.executable, "-c", WRITE_BY_TENSOR, *paths], env=os.environ | {"PJRT_DEVICE": "CPU"}, check=True)

    assert len(list((tmp_path / "model").glob("*.tensors"))) == 2
    assert are_equal(read_all(tmp_path, model), weights)


def describe_optimizer(files: Files, masters: Files, num_data: int) -> dict[str, Any]:
    """As a run with ZeRO-1 and `use_master_weights_in_ckpt` saves it: norms, which do not decay, are a group behind."""
    optimizer = {}
    for name, state in files.items():
        ordered = sorted(state, key=lambda each: "norm" in each)
        padded = {}
        for each in ordered:
            master = masters[name][each]
            rows = -(-len(master) // num_data) * num_data
            padded[each] = torch.cat((master, torch.zeros(rows - len(master), *master.shape[1:])))
        for rank in range(num_data):
            shards = {number: padded[each].chunk(num_data)[rank].clone() for number, each in enumerate(ordered)}
            optimizer[name.replace("dp_rank_00", f"dp_rank_{rank:02d}")] = {
                "state": {},
                "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(shards)}],
                "base_state": {
                    number: {"step": torch.tensor(7.0), "exp_avg": shard} for number, shard in shards.items()
                },
                "shape_info": {number: state[each].shape for number, each in enumerate(ordered)},
                "sharded_master_weights": shards,
            }
    return optimizer


@pytest.mark.parametrize("by_tensor", [False, True], ids=["whole", "xser"])
def test_the_optimizers_masters_are_read_where_it_saved_them(
    tmp_path: Path, tensor_reference: type, by_tensor: bool
) -> None:
    model, layout = llama(), NxdLayout(4, 2, qkv_linear=True, fuse_qkv=True)
    weights = draw_weights(model)
    masters = describe_files(model, weights, layout, num_stages=2)
    files = {name: {key: each.bfloat16() for key, each in state.items()} for name, state in masters.items()}
    optimizer = describe_optimizer(files, masters, num_data=3)
    if by_tensor:
        save_files_by_tensor(tmp_path, files, tensor_reference)
        save_files_by_tensor(tmp_path, optimizer, tensor_reference, kind="optim")
    else:
        save_files(tmp_path, files)
        save_files(tmp_path, optimizer, kind="optim")

    assert are_equal(read_all(tmp_path, model), weights)

    (tmp_path / "optim" / "dp_rank_01_tp_rank_02_pp_rank_00.pt").unlink()
    with pytest.raises(ArtifactError, match="1 of the 24 ranks have no file: dp_rank_01_tp_rank_02_pp_rank_00"):
        read_all(tmp_path, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda files: [state.pop(MASTERS) for name, state in files.items() if "dp_rank_01" in name],
            "which other ranks",
        ),
        (
            lambda files: [state.pop(MASTERS) for name, state in files.items() if "tp_rank_01" in name],
            "some ranks have",
        ),
        (lambda files: files[RANK_0][MASTERS].pop(3), "rank_00.pt: has no master of model.layers.0.mlp.gate_up_proj.w"),
        (lambda files: files[RANK_0][MASTERS][3].add_(1), "tensor 3, [6, 32], is the master of no weight in `model`"),
        (
            lambda files: files[RANK_0.replace("dp_rank_00", "dp_rank_01")][MASTERS][3].add_(1),
            "the shards of model.layers.0.mlp.gate_up_proj.weight's master on 2 data-parallel ranks are not the weight",
        ),
        (
            lambda files: files[RANK_0][MASTERS].update({3: torch.ones(6, 32, device="meta")}),
            "3 is on the device `meta`, where it has no values",
        ),
        (lambda files: files[RANK_0][MASTERS].update({3: torch.ones(())}), "tensor 3, [], is the master of no weight"),
        (
            lambda files: [files.pop(name) for name in list(files)] + [files.update({"__0_0.distcp": {}})],
            "has no dp_rank",
        ),
    ],
)
def test_masters_that_are_not_those_of_the_model_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    model, layout = llama(), NxdLayout(2, qkv_linear=True, fuse_qkv=True)
    masters = describe_files(model, draw_weights(model), layout)
    files = {name: {key: each.bfloat16() for key, each in state.items()} for name, state in masters.items()}
    optimizer = describe_optimizer(files, masters, num_data=2)
    change(optimizer)
    save_files(tmp_path, files)
    save_files(tmp_path, optimizer, kind="optim")

    with pytest.raises(ArtifactError, match=re.escape(message)):
        read_all(tmp_path, model)


def test_an_optimizer_without_masters_leaves_the_models_weights(tmp_path: Path) -> None:
    model = llama()
    files = describe_files(model, draw_weights(model), NxdLayout(2))
    save_files(tmp_path, files)
    save_files(tmp_path, {name: {"state": {}, "param_groups": []} for name in files}, kind="optim")

    assert are_equal(read_all(tmp_path, model), draw_weights(model))


Change = Callable[[Path, Files], object]


def rewrite(change: Callable[[dict[str, Any]], object]) -> Change:
    def apply(folder: Path, files: Files) -> None:
        change(files)
        for name, state in files.items():
            torch.save(state, folder / "model" / name)

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder, _: (folder / "done").unlink(), "has no file `done`: its save did not end"),
        (lambda folder, _: (folder / "model" / RANK_0).unlink(), f"1 of the 4 ranks have no file: {RANK_0}"),
        (lambda folder, _: (folder / "model" / RANK_3).unlink(), "3 ranks do not divide num_attention_heads 8"),
        (lambda folder, _: (folder / "model" / RANK_3).write_bytes(b"PK"), f"{RANK_3}: cannot be read as a file of"),
        (
            lambda folder, _: (folder / "model" / RANK_3).write_bytes((folder / "model" / RANK_3).read_bytes()[:-50]),
            f"{RANK_3}: cannot be read as a file of torch.save",
        ),
        (lambda folder, _: torch.save([1], folder / "model" / RANK_3), "holds a list, expected a dictionary"),
        (
            lambda folder, _: torch.save({"a": print}, folder / "model" / RANK_3),
            f"{RANK_3}: cannot be read as a file of torch.save with tensors alone: Unsupported",
        ),
        (
            lambda folder, _: (folder / "model" / RANK_3).rename(folder / "model" / "dp_rank_00_tp_rank_03.pt"),
            "3 ranks do not divide",
        ),
        (rewrite(lambda files: files[RANK_0].update(more=torch.ones(1))), "0 missing (none), 1 unknown (more)"),
        (
            rewrite(lambda files: [state.pop("model.norm.weight") for state in files.values()]),
            "1 missing (model.norm.weight), 0 unknown (none)",
        ),
        (
            rewrite(lambda files: files[RANK_3].pop("lm_head.weight")),
            "lm_head.weight is on some ranks of its stage and",
        ),
        (
            rewrite(lambda files: files[RANK_3].update({"lm_head.weight": 3})),
            "lm_head.weight is a int, expected a dense",
        ),
        (
            rewrite(lambda files: files[RANK_3].update({"lm_head.weight": torch.ones(7, 32)})),
            "lm_head.weight is [7, 32], expected [6, 32]: the recipe's model on 4 tensor-parallel ranks",
        ),
        (
            rewrite(lambda files: files[RANK_3].update({"lm_head.weight": torch.ones(6, 32).double()})),
            "lm_head.weight is torch.float64, expected torch.float32",
        ),
        (
            rewrite(lambda files: files[RANK_3].update({"lm_head.weight": torch.ones(6, 32, device="meta")})),
            "lm_head.weight is on the device `meta`, where it has no values",
        ),
        (
            rewrite(lambda files: files[RANK_3].update({"lm_head.weight": torch.ones(())})),
            "lm_head.weight is [], expected [6, 32]",
        ),
        (
            rewrite(lambda files: files[RANK_3].update({"lm_head.weight": torch.ones(1, 1).expand(2**30, 2**30)})),
            "lm_head.weight is [1073741824, 1073741824], expected [6, 32]",
        ),
        (
            rewrite(
                lambda files: files[RANK_3].update({"lm_head.weight": torch.ones(6, 32, dtype=torch.complex64).conj()})
            ),
            "lm_head.weight is torch.complex64, expected torch.float32",
        ),
        (
            rewrite(lambda files: files[RANK_3]["lm_head.weight"][0].fill_(float("nan"))),
            "lm_head.weight: 32 of 768 values are NaN or infinite",
        ),
        (
            rewrite(lambda files: files[RANK_3]["model.norm.weight"].add_(1)),
            "model.norm.weight has copies of one tensor on several ranks, and rank 3 differs from rank 0 in 32 of 32",
        ),
        (
            rewrite(lambda files: files[RANK_3]["model.layers.1.self_attn.qkv_proj.weight_v"][0].add_(1)),
            "and copy 1 differs from copy 0 in 32 of 256 values",
        ),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path, change: Change, message: str) -> None:
    model = llama()
    files = describe_files(model, draw_weights(model), NxdLayout(4, 2, qkv_linear=True))
    save_files(tmp_path, files)
    change(tmp_path, files)

    with pytest.raises(ArtifactError, match=re.escape(message)):
        read_all(tmp_path, model)


def test_a_tensor_that_was_saved_with_its_gradient_is_read(tmp_path: Path) -> None:
    model = llama()
    weights = draw_weights(model)
    files = describe_files(model, weights, NxdLayout(4, 2, qkv_linear=True))
    for state in files.values():
        for tensor in state.values():
            tensor.requires_grad_()
    save_files(tmp_path, files)

    assert digest_weights(parameter_shapes(model), NxdWeights(tmp_path, model).read)
    assert are_equal(read_all(tmp_path, model), weights)


def test_tensors_that_were_left_out_are_named(tmp_path: Path, tensor_reference: type) -> None:
    model = llama()
    save_files_by_tensor(tmp_path, describe_files(model, draw_weights(model), NxdLayout(2)), tensor_reference)
    for path in (tmp_path / "model").glob("*.tensors/tensor_0.pt"):
        path.unlink()

    with pytest.raises(ArtifactError, match=r"is missing, and has model\.embed_tokens\.weight"):
        read_all(tmp_path, model)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (NxdLayout(3), "3 ranks do not divide num_attention_heads 8"),
        (NxdLayout(4), "4 ranks do not divide num_key_value_heads x kv_size_multiplier 2"),
        (NxdLayout(2, 2), "only its qkv_linear has copies"),
        (NxdLayout(2, fuse_qkv=True), "only its qkv_linear can be fused"),
        (NxdLayout(8, 8, qkv_linear=True), "8 copies of a key-value head do not divide the query heads"),
        (NxdLayout(4, 3, qkv_linear=True), "3 copies of key-value heads do not divide 4 ranks"),
    ],
)
def test_a_model_that_nxd_cannot_split_is_not_exported(tmp_path: Path, layout: NxdLayout, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        write_nxd_model(tmp_path, llama(), layout, lambda names: {})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def trained(tmp_path: Path, new_job: Callable[..., Job]) -> Path:
    """The folder of a root, `a`, with a run of the small recipe."""
    train(new_job(train__max_steps="1"), ALONE)
    return tmp_path


def test_a_run_continues_what_was_exported_for_nxd(capfd: pytest.CaptureFixture[str], trained: Path) -> None:
    recipe, root, tag = write_recipe(trained), trained / "a", trained / "nxd" / "step_1"
    of_nxd = ("--format=nxd", "--tensor-parallel-size=2", "--kv-size-multiplier=2", "--qkv-linear", "--fuse-qkv")
    code, printed = call_trainer(capfd, recipe, root, *of_nxd, f"--output={tag}", command="export")
    assert code == 0, printed
    made = "checkpoint config.json done model tokenizer.model"
    assert sorted(path.name for path in tag.iterdir()) == made.split()

    run = open_run(root, next(root.glob("checkpoint/*")).name)
    export(run, trained / "hugging-face")
    by_source = {}
    for source in (tag, trained / "hugging-face"):
        code, printed = call_trainer(capfd, recipe, root, f"--from={source}", command="import")
        assert code == 2
        by_source[source] = re.findall(r'initial_weights = "([0-9a-f]{64})"', printed)
    assert by_source[tag] == by_source[trained / "hugging-face"] != []

    named = f"--train.initial_weights={by_source[tag][0]}"
    code, printed = call_trainer(capfd, recipe, root, f"--from={tag}", named, command="import")
    assert code == 0, printed
    begun = open_run(root, Path(re.findall("^.*/step-00000000$", printed, re.MULTILINE)[0]).parent.name)
    assert are_equal(load_weights(begun), load_weights(run))
    assert train_alone(capfd, recipe, root, named, "--train.max_steps=2")[0] == 0


def test_an_import_from_nxd_says_what_is_wrong(capfd: pytest.CaptureFixture[str], trained: Path) -> None:
    recipe, root, tag = write_recipe(trained), trained / "a", trained / "nxd" / "step_1"
    layout = ("--format=nxd", "--tensor-parallel-size=2", "--kv-size-multiplier=2", "--qkv-linear")
    assert call_trainer(capfd, recipe, root, *layout, f"--output={tag}", command="export")[0] == 0

    def import_from(folder: Path, *options: str) -> tuple[int, str]:
        return call_trainer(capfd, recipe, root, f"--from={folder}", *options, command="import")

    code, printed = import_from(tag.parent)
    assert (code, "Name one of them: step_1." in printed) == (3, True), printed
    code, printed = import_from(tag / "model")
    assert (code, "Name the folder above it." in printed) == (3, True), printed
    code, printed = import_from(tag, "--model.rms_norm_eps=0.1")
    assert (code, "rms_norm_eps: config.json has 1e-05, the recipe's" in printed) == (2, True), printed

    (tag / "config.json").unlink()
    code, printed = import_from(tag)
    assert (code, "only names and shapes were compared" in printed) == (2, True), printed
    (tag / "done").unlink()
    code, printed = import_from(tag)
    assert (code, "has no file `done`" in printed) == (3, True), printed
    assert list(checkpoints(root)) == ["step-00000001"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format=nxd"], "--format nxd: needs --tensor-parallel-size"),
        (["--format=nxd", "--tensor-parallel-size=0"], "--format nxd: needs --tensor-parallel-size"),
        (["--qkv-linear"], "add --format nxd"),
        (["--format=nxd", "--tensor-parallel-size=2"], "2 ranks do not divide num_key_value_heads"),
    ],
)
def test_an_export_for_nxd_that_cannot_be_is_refused(
    capfd: pytest.CaptureFixture[str], trained: Path, options: list[str], message: str
) -> None:
    recipe, root, tag = write_recipe(trained), trained / "a", trained / "step_1"
    code, printed = call_trainer(capfd, recipe, root, *options, f"--output={tag}", command="export")
    assert (code, message in printed) == (2, True), printed
    assert not tag.exists()
