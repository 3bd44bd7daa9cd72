"""Nothing of the library unpickles, evaluates text, starts a shell or opens a port of its own.

Sources are searched, and a run is watched: Python tells an audit hook when something is unpickled, evaluated or bound.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.dangers import dangers, found_in
from tests.forked import run_on_two_ranks

ROOT = Path(__file__).parents[1]
# What sources may do nevertheless, each with its reason.
ALLOWED = {
    ("cli/world.py", "bind"): "asks whether an address is of this machine; nothing listens, and it is closed at once",
    ("cli/script.py", "runpy.run_path"): "the user's own script, which the command line names",
    ("cli/__init__.py", "import_module of a name"): "a command's module, from a table in the file",
    ("cli/extensions.py", "importlib.metadata.entry_points"): "commands of installed distributions, by a fixed group",
    ("compressors/expressions.py", "import_module of a name"): "the packages in a constant of the file",
    ("compressors/expressions.py", "importlib.metadata.entry_points"): "schemes and compressors of installed "
    "distributions, which the user chose to install; a plan gives a name in a fixed group, never an import path",
    ("diagnosis/two_ranks.py", "torch.distributed.init_process_group"): "the two ranks of `gradsync doctor`, a job of "
    "their own that torchrun starts on this machine",
    ("kernels/choice.py", "import_module of a name"): "a kernel's module, from the definition's own module",
}


def test_sources_run_no_code_from_data_and_open_no_port() -> None:
    found = found_in(ROOT / "src" / "gradsync")
    assert found.keys() == ALLOWED.keys(), "a new one needs another way, or a reason here"


def test_examples_do_no_more_than_join_the_job() -> None:
    assert {what for _, what in found_in(ROOT / "examples")} == {"torch.distributed.init_process_group"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", "pickle"),
        ("import os, _pickle as p", "_pickle"),
        ("def f():\n    from pickle import loads", "pickle"),
        ("from torch import multiprocessing", "torch.multiprocessing"),
        ("import torch\ntorch.hub.load('a', 'b')", "torch.hub"),
        ("import multiprocessing.pool", "multiprocessing"),
        ("from concurrent.futures import ProcessPoolExecutor as P\nP()", "concurrent.futures.ProcessPoolExecutor"),
        ("eval('1')", "eval"),
        ("run = exec", "exec"),
        ("compile(text, '', 'exec')", "compile"),
        ("import torch as t\nt.load('x')", "torch.load without weights_only=True"),
        ("from torch import load\nload('x')", "torch.load without weights_only=True"),
        ("import torch\ntorch.load('x', weights_only=False)", "weights_only=False"),
        ("import torch\ntorch.load('x', weights_only=wanted)", "weights_only=wanted"),
        ("import torch\nlist(map(torch.load, files))", "torch.load uncalled"),
        ("import numpy as np\nnp.load('x')", "numpy.load without allow_pickle=False"),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", "allow_pickle=True"),
        ("import torch.distributed as dist\ndist.all_gather_object(a, b)", "all_gather_object"),
        ("from torch.distributed import broadcast_object_list as b\nb([1])", "broadcast_object_list"),
        ("group.scatter_object_list(a)", "scatter_object_list"),
        ("import yaml\nyaml.load(text)", "yaml.load"),
        ("import subprocess\nsubprocess.run(text, shell=True)", "shell=True"),
        ("run(text, shell=wanted)", "shell=wanted"),
        ("import os\nos.system('ls')", "os.system"),
        ("from os import system", None),
        ("from os import system as s\ns('ls')", "os.system"),
        ("import os\nos.execvp('a', ['a'])", "execvp"),
        ("server.bind(('', 0))", "bind"),
        ("server.listen()", "listen"),
        ("import socket\nsocket.create_server(('', 0))", "socket.create_server"),
        ("from torch.distributed import TCPStore\nTCPStore('a', 0, is_master=True)", "torch.distributed.TCPStore"),
        ("from importlib import import_module\nimport_module(name)", "import_module of a name"),
        ("from importlib import import_module\nlist(map(import_module, names))", "import_module of a name"),
        ("from importlib import import_module\nimport_module('a.b')", None),
        ("import torch, re, socket\nre.compile('a')\nsocket.gethostname()\nmodel.eval()\ntorch.compile(model)", None),
        ("import numpy as np\nnp.load('x', allow_pickle=False)\nrun(['a'], shell=False)", None),
        ("import torch\ntorch.load('x', weights_only=True)\ncode = code.view(torch.uint8)", None),
    ],
)
def test_the_search_finds_each_kind_and_little_else(source: str, found: str | None) -> None:
    assert [what for _, what in dangers(source)] == ([] if found is None else [found])


WATCHED = """
import gc, json, os, sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

for name in [name for name in sys.modules if name.partition(".")[0] == "gradsync"]:
    del sys.modules[name]  # what this process is forked from has loaded; here it is watched

