"""Context parallel on CUDA and NCCL: flash kernels with their log-sum-exp, and every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.case import Case, assert_same, train_reference, train_titan
from tests.harness import reference, run_ranks
from titanplug.attention import kernels

pytestmark = pytest.mark.gpu

BACKENDS = ["all_gather", "ring", "ulysses", "torch"]
CASE = Case(
    by_targets=True,
    ignored="uneven",
    clip=0.1,
    accelerator="gpu",
    seq_len=32,
    model={"num_heads": 8, "num_kv_heads": 4, "dim": 64},
)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (8, 128), (4, 128), (4, 128), (8, 128)
    return [torch.randn(2, n, s, 64, device="cuda", dtype=dtype) for n, s in shapes]


def _flash_errors(rank: int, world_size: int, causal: bool, masked: bool) -> list[float]:
    """Of output, log-sum-exp and gradients, against plain products in float64."""
    query, key, value, grad = inputs(torch.bfloat16)
    bias = None
    if masked:
        hidden = torch.rand(2, 1, 128, 128, device="cuda") < 0.4
        hidden[..., 0] = False
        bias = torch.zeros(hidden.shape, device="cuda", dtype=query.dtype).masked_fill(hidden, float("-inf"))
    out, lse = kernels.attend(query, key, value, 0.125, causal=causal, bias=bias)
    found = kernels.attend_backward(grad, query, key, value, out, lse, 0.125, causal=causal, bias=bias)
    exact = [x.double() for x in (query, key, value, grad)]
    wide = None if bias is None else bias.double()
    wanted, wanted_lse = kernels.attend_plain(*exact[:3], 0.125, causal=causal, bias=wide)
    grads = kernels.attend_plain_backward(
        exact[3], *exact[:3], wanted, wanted_lse, 0.125, causal=causal, bias=wide
    )
    pairs = [(out, wanted), *zip(found, grads, strict=True)]
    if not masked:
        pairs.append((lse, wanted_lse))
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]


@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
def test_kernels_equal_plain_products(causal: bool, masked: bool) -> None:
    (errors,) = run_ranks(_flash_errors, 1, causal, masked)
    assert max(errors) < 2e-2


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_one_process(backend: str, cp: int) -> None:
    if torch.cuda.device_count() < cp:
        pytest.skip(f"needs {cp} CUDA devices")
    case = replace(CASE, options={"cp_backend": backend})
    expected = reference(train_reference, replace(case, accelerator="cpu"))
    for result in run_ranks(train_titan, cp, case, {"cp": cp, "dp_shard": 1}, init_process_group=False):
        assert_same(result, expected, tolerance=1e-12)


def _train_bf16(rank: int, world_size: int, backend: str, degrees: dict[str, Any]) -> list[float]:
    case = replace(
        CASE, dtype=torch.float32, options={"cp_backend": backend}, trainer={"precision": "bf16-mixed"}
    )
    return train_titan(rank, world_size, case, degrees).losses


@pytest.mark.parametrize("backend", BACKENDS)
def test_flash_kernels_in_training(backend: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    alone = run_ranks(_train_bf16, 1, backend, {}, init_process_group=False)[0]
    for losses in run_ranks(_train_bf16, 2, backend, {"cp": 2, "dp_shard": 1}, init_process_group=False):
        torch.testing.assert_close(losses, alone, rtol=2e-2, atol=2e-2)
