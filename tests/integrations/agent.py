"""Torchrun's agent as a server: `python agent.py MODULE ...` starts ranks as forks of a process with these modules.

It reads launches from stdin, one line of JSON each ("script", "arguments", "ranks"), and prints what comes of each:
"failed", "stdout" and "stderr". torchrun itself starts every rank anew, and importing a framework takes seconds.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import runpy
import sys
import tempfile
import traceback
import uuid
from pathlib import Path


def _main(script: str, arguments: list[str]) -> None:
    """Runs the script on a rank, as the interpreter would."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        traceback.print_exc()
        raise
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()


def _launched(script: str, arguments: list[str], ranks: int) -> dict[str, object]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(folder, redirects=Std.ALL),
        )
        try:
            elastic_launch(config, _main)(script, arguments)
            failed = False
        except ChildFailedError:
            failed = True
        # Rank 0's last: its last line is looked at.
        said = {out: sorted(Path(folder).rglob(f"{out}.log"), reverse=True) for out in ("stdout", "stderr")}
        texts = {out: "".join(path.read_text(encoding="utf-8") for path in paths) for out, paths in said.items()}
    return {"failed": failed, **texts}


def main() -> None:
    multiprocessing.set_forkserver_preload(sys.argv[1:])
    for line in sys.stdin:
        print(json.dumps(_launched(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
