"""The choice of an implementation: explicit requests are met or refused, the automatic choice logs its fallback."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from gradsync import kernels
from gradsync.kernels import choice, cpu, device, native, reference

PARTS = [(torch.tensor([2, 0, 2]), torch.ones(3, 4))]


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the native modules impossible to import."""

    def import_module(name: str) -> ModuleType:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(choice, "_logged", set())
    native.load.cache_clear()
    device.load.cache_clear()
    yield
    native.load.cache_clear()
    device.load.cache_clear()


@pytest.mark.interpreted
def test_what_the_host_of_a_card_computes_does_not_go_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [torch.ones(2)]
    with kernels.use("triton"):
        monkeypatch.setattr(device, "is_present", lambda: False)
        assert choice.pick("narrow", here) is choice.version("triton", "narrow"), "in the interpreter"
        monkeypatch.setattr(device, "is_present", lambda: True)
        assert choice.pick("narrow", here) is choice.version("cpu", "narrow")


def test_auto_is_native_where_it_is_built() -> None:
    assert kernels.active() == "native"


def test_use_lasts_until_the_end_of_its_block() -> None:
    with kernels.use("reference"):
        assert kernels.active() == "reference"
    assert kernels.active() == "native"


def test_use_without_a_block_stays() -> None:
    restore = kernels.use("reference")
    assert kernels.active() == "reference"
    restore.close()


def test_explicit_native_that_is_not_built_raises_with_the_reason(not_built: None) -> None:
    with pytest.raises(ImportError, match=r"No module named 'gradsync\.kernels\._kernels_base'.*install a C\+\+17"):
        kernels.use("native")


def test_auto_falls_back_and_says_so_once(not_built: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="gradsync.kernels"):
        rows, values = kernels.sum_rows(PARTS, 3)
        kernels.sum_rows(PARTS, 3)
    assert (rows.tolist(), values[:, 0].tolist()) == ([0, 2], [1.0, 2.0])
    assert kernels.active() == "reference"
    assert len(caplog.records) == 1
    said = caplog.records[0].getMessage()
    assert said.startswith("gradsync is slow here: ") and "install --no-cache-dir" in said


@pytest.mark.parametrize(("installed", "told"), [(False, 1), (True, 0)])
def test_missing_kernels_are_told_when_they_would_be_imported(
    installed: bool, told: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "is_installed", lambda: installed)
    monkeypatch.setattr(choice, "_logged", set())
    for _ in range(2):
        importlib.reload(kernels)
    assert [record.getMessage().startswith("gradsync is slow here") for record in caplog.records] == [True] * told


def test_each_missing_implementation_is_told(not_built: None, caplog: pytest.LogCaptureFixture) -> None:
    kernels.active()
    choice._on_device("count_bits")
    assert [" native " in each.getMessage() for each in caplog.records] == [True, False]


def test_explicit_triton_that_cannot_be_imported_raises_with_the_reason(not_built: None) -> None:
    with pytest.raises(ImportError, match=r"No module named 'gradsync\.kernels\.triton'.*install torch for CUDA"):
        kernels.use("triton")
    assert kernels.active() == "reference", "the choice stays as it was"


def test_without_triton_tensors_on_a_device_go_to_the_reference_which_says_so_once(
    not_built: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "supports", lambda tensors: True)
    with caplog.at_level(logging.WARNING, logger="gradsync.kernels"):
        assert choice.pick("count_bits", [torch.zeros(1)]) is reference.count_bits
        kernels.count_bits(torch.tensor([7]))
    assert [record.getMessage().endswith("which brings Triton") for record in caplog.records] == [True]


def test_auto_takes_the_reference_for_a_dtype_native_lacks() -> None:
    parts = [(PARTS[0][0], PARTS[0][1].to(torch.float8_e5m2))]
    _, values = kernels.sum_rows(parts, 3)
    assert values.dtype == torch.float8_e5m2
    with kernels.use("native"), pytest.raises(TypeError, match="got torch.float8_e5m2"):
        kernels.sum_rows(parts, 3)


def test_an_unknown_implementation_is_named() -> None:
    with pytest.raises(ValueError, match="got 'cuda'"):
        kernels.use("cuda")


def test_the_public_functions_are_all_that_is_dispatched() -> None:
    public = {name for name, value in vars(kernels).items() if hasattr(value, "reference")}
    assert public == set(choice.KERNELS) and len(public) == 39
    for name, kernel in choice.KERNELS.items():
        assert getattr(kernels, name) is kernel and getattr(reference, name) is kernel.reference is not kernel


@pytest.mark.parametrize("kernel", choice.KERNELS)
@pytest.mark.parametrize("versions", [pytest.param("cpu"), pytest.param("triton", marks=pytest.mark.interpreted)])
def test_a_version_has_the_parameters_of_the_definition(versions: str, kernel: str) -> None:
    module = importlib.import_module(f"gradsync.kernels.{versions}")
    assert versions == "triton" or getattr(cpu, kernel) is not getattr(reference, kernel), "native has them all"
    found, expected = (inspect.signature(getattr(made, kernel)).parameters for made in (module, kernels))
    assert [(p.name, p.kind, p.default) for p in found.values()] == [
        (p.name, p.kind, p.default) for p in expected.values()
    ]


def test_what_is_no_kernel_is_not_in_the_versions() -> None:
    for package in (cpu, reference):
        with pytest.raises(AttributeError, match="has no kernel 'sort_rows'"):
            _ = package.sort_rows


@pytest.mark.parametrize(
    ("call", "tensors", "entries"),
    [
        (lambda x: kernels.sum_rows([(x, x), (x, x)], num_rows=7), 4, 7),
        (lambda x: kernels.join_elements([kernels.PackedPositions(x, 1, 8)], [x, x], 0, x), 4, 3),
        (lambda x: kernels.top_k(x, indices=x, values=x, residual=None), 3, 3),
        (lambda x: kernels.nonzero_rows(x.view(1, 3)), 1, 1),
        (lambda x: kernels.owned_by_hash(5, 2, 0), 0, 5),
        (lambda x: kernels.owned_by_hash(5, 2, 0, device=x.device), 1, 5),
    ],
)
def test_tensors_and_sizes_decide_wherever_they_stand(
    monkeypatch: pytest.MonkeyPatch, call, tensors: int, entries: int
) -> None:
    asked = []
    monkeypatch.setattr(choice, "pick", lambda kernel, *about: asked.append(about) or (lambda *a, **k: None))
    call(torch.zeros(3))
    assert [(len(found), size) for found, size in asked] == [(tensors, entries)]


def test_arguments_that_hold_no_tensors_are_left_to_the_kernel() -> None:
    """A text is made of texts for ever, and a device may be named by one."""
    counts = [len(part) for part in kernels.owned_by_hash(10, 2, 0, device="cpu")]
    assert sum(counts) == 10
    for wrong in ("abc", 3):
        with pytest.raises((TypeError, AttributeError)):
            kernels.narrow(wrong, torch.zeros(3))
