"""Records of kernels have their times, and none where a kernel's results differ from its definition."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gradsync.cli import app
from gradsync.kernels import cpu, device, reference
from gradsync_lab.bench import kernels
from gradsync_lab.bench.kernels import KernelsSpec, Moved, agree, measured, run_kernels
from gradsync_lab.bench.works import CASES, WORK, Work
from gradsync_lab.report.record import Record
from tests.kernels.on_device import DEVICE

SMALL = {"size": 3_000, "nnz": 500, "density": 0.05}
BYTES = {  # the least bytes to read and write: indices, values, both outputs, ...
    "join_columns": 2 * 500 * 512 * 4,
    "count_bits": -(-3_000 // 64) * 8,
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every kernel once, on small inputs."""
    once = dict(CASES)
    cases = tuple((kernel, {k: SMALL.get(k, v) for k, v in params.items()}) for kernel, params in once.items())
    monkeypatch.setattr(kernels, "CASES", cases)
    monkeypatch.setattr(kernels, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(kernels, "MIN_SAMPLE_S", 1e-6)


def test_every_kernel_is_measured_and_no_other() -> None:
    assert {kernel for kernel, _ in CASES} == set(WORK)
    assert all(hasattr(cpu, kernel) and hasattr(reference, kernel) for kernel in WORK)


@pytest.mark.usefixtures("tiny")
def test_quick_run_leaves_a_record_of_every_kernel() -> None:
    done = CliRunner().invoke(app, ["bench", "kernels", "--quick", "--json", "-", "--require", "count_bits<=1e"])
    assert done.exit_code == 2, "a requirement that cannot be read is refused first"
    done = CliRunner().invoke(app, ["bench", "kernels", "--quick", "--json", "-"])
    assert done.exit_code == 0, done.output
    records = [Record.model_validate(row) for row in json.loads(done.stdout)]
    assert [r.subject for r in records] == [kernel for kernel, _ in kernels.CASES]
    for record in records:
        assert (record.case, record.metric, record.baseline, record.failed) == ("kernels", "kernel_s", "torch", None)
        assert record.repeats == 5 and record.ratio is not None and record.aa is not None
        assert record.subject_s is not None and record.bound_s is not None
        assert record.params["bound_ratio"] == pytest.approx(record.subject_s.median / record.bound_s)
        assert record.params["kernel"] == record.subject and record.params["threads"] == 1
        if record.subject in BYTES:
            assert record.bound_s * record.params["copy_bytes_per_s"] == pytest.approx(BYTES[record.subject])


@pytest.mark.usefixtures("tiny")
def test_only_the_named_kernels_run_and_torch_keeps_its_threads() -> None:
    events: list[dict[str, Any]] = []
    before = torch.get_num_threads()
    records = run_kernels(KernelsSpec(kernels=("count_bits", "sum_rows"), threads=2, repeats=5), events.append)
    assert [r.subject for r in records] == [e["kernel"] for e in events] == ["sum_rows", "count_bits"]
    assert torch.get_num_threads() == before


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "kernel", ["unite_rows", "decode_bitmap", "partition_hashed", "owned_by_hash", "hierarchical_hash", "top_k"]
)
@pytest.mark.usefixtures("tiny")
def test_kernels_for_cuda_do_on_the_same_numbers_what_their_definitions_do_on_the_cpu(kernel: str) -> None:
    params = dict(kernels.CASES)[kernel]
    params |= {"dim": 16} if "dim" in params else {}  # long rows take the interpreter long
    with Moved(DEVICE.type):
        work = WORK[kernel](torch.Generator().manual_seed(0), **params)
    assert all(out.device.type == DEVICE.type for out in work.outs)
    assert agree(work, WORK[kernel](torch.Generator().manual_seed(0), **params), device.load())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    done = CliRunner().invoke(app, ["bench", "kernels", "--device", "cuda"])
    assert done.exit_code == 2
    assert "device cuda needs a GPU" in done.output


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.usefixtures("tiny")
def test_kernels_are_measured_on_a_gpu() -> None:
    done = CliRunner().invoke(app, ["bench", "kernels", "--device", "cuda", "--quick", "--json", "-"])
    assert done.exit_code == 0, done.output
    for record in [Record.model_validate(row) for row in json.loads(done.stdout)]:
        assert record.failed is None and record.environment["device"] == torch.cuda.get_device_name()


