"""Squared norms of blocks: the bits of the definition, for any dtype and number of threads."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from gradsync import kernels
from gradsync.kernels import Sections, reference
from gradsync.kernels.checks import section_blocks
from tests.kernels.native import DTYPES, assert_same_bits, cpu, native, special_values
from tests.kernels.on_device import every

SECTIONS = Sections((0, 1, 700, 33, 0, 5000))


def norms_of(kernels: Any, x: torch.Tensor, block: int, **options: Any) -> torch.Tensor:
    room = torch.full((section_blocks(SECTIONS, block) + 3,), 77.0, dtype=torch.float64)
    kernels.squared_norms(x, SECTIONS, room[:-3], block=block, **options)
    assert (room[-3:] == 77).all()
    return room[:-3]


def numbers(dtype: torch.dtype) -> torch.Tensor:
    size = sum(SECTIONS.lengths)
    return torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def test_norms_are_those_of_the_blocks() -> None:
    x = numbers(torch.float32)
    parts = [block for section in x.split(SECTIONS.lengths) if len(section) for block in section.split(64)]
    expected = torch.stack([part.double().square().sum() for part in parts])
    torch.testing.assert_close(norms_of(reference, x, 64), expected, rtol=1e-14, atol=0)


@native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_norms_equal_the_definition(dtype: torch.dtype, threads: int, module: ModuleType) -> None:
    x = numbers(dtype)
    for block in (0, 1, 31, 64, 1024, 1100):
        expected = norms_of(reference, x, block)
        assert_same_bits(norms_of(cpu, x, block, threads=threads, module=module), expected)
    x[-9:-2] = special_values(dtype)
    assert_same_bits(norms_of(cpu, x, 64, threads=threads, module=module), norms_of(reference, x, 64))


@every
def test_what_does_not_fit_is_refused(kernels: Any) -> None:
    x, two, norms = torch.zeros(5), Sections((2, 3)), torch.zeros(3).double()
    with pytest.raises(ValueError, match="block must be in"):
        kernels.squared_norms(x, two, norms, block=-1)
    with pytest.raises(ValueError, match="x must be"):
        kernels.squared_norms(x[:4], two, norms, block=2)
    with pytest.raises(ValueError, match="norms must be of shape"):
        kernels.squared_norms(x, two, norms[:2], block=2)
    with pytest.raises(TypeError, match="norms must be"):
        kernels.squared_norms(x, two, norms.float(), block=2)
    with pytest.raises(TypeError, match="x must be"):
        kernels.squared_norms(x.int(), two, norms, block=2)


def test_every_implementation_can_be_chosen() -> None:
    found = []
    for implementation in ("reference", "native", "auto"):
        with kernels.use(implementation):
            norms = torch.zeros(3, dtype=torch.float64)
            kernels.squared_norms(torch.arange(5.0), Sections((2, 3)), norms, block=2)
            found.append(norms.tolist())
    assert found[0] == found[1] == found[2] == [1.0, 13.0, 16.0]
