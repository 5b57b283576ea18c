"""The collectives of plain PyTorch, over real processes."""

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
from services.common.program.pieces import reduce_scatter_in_pieces
from services.common.program.tests import work


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """Results of the collectives on each of 4 workers."""
    folder = tmp_path_factory.mktemp("collectives")
    run_workers(inline, work.run_collectives, folder, WorkerGroupSpec(work.WORKERS, 1, work.WORKERS, folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(work.WORKERS)]


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


def test_collectives_in_pieces_give_the_bits_of_one_call(found: list[dict[str, Tensor]]) -> None:
    """Shards lie along every dimension once, and the last piece is shorter."""
    for results in found:
        for name, whole in results.items():
            if name.startswith("whole "):
                assert torch.equal(results[name.replace("whole", "cut")], whole), name
        assert results["bytes of a piece"].max() <= work.PIECE_BYTES
        assert len(results["bytes of a piece"]) > 4


def test_sums_of_a_split_model_are_rounded_once_in_float32(tmp_path: Path) -> None:
    """A sum in bfloat16 would round each of 8 additions."""
    size = work.SUMMING_WORKERS
    run_workers(inline, work.sum_activations, tmp_path, WorkerGroupSpec(size, 1, size, tmp_path))
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
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


@pytest.mark.parametrize("max_bytes", [1, 16, 40, 96])
def test_no_piece_is_larger_than_the_limit_unless_it_has_one_element_of_each_worker(max_bytes: int) -> None:
    seen: list[int] = []

    def reduce_scatter(x: Tensor, dim: int) -> Tensor:
        seen.append(x.nbytes)
        return x.narrow(dim, 0, x.shape[dim] // 4)

    x = torch.arange(2 * 8 * 3, dtype=torch.float32).view(2, 8, 3)
    assert torch.equal(reduce_scatter_in_pieces(reduce_scatter, x, 4, 1, max_bytes), x[:, :2])
    assert max(seen) <= max(max_bytes, 4 * x.element_size())
    assert sum(seen) == x.nbytes


def test_one_worker_needs_no_others() -> None:
    backend, mine = TorchNative(Mesh(0, data_parallel_size=1), 1, "exact"), work.part_of(0)

    for axis in AXES:
        for result in (
            backend.all_reduce(mine, axis),
            backend.all_gather(mine, axis),
            backend.reduce_scatter(mine, axis),
        ):
            assert torch.equal(result, mine)
    assert backend.read({"half": torch.tensor(0.5), "yes": torch.tensor(True)}) == {"half": 0.5, "yes": 1.0}


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


def test_a_workstation_may_leave_its_gpus_idle_and_a_cuda_image_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cpu", "cuda"):
        assert choose_backend(device) is TorchNative

    monkeypatch.setenv("MILLRACE_VARIANT", "cuda")
    assert choose_backend("cuda") is TorchNative
    for other in ("cpu", "neuron", "xla"):
        with pytest.raises(DeviceError, match=rf"cuda image.*'{other}'"):
            choose_backend(other)

    monkeypatch.setenv("MILLRACE_VARIANT", "cpu")
    assert choose_backend("cpu") is TorchNative
    with pytest.raises(DeviceError, match=r"cpu image.*make images VARIANT=cuda"):
        choose_backend("cuda")

    monkeypatch.setenv("MILLRACE_VARIANT", "trn2")
    assert choose_backend("neuron") is TorchNative
    with pytest.raises(DeviceError, match=r"trn2 image.*'xla'.*make images VARIANT=neuron"):
        choose_backend("xla")


def test_a_neuron_image_and_a_trainium_node_refuse_to_compute_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert choose_backend("cpu") is TorchNative
    monkeypatch.setattr(image_platform, "NEURON_DEVICES", tmp_path)
    (tmp_path / "neuron0").touch()
    with pytest.raises(DeviceError, match="1 Neuron devices"):
        choose_backend("cpu")

    monkeypatch.setenv("MILLRACE_VARIANT", "neuron")
    with pytest.raises(DeviceError, match=r"neuron image.*'cpu'"):
        choose_backend("cpu")