import gradsync
from tests.profiles import make_profile

OURS = str(Path(gradsync.__file__).parent)
CODE = ("exec", "compile", "code.__new__", "function.__new__", "marshal.loads")
OUTWARD = ("pickle.find_class", "socket.bind", "socket.connect", "socket.sendto", "os.system", "os.exec", "os.fork",
           "os.posix_spawn", "subprocess.Popen", "urllib.Request")
events, groups = Counter(), []


def hook(event, arguments):
    if event in CODE or event in OUTWARD:
        frame = nearest = sys._getframe(1)
        while frame and not frame.f_code.co_filename.startswith(OURS):
            frame = frame.f_back
        at = frame.f_code.co_qualname if frame else ""  # the nearest caller of ours
        if event in OUTWARD or frame is nearest:
            events[f"{event} {arguments[0]!r} at {at}" if event in OUTWARD else f"{event} at {at}"] += 1
        elif frame and round_ == 1:  # all modules are there: libraries define no more classes for us
            events[f"{event} for {at}"] += 1


def made(*arguments, helper=distributed_c10d._new_process_group_helper, **more):
    groups.append(arguments)
    return helper(*arguments, **more)


def listening():
    mine = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink() and os.path.exists(each)}
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path("/proc/net", kind).read_text().splitlines()[1:]]
    return sum(row[3] == "0A" and f"socket:[{row[9]}]" in mine for row in rows)


def trains(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.tensor([dist.get_rank(), 7])).sum().backward()
        optimizer.step()


def of_gradsync(model):
    plan = gradsync.planner.CompressingPlanner(gradsync.compressors.ErrorFeedback(gradsync.compressors.TopK(0.5)))
    handle = gradsync.attach(model, plan=plan)
    trains(model)
    state, path = handle.state_dict(), f"state{dist.get_rank()}"
    gradsync.state.save_file(state, path)
    handle.load_state_dict(gradsync.state.load_file(path))
    torch.save(state, path)
    handle.load_state_dict(torch.load(path, weights_only=True))
    checkpoint = handle.checkpoint(gather=True)
    checkpoint.load_state_dict(checkpoint.state_dict())
    handle.plan.save(path)
    plan = gradsync.Plan.load(path)
    make_profile().save(path)
    type(make_profile()).load(path)
    ports.append((listening() - first, len(groups)))
    handle.detach()
    handle = gradsync.attach(model, plan=plan)
    trains(model)
    handle.detach()


def of_ddp(model):
    trains(torch.nn.parallel.DistributedDataParallel(model))
    path = f"state{dist.get_rank()}"
    torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path, weights_only=True))
    ports.append((listening() - first, len(groups)))


def planted(model):
    of_gradsync(model)
    text = "import pickle, socket; eval('1'); pickle.loads(pickle.dumps(int)); s = socket.create_server(('', 0))"
    exec(compile(text, OURS + "/planted.py", "exec"), kept)
    ports[-1] = (listening() - first, len(groups))


dist.init_process_group("gloo")
first, ports, kept, round_ = listening(), [], {}, 0
distributed_c10d._new_process_group_helper = made
sys.addaudithook(hook)
for round_ in range(2):
    groups.clear()
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 1))
    {"gradsync": of_gradsync, "ddp": of_ddp, "planted": planted}[sys.argv[1]](model)
    gc.collect()
    left = listening() - first
found = {"events": events, "ports": ports, "left": left}
round_ = -1
print(json.dumps(found))
dist.destroy_process_group()
"""


def watched(what: str, folder: Path) -> list[dict[str, Any]]:
    """Returns what an audit hook and the kernel's list of sockets show of two rounds of training, by rank."""
    (folder / "watched.py").write_text(WATCHED, encoding="utf-8")
    said = run_on_two_ranks([sys.executable, str(folder / "watched.py"), what], folder, limit_s=90)
    return [json.loads(each) for each in said]


@pytest.mark.timeout(200)
def test_training_unpickles_evaluates_and_binds_no_more_than_with_ddp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    usual, ours = watched("ddp", tmp_path), watched("gradsync", tmp_path)
    for with_ddp, with_gradsync in zip(usual, ours, strict=True):
        more = Counter(with_gradsync["events"]) - Counter(with_ddp["events"])
        assert not more, more
        assert all(ports == 0 < groups for ports, groups in with_gradsync["ports"]), "groups share torch's port"
        assert with_gradsync["left"] == with_ddp["left"] == 0


@pytest.mark.timeout(200)
def test_the_watch_sees_what_is_planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for rank in watched("planted", tmp_path):
        seen = {each.partition(" ")[0] for each in rank["events"]}
        assert seen >= {"exec", "compile", "pickle.find_class", "socket.bind"}
        assert rank["ports"][-1][0] == 1, "gradsync's are closed by then"
