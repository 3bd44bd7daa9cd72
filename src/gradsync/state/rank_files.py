"""State of all ranks in a folder, with a safetensors file for each rank: `gradsync-rank-3-of-8.safetensors`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..inputs.files import regular_file
from .files import save_file
from .shards import place_of

_NAME = re.compile(r"gradsync-rank-([0-9]{1,9})-of-([0-9]{1,9})\.safetensors")


class MissingStateError(ValueError):
    """An error: a checkpoint has no state of gradsync, or lacks that of a rank whose state this rank must load."""


def write_rank(folder: str | os.PathLike[str], state: Mapping[str, Any]) -> Path:
    """Writes one rank's `handle.state_dict()` to its file in the folder, and returns the file's path.

    The folder is made if it is missing. The file gets its name when it is complete. Files of another number of ranks,
    as an earlier job may have left there, are removed by the rank that would read them. Of a model in shards all ranks
    are counted, replica by replica.

    Raises:
        TypeError: for a state that holds anything else than dicts, lists, tensors, bytes, numbers, text and None.
        OSError: if the folder cannot be written.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    rank, world = place_of(state)
    path = place / f"gradsync-rank-{rank}-of-{world}.safetensors"
    unfinished = path.with_suffix(".unfinished")
    save_file(state, unfinished)
    unfinished.replace(path)
    for (number, of), other in _files(place).items():
        if of != world and number % world == rank:
            other.unlink(missing_ok=True)
    return path


def read_ranks(folder: str | os.PathLike[str], rank: int, world: int) -> dict[str, bytes]:
    """Returns the files of saved state that rank `rank` of `world` ranks must load, as {"rank 3": bytes of the file}.

    Another number of ranks may have saved: rank r loads the files of r, r + world, r + 2 world, ...; none if fewer
    ranks saved. `from_bytes` reads the contents.

    Raises:
        MissingStateError: if the folder has no such file, or not all of them.
        ValueError: if it has files of several numbers of ranks, or a file cannot be read.
    """
    place = Path(folder)
    found = _files(place)
    worlds = sorted({of for _, of in found})
    if not worlds:
        raise MissingStateError(
            f"{str(place)!r} has no state of gradsync; expected files such as gradsync-rank-0-of-{world}.safetensors, "
            "one for each rank that saved. Load the folder that handle.checkpoint().save(folder) wrote; where nodes "
            "share no disk, copy each rank's file to its node"
        )
    if len(worlds) > 1:
        raise ValueError(
            f"{str(place)!r} has state of {' and of '.join(map(str, worlds))} ranks; expected that of one job: remove "
            "the files gradsync-rank-*-of-N.safetensors of the other one"
        )
    wanted = range(rank, worlds[0], world)
    missing = [number for number in wanted if (number, worlds[0]) not in found]
    if missing:
        names = ", ".join(f"gradsync-rank-{number}-of-{worlds[0]}.safetensors" for number in missing)
        raise MissingStateError(
            f"{str(place)!r} lacks {names}, which rank {rank} takes over: copy each rank's file there. Every "
            "rank must call what saves (as Accelerate's save_state()), not rank 0 alone"
        )
    return {f"rank {number}": _content(found[number, worlds[0]]) for number in wanted}


def has_ranks(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has a file of gradsync's state of any rank; False where there is no folder."""
    return bool(_files(Path(folder)))


def _files(folder: Path) -> dict[tuple[int, int], Path]:
    """Returns the state files in a folder by (rank, number of ranks); none where there is no folder."""
    if not folder.is_dir():
        return {}
    named = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return {(int(match[1]), int(match[2])): path for match, path in named if match is not None}


def _content(path: Path) -> bytes:
    try:
        return regular_file(path, "state").read_bytes()
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from None
