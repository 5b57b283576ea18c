"""The use of neuronx-distributed, tested where it is absent too: its kernel and its groups of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from services.common.errors import DeviceError
from services.common.program.backends.backend import Collectives
from services.common.program.backends.neuron_distributed import FlashAttention, require_equal_groups, why_not_flash
from services.common.program.mesh import Axis, Mesh


def heads(num_heads: int, length: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(1, num_heads, length, head_dim, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("query", "mask", "said"),
    [
        (heads(4, 4096, 128), None, ""),
        (heads(4, 4096, 128), torch.ones(1, 1, 1, 1, dtype=torch.bool), "within their documents"),
        (heads(4, 3000, 128), None, "3,000 positions, and the kernel takes multiples of 2,048"),
        (heads(4, 2048, 256), None, "256 dimensions, and the kernel takes at most 128"),
        (heads(4, 2048, 128, torch.float32), None, "multiplies in bfloat16, and train.dtype is float32"),
        (heads(3, 4096, 128), None, "3 heads, and its 2 physical cores"),
    ],
    ids=["taken", "documents", "length", "width", "float32", "odd heads"],
)
def test_the_kernel_is_for_causal_attention_in_bfloat16_of_lengths_it_takes(
    monkeypatch: pytest.MonkeyPatch, query: Tensor, mask: Tensor | None, said: str
) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    reason = why_not_flash(query, query, mask)
    assert said in reason
    assert bool(reason) == bool(said)


def test_key_value_heads_are_given_to_the_kernel_once_for_each_query_head_and_their_gradients_are_summed() -> None:
    """NxD starts the kernel once for each query head, with the head of that number in each tensor."""
    options: dict[str, Any] = {}

    def kernel(q_BHSN: Tensor, k_BHSN: Tensor, v_BHSN: Tensor, **given: Any) -> Tensor:
        options.update(given)
        assert q_BHSN.shape == k_BHSN.shape == v_BHSN.shape
        return torch.nn.functional.scaled_dot_product_attention(
            q_BHSN, k_BHSN, v_BHSN, is_causal=given["causal"], scale=given["softmax_scale"]
        )

    q, k, v = (torch.randn(2, count, 16, 8, requires_grad=True) for count in (6, 2, 2))
    ours, expected = FlashAttention(kernel, "trn1")(q, k, v), Collectives().attend(q, k, v, None)
    torch.testing.assert_close(ours, expected)
    weights = torch.randn_like(expected)
    gradients = zip(*(torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (ours, expected)), strict=True)
    for mine, theirs in gradients:
        torch.testing.assert_close(mine, theirs)
    assert options["lnc"] == 1
    assert options["hardware_type"] == "trn1"
    assert options["transpose_nki_inputs"] is False


def groups_of_trn1(mesh: Mesh) -> dict[Axis, list[list[int]]]:
    """Return the groups that neuronx-distributed 0.18 documents in `initialize_model_parallel` for 32 cores."""
    in_a_row, in_a_ring = [[*range(n, n + 8)] for n in range(0, 32, 8)], [[*range(n, 32, 8)] for n in range(8)]
    if mesh.tensor_parallel_size == 4:
        return {"tensor": in_a_ring, "data": in_a_row, "key_value": [[n] for n in range(32)]}
    copies = [[n + first, n + first + 4] for first in range(0, 32, 8) for n in range(4)]
    return {"tensor": in_a_row, "data": in_a_ring, "key_value": copies}


def test_a_size_whose_groups_would_not_be_along_links_is_refused_with_both_sides() -> None:
    fitting = Mesh(0, 4, 8, key_value_copies=2, are_copies_apart=True)
    require_equal_groups(fitting, groups_of_trn1(fitting), "trn1")

    mesh = Mesh(0, 8, 4)
    with pytest.raises(DeviceError) as raised:
        require_equal_groups(mesh, groups_of_trn1(mesh), "trn1")
    assert raised.value.exit_code == 4
    for groups in ("[[0, 1, 2, 3], [4, 5, 6, 7], ...]", "[[0, 8, 16, 24], [1, 9, 17, 25], ...]"):
        assert groups in str(raised.value)
