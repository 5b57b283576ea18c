"""The collectives of plain PyTorch, over real processes, and the devices for which they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.common.errors import DeviceError
from services.common.hardware import image_platform
from services.common.launch import inline
from services.common.launch.launcher import WorkerGroupSpec, run_workers
from services.common.program.backends.choice import choose_backend
from services.common.program.backends.torch_native import TorchNative
from services.common.program.mesh import AXES, Mesh
from services.common.program.pieces import all_gather_in_pieces, reduce_scatter_in_pieces
from services.common.program.tests import work
from services.common.recipe.schema import Device


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """Results of the collectives on each of 4 workers."""
    return work.run_on_workers(work.run_collectives, work.WORKERS, tmp_path_factory.mktemp("collectives"))


def test_collectives_go_along_one_axis_of_the_mesh(found: list[dict[str, Tensor]]) -> None:
    for rank, results in enumerate(found):
        for axis in AXES:
            mesh = work.mesh_of(rank)
            index, parts = mesh.index(axis), [work.part_of(peer) for peer in mesh.group(axis)]
            total = parts[0] + parts[1]
            for reduction in ("exact", "fast"):
                assert torch.equal(results[f"{reduction} sum {axis}"], total)
                assert torch.equal(results[f"{reduction} max {axis}"], torch.maximum(*parts))
                assert torch.equal(results[f"{reduction} gather {axis}"], torch.cat(parts, dim=1))
                assert torch.equal(results[f"{reduction} scatter {axis}"], total.chunk(2)[index])
                assert results[f"{reduction} index {axis}"].tolist() == [index]


def test_slices_of_an_exact_sum_have_the_bits_of_the_whole(found: list[dict[str, Tensor]]) -> None:
    first, second, third, fourth = (work.part_of(rank) for rank in range(work.WORKERS))
    assert all(torch.equal(results["total"], (first + second) + (third + fourth)) for results in found)
    assert all(torch.equal(results["in pieces"], results["total"]) for results in found)
    assert torch.equal(torch.cat([results["slice"] for results in found]), found[0]["total"])


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_collectives_in_pieces_give_the_bits_of_one_call(dim: int) -> None:
    """Shards lie along every dimension once, and the last piece is shorter. Peers have this rank's numbers + 1000."""
    sizes, mine = list[int](), torch.arange(4 * 8 * 12, dtype=torch.float32).view(4, 8, 12)

    def gather(x: Tensor, dim: int) -> Tensor:
        sizes.append(4 * x.nbytes)
        return torch.cat([x + 1000 * peer for peer in range(4)], dim)

    def scatter(x: Tensor, dim: int) -> Tensor:
        sizes.append(x.nbytes)
        return sum((x + 1000 * peer for peer in range(4)), torch.zeros(())).chunk(4, dim)[1]

    assert torch.equal(all_gather_in_pieces(gather, mine, 4, dim, 100), gather(mine, dim))
    assert torch.equal(reduce_scatter_in_pieces(scatter, mine, 4, dim, 100), scatter(mine, dim))
    assert sorted(sizes)[-2:] == [mine.nbytes, 4 * mine.nbytes]  # of the single calls
    assert sorted(sizes)[-3] <= 100


def test_sums_of_a_split_model_are_rounded_once_in_float32(tmp_path: Path) -> None:
    """A sum in bfloat16 would round each of 8 additions."""
    size = work.SUMMING_WORKERS
    found = work.run_on_workers(work.sum_activations, size, tmp_path)
    exact_BSD = torch.stack([work.activation_of(rank).double() for rank in range(size)]).sum(0)

    def error(of: Tensor) -> float:
        return float((of.double() - exact_BSD).norm() / exact_BSD.norm())

    for name in ("forward", "backward"):
        sums = {
            dtype: torch.cat([each[f"{name} {dtype}"] for each in found], dim=1)
            for dtype in (torch.float32, torch.bfloat16)
        }
        assert all(each.dtype == torch.bfloat16 for each in sums.values())
        assert torch.equal(sums[torch.float32], exact_BSD.bfloat16())
        assert error(sums[torch.float32]) < 0.7 * error(sums[torch.bfloat16]), name


@pytest.mark.parametrize("name", ["maximum", "started maximum", "gather", "exact sum", "fast sum"])
def test_a_worker_that_hangs_ends_the_collectives_of_the_others_at_their_limit(tmp_path: Path, name: str) -> None:
    """Workers connect when they first need it, and this is the first collective."""
    folder = tmp_path / "lost"
    folder.mkdir()
    run_workers(inline, work.lose_a_worker, (name, folder), WorkerGroupSpec(work.WORKERS, 1, work.WORKERS, tmp_path))
    assert {path.name for path in folder.iterdir()} == {"0", "1", "2"}


def test_eager_workers_import_no_inductor_and_reuse_memory() -> None:
    program = f"""
import resource, sys, torch
from {Mesh.__module__} import Mesh
from {TorchNative.__module__} import TorchNative
TorchNative(Mesh(0, 1), 1, "exact")
assert torch.are_deterministic_algorithms_enabled()
assert "torch._inductor" not in sys.modules
def count_pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
counts = []
for _ in range(8):
    before = count_pages()
    torch.ones(25_000_000)
    counts.append(count_pages() - before)
assert counts[0] > min(counts[1:]) == 0, counts
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("variant", "device", "is_taken"),
    [
        *(("", device, True) for device in ("cpu", "cuda")),  # a workstation may leave its GPUs idle
        *(("cuda", device, device == "cuda") for device in ("cpu", "cuda", "neuron", "xla")),
        *(("cpu", device, device == "cpu") for device in ("cpu", "cuda")),
        *(("trn2", device, device == "neuron") for device in ("neuron", "xla")),
        ("neuron", "cpu", False),
    ],
)
def test_an_image_is_for_its_own_device(
    monkeypatch: pytest.MonkeyPatch, variant: str, device: Device, is_taken: bool
) -> None:
    if variant:
        monkeypatch.setenv("MILLRACE_VARIANT", variant)
    if is_taken:
        assert choose_backend(device) is TorchNative
        return
    with pytest.raises(DeviceError, match=f"{variant} image.*'{device}'") as raised:
        choose_backend(device)
    assert raised.value.exit_code == 4


def test_a_trainium_node_refuses_to_compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(image_platform, "NEURON_DEVICES", tmp_path)
    (tmp_path / "neuron0").touch()
    with pytest.raises(DeviceError, match="1 Neuron devices"):
        choose_backend("cpu")
