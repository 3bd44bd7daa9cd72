"""Scaling of many tensors: each product is rounded once."""

from __future__ import annotations

import pytest
import torch

from gradsync.tensors.scaling import multiply


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_those_of_float64_rounded_once(dtype: torch.dtype) -> None:
    tensors: list[torch.Tensor] = [
        torch.arange(1.0, 200.0, dtype=dtype),
        torch.arange(60.0, dtype=dtype).view(6, 10).t(),
        torch.empty(0, dtype=dtype),
    ]
    expected = [tensor.double().mul(1 / 3).to(tensor.dtype) for tensor in tensors]
    multiply(tensors, 1 / 3)
    assert all(torch.equal(tensor, product) for tensor, product in zip(tensors, expected, strict=True))


def test_no_tensors_are_no_error() -> None:
    multiply([], 0.5)
