"""The lab unpickles nothing of others, evaluates no text, starts no shell, and opens ports for jobs and probes only."""

from __future__ import annotations

from pathlib import Path

from tests.dangers import found_in

LAB = Path(__file__).parents[1] / "src" / "gradsync_lab"
JOIN = "torch.distributed.init_process_group"
POOL = "its own processes on this machine, over pipes: an executor of the standard library, which pickles"
# What sources may do nevertheless, each with its reason.
ALLOWED = {
    ("bench/converge.py", "multiprocessing"): POOL,
    ("bench/converge.py", "concurrent.futures.ProcessPoolExecutor"): POOL,
    ("bench/measurement.py", JOIN): "a command that is a job of its own: the network of torch.distributed",
    ("bench/rank.py", JOIN): "a command that is a job of its own: the network of torch.distributed",
    ("cluster/cluster.py", "bind"): "looks for a free port on 127.0.0.1, without listening",
    ("cluster/keeper.py", "execvp"): "the command of a rank, inside a node's namespace, without a shell",
    ("faults/job.py", JOIN): "a small job on this machine, in which a fault is injected",
    ("faults/rank.py", "multiprocessing"): POOL,
    ("faults/rank.py", "torch.distributed.TCPStore"): "the store of that job, where rank 0 keeps it",
    ("faults/run.py", "multiprocessing"): POOL,
    ("fuzz/settings.py", "importlib.metadata.entry_points"): "the registry of schemes, as the library has it",
    ("fuzz/worker.py", "multiprocessing"): POOL,
    ("fuzz/worker.py", JOIN): "the job of a case, on this machine",
    ("fuzz/workers.py", "multiprocessing"): POOL,
    ("soak/train.py", JOIN): "a job under torchrun, on this machine or inside namespaces",
    ("soak/train.py", "torch.distributed.TCPStore"): "a connection to torchrun's store, to count its keys",
    ("cluster/store.py", "socket.create_server"): "the store at which a small job on this machine meets",
    ("cluster/probe.py", "socket.create_server"): "measures links inside namespaces, which nothing outside reaches",
}


def test_sources_run_no_code_from_data_and_open_few_ports() -> None:
    assert found_in(LAB).keys() == ALLOWED.keys(), "a new one needs another way, or a reason here"
