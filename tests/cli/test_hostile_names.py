"""Commands print names and errors as they are: without markup, emoji codes or codes that steer a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from hypothesis import given
from rich.console import Console
from rich.errors import MarkupError
from rich.table import Table
from typer.testing import CliRunner, Result

from gradsync import Plan
from gradsync.characterization.figures import characterize_footprints
from gradsync.characterization.footprint import Footprint, Shape
from gradsync.characterization.recording import save_recording
from gradsync.characterization.views import write_sparsity_page
from gradsync.cli import app
from gradsync.cli.console import LiteralConsole, beside, console, printable
from gradsync.plans.profile import Profile
from gradsync.tensors.bucket import TensorSpec, model_digest
from tests.hostile import NAMES, SAMPLES, STEERING, elements, squeezed
from tests.profiles import make_profile
from tests.quick import quickly

TRAINS = """
import torch
import torch.distributed as dist
import gradsync

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_parameter({name!r}, torch.nn.Parameter(torch.ones(4)))

    def forward(self):
        return sum(p.sum() for p in self.parameters())

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    model = Model()
    handle = gradsync.attach(model)
    for step in range(100):
        model().backward()
finally:
    dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (console, beside):
        monkeypatch.setattr(each, "_width", 400)


def said(*words: object, code: int = 0) -> str:
    """Returns what a command says, squeezed, once checked for its exit code and for codes that steer a terminal."""
    done: Result = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, f"{done.output}\n{done.exception!r}"
    assert not STEERING.search(done.output), repr(done.output)
    return squeezed(done.output)


def shown(name: str) -> str:
    """Returns a name as commands show it, squeezed; rich leaves out bells."""
    return squeezed(printable(name.replace("\x07", "")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder whose path reads as the end of markup."""
    folder = tmp_path / "[" / "]"
    folder.mkdir(parents=True)
    return folder


def named(name: str) -> Profile:
    """Returns a profile whose parameters have the name in theirs."""
    profile = make_profile()
    parameters = tuple(each.model_copy(update={"name": f"{name}{each.name}"}) for each in profile.parameters)
    specs = {each.name: TensorSpec(each.shape, getattr(torch, each.dtype)) for each in parameters}
    return profile.model_copy(update={"parameters": parameters, "model": model_digest(specs)})


@given(name=NAMES)
def test_consoles_print_any_text_as_it_is(name: str) -> None:
    table = Table(name, title=name, caption=name)
    table.add_row(name)
    literal = LiteralConsole()
    literal.width, literal.file = 1000, io.StringIO()
    literal.print(name, style="red", soft_wrap=True)
    literal.print(table)
    text = literal.file.getvalue()
    assert not STEERING.search(text)
    assert shown(name) in squeezed(text)
    if name.isprintable():
        assert squeezed(text).count(shown(name)) >= 5


def test_other_consoles_would_not() -> None:
    usual = Console(file=io.StringIO())
    usual.print("[red]x[/red] :skull: \x1b]0;title")
    text = usual.file.getvalue()
    assert "[red]" not in text and ":skull:" not in text and STEERING.search(text)
    with pytest.raises(MarkupError):
        usual.print("[/]")


@pytest.mark.parametrize("name", SAMPLES, ids=range(len(SAMPLES)))
def test_sparse_tensors_are_shown_with_their_names(name: str, folder: Path) -> None:
    sparse, full = torch.zeros(16), torch.ones(16)
    sparse[3] = 1.0
    save_recording(
        folder, [{n: Footprint.of(g, Shape((16,))) for n, g in ((name, sparse), (f"{name}2", full))}], rank=0, ranks=1
    )
    files = folder / "a.json", folder / "b.html"
    text = said("characterize", "--recorded", folder, "--json", files[0], "--plot", files[1])
    assert all(shown(str(each)) in text for each in files)
    assert f"1tensors({shown(name)}2)" in text
    if name.isprintable():
        assert f"{shown(name)},16elements" in text


@pytest.mark.parametrize("name", SAMPLES, ids=range(len(SAMPLES)))
def test_plans_are_made_and_explained_by_parameters_names(name: str, folder: Path) -> None:
    named(name).save(folder / "profile.json")
    made = said("plan", folder / "profile.json", "-o", folder / "plan.json")
    assert shown(f"{name}table") in made and shown(f"Plan: {folder / 'plan.json'}") in made
    assert {each for bucket in Plan.load(folder / "plan.json").buckets for each in bucket.names} >= {f"{name}table"}
    assert shown(f"{name}table") in said("explain", folder / "plan.json", "--profile", folder / "profile.json")


@pytest.mark.parametrize("name", SAMPLES, ids=range(len(SAMPLES)))
def test_errors_repeat_what_was_given(name: str, folder: Path) -> None:
    make_profile().save(folder / "profile.json")
    name = "".join(c for c in name if c.isprintable() and c != ",")
    absent = f"{name.replace('/', '')}.json"
    assert shown(absent) in said("plan", folder / absent, code=2)
    assert shown(repr(name)) in said("plan", folder / "profile.json", "--allow", name, code=2)
    assert shown(repr(name)) in said("measure", "--workload", "lstm", "--compressor", name, code=2)
    assert shown(str(folder / absent)) in said("characterize", "--recorded", folder / absent, code=2)


@pytest.mark.parametrize("name", SAMPLES, ids=range(len(SAMPLES)))
def test_an_error_of_a_script_is_told_as_python_tells_it(name: str, folder: Path) -> None:
    name = "".join(c for c in name if c.isprintable())
    script = folder / "train.py"
    script.write_text(f"raise RuntimeError({name!r})", encoding="utf-8")
    assert shown(f"RuntimeError: {name}") in said("measure", "-o", folder / "a.json", "--", script, code=1)
    assert shown(f"RuntimeError: {name}") in said("characterize", "--out", folder, "--", script, code=1)


@pytest.mark.parametrize("name", SAMPLES, ids=range(len(SAMPLES)))
def test_a_measured_job_is_described_by_parameters_names(name: str, folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(TRAINS.format(name=name.replace(".", "")), encoding="utf-8")
    with quickly():
        text = said("measure", "--steps", "1", "--warmup", "2", "-o", folder / "profile.json", "--", script)
    assert f"({shown(name.replace('.', ''))})" in text and shown(f"Profile: {folder / 'profile.json'}") in text


def test_the_page_of_plots_has_the_same_elements_whatever_the_names(tmp_path: Path) -> None:
    gradient = torch.zeros(16)
    gradient[3] = 1.0

    def page(name: str) -> str:
        step = {name: Footprint.of(gradient, Shape((16,))), f"{name}2": Footprint.of(torch.ones(16), Shape((16,)))}
        write_sparsity_page(characterize_footprints([[step]]), tmp_path / "page.html")
        return (tmp_path / "page.html").read_text(encoding="utf-8")

    usual = elements(page("a"))
    assert len(usual) > 10
    for name in SAMPLES:
        assert elements(page(name)) == usual, name
