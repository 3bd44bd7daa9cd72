"""Chunks that are sent or kept: the bits of the definition, and conservation."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync import kernels
from gradsync.kernels import accumulation_dtype, reference
from tests.kernels.native import DTYPES, assert_same_bits, cpu, native, special_values
from tests.kernels.on_device import every

NUMEL = 5001
NARROW = (torch.bfloat16, torch.float16)


def numbers(dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def taken(
    kernels: Any, x: Tensor, chunk: int, chosen: list[int], sent: torch.dtype, scale: float = 1.0, **options: Any
) -> list[Tensor]:
    """Returns x, payload, next residual and norms as a kernel writes them; memory behind them must stay unchanged."""
    wide, chunks = accumulation_dtype(x.dtype), -(-len(x) // chunk)
    rooms = [
        torch.full((count + 3,), 77, dtype=dtype)
        for count, dtype in ((len(x), x.dtype), (len(chosen) * chunk, sent), (len(x), wide), (chunks, torch.float64))
    ]
    outs = [room[:-3] for room in rooms]
    outs[0].copy_(x)
    residual = numbers(wide, seed=2)[: len(x)]
    numbers_of = torch.tensor(chosen, dtype=torch.int64)
    kernels.take_chunks(outs[0], residual, numbers_of, *outs[1:], chunk=chunk, scale=scale, **options)
    assert all((room[-3:] == 77).all() for room in rooms)
    return outs


def sent_as(dtype: torch.dtype) -> list[torch.dtype]:
    return [dtype, *(narrow for narrow in NARROW if dtype.itemsize > 2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_sent_and_what_is_kept_are_the_sum(dtype: torch.dtype) -> None:
    x, residual = numbers(dtype), numbers(accumulation_dtype(dtype), seed=2)
    total = residual + x
    for sent in sent_as(dtype):
        zeros, payload, left, norms = taken(reference, x, 1000, [0, 3, 5], sent, scale=0.25)
        assert not zeros.any()
        assert not payload[-999:].any(), "one element of the last chunk"
        back = torch.zeros_like(total)
        for place, begin in enumerate((0, 3000, 5000)):
            part = payload[place * 1000 : (place + 1) * 1000].to(total.dtype) * 4
            back[begin : begin + 1000] = part[: len(back[begin : begin + 1000])]
        assert torch.equal(back + left, total), "nothing is lost, to the bit"
        assert torch.equal(left[1000:3000], total[1000:3000])
        expected = torch.stack([part.double().abs().sum() for part in left.split(1000)])
        torch.testing.assert_close(norms, expected, rtol=1e-13, atol=0)


@native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_chunks_equal_the_definition(dtype: torch.dtype, threads: int, module: ModuleType) -> None:
    x = numbers(dtype)
    x[-9:-2] = special_values(dtype)
    for sent in sent_as(dtype):
        for chunk, chosen in ((1, [0, 7, 5000]), (29, [1, 2, 172]), (1024, []), (1100, [0, 4]), (9000, [0])):
            expected = taken(reference, x, chunk, chosen, sent, 2.0)
            got = taken(cpu, x, chunk, chosen, sent, 2.0, threads=threads, module=module)
            for mine, theirs in zip(got, expected, strict=True):
                assert_same_bits(mine, theirs)


@every
def test_nothing_is_taken_of_nothing(kernels: Any) -> None:
    assert [len(out) for out in taken(kernels, torch.empty(0), 8, [], torch.float32)] == [0, 0, 0, 0]


@every
@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"chunk": 0}, ValueError, "chunk must be at least 1"),
        ({"scale": 0.3}, ValueError, "scale must be a power of two"),
        ({"scale": float("inf")}, ValueError, "scale must be a power of two"),
        ({"chosen": torch.tensor([0, 3])}, ValueError, r"index 3 of part 0 is outside \[0, chunks=3\)"),
        ({"chosen": torch.tensor([1, 1])}, ValueError, "chosen chunks must ascend, got 1 before 1"),
        ({"chosen": torch.tensor([0, 1]).int()}, TypeError, "chosen must be int64"),
        ({"payload": torch.zeros(7)}, ValueError, "payload must be"),
        ({"payload": torch.zeros(8).double()}, TypeError, "payload must be torch.float32, or bfloat16"),
        ({"norms": torch.zeros(2).double()}, ValueError, "norms must be"),
        ({"norms": torch.zeros(3)}, TypeError, "norms must be"),
        ({"residual": torch.zeros(9)}, ValueError, "residual must be"),
        ({"next_residual": torch.zeros(10).double()}, TypeError, "next_residual must be"),
        ({"x": torch.zeros(10).int()}, TypeError, "x must be"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(
    kernels: Any, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    fitting = {
        "x": torch.zeros(10),
        "residual": torch.zeros(10),
        "chosen": torch.tensor([0, 2]),
        "payload": torch.zeros(8),
        "next_residual": torch.zeros(10),
        "norms": torch.zeros(3).double(),
        "chunk": 4,
    }
    kernels.take_chunks(**fitting)
    with pytest.raises(error, match=words):
        kernels.take_chunks(**{**fitting, **changes})


def test_every_implementation_can_be_chosen() -> None:
    found = []
    for implementation in ("reference", "native", "auto"):
        with kernels.use(implementation):
            norms = torch.zeros(3, dtype=torch.float64)
            ones = [torch.ones(5) for _ in range(3)]
            kernels.take_chunks(ones[0], ones[1], torch.tensor([1]), torch.zeros(2), ones[2], norms, chunk=2)
            found.append([norms.tolist(), ones[2].tolist()])
    assert found[0] == found[1] == found[2] == [[4.0, 0.0, 2.0], [2.0, 2.0, 0.0, 0.0, 2.0]]