def test_an_unknown_kernel_is_refused() -> None:
    done = CliRunner().invoke(app, ["bench", "kernels", "--kernels", "sum_rows,sort_rows"])
    assert done.exit_code == 2
    assert "unknown kernel 'sort_rows'" in done.output


def test_a_kernel_that_differs_from_its_definition_has_no_times() -> None:
    out = torch.zeros(3)

    def run(module: ModuleType) -> None:
        out.fill_(1.0 if module is cpu else 2.0)

    record = measured("count_bits", {}, Work(run, [out], 12), lambda: None, KernelsSpec(repeats=5), {})
    assert record.failed is not None and "differ" in record.failed
    assert record.subject_s is None and record.ratio is None


EVEN = 1 << 16  # a size that the usual code can divide evenly
USUAL = [
    (kernel, params | {"size": EVEN} | ({"sections": 4} if "sections" in params else {}))
    for kernel, params in CASES
    if kernel in ("top_k", "squared_norms", "take_chunks", "hadamard", "pack_signs", "quantize", "dequantize")
]


@pytest.mark.parametrize(("kernel", "params"), USUAL, ids=str)
def test_what_torch_is_timed_by_does_what_the_kernel_does(kernel: str, params: dict[str, Any]) -> None:
    work = WORK[kernel](torch.Generator().manual_seed(0), **params)
    if work.usual is None:
        assert kernel == "dequantize" and params.get("format") != "e4m3", "torch has no shorter way"
        return
    expected, got = (written(kernel, params, work, run) for run in (partial(work.run, reference), work.usual))
    # Another draw rounds to the other neighbour; another rounding of the scale moves what is half-way between two.
    drawn = params.get("stochastic") or params.get("format") == "exponent"
    for mine, theirs in zip(got, expected, strict=True):
        far = ~torch.isclose(mine, theirs, rtol=1e-5, atol=1e-5)
        assert drawn or far.double().mean() < 1e-3
        assert ((mine - theirs).abs() <= 1.01 * theirs.abs().clamp(min=1.0))[far].all(), "one level at most"


def written(kernel: str, params: dict[str, Any], work: Work, run: Callable[[], object]) -> list[torch.Tensor]:
    """Returns a run's results as float64 in a comparable form: choices sorted, codes as levels, random rotations as
    norms.
    """
    for out in work.outs:
        out.zero_()
    run()
    outs = [out.double() for out in work.outs]
    if kernel == "top_k":
        return [outs[0].sort().values, outs[1].sort().values, *outs[2:]]
    if kernel == "hadamard":
        return [outs[0].norm()]
    if kernel == "quantize" and "format" not in params:
        bits, codes = params["bits"], work.outs[0]
        planes = [codes >> shift & (2**bits - 1) for shift in range(0, 8, bits)]
        return [codes.view(torch.int8).double() if bits == 8 else torch.cat(planes).double(), outs[1]]
    if kernel == "quantize":  # codes of 8 bits have the order of their magnitudes
        return [(work.outs[0] & 0x7F).double(), (work.outs[0] >> 7).double(), outs[1]]
    return outs


@pytest.mark.parametrize(("bound", "code"), [("1000", 0), ("0.000001", 1)])
@pytest.mark.usefixtures("tiny")
def test_a_bound_on_a_kernel_is_judged(bound: str, code: int) -> None:
    arguments = ["--kernels", "decode_bitmap", "--quick", "--require", f"decode_bitmap<={bound}"]
    done = CliRunner().invoke(app, ["bench", "kernels", *arguments])
    assert done.exit_code == code, done.output
