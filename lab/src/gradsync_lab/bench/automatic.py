"""Methods that first measure the job and then plan: `auto_lossy` and its like, and other systems' searches.

`NAME_ENDING` is a compressor or dense scheme by its name, and behind it the search that plans for it, as `NAME_cuts`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from gradsync.compressors import BlockInt, ErrorFeedback, TopK
from gradsync.compressors import names as compressors
from gradsync.planner import AveragingPlanner, Search, candidate_plans
from gradsync.planner.default.named import VOTES, is_lossy, lossy_of
from gradsync.planner.search.ways import Constraints
from gradsync.schemes import HalfPrecision, PowerSGD, Scheme
from gradsync.schemes import coarse_names as coarse
from gradsync.tuning.auto import AutoPlanner

from ..rivals.rival_plans import (
    CountedCuts,
    FreeRatio,
    LazyPlans,
    best_cuts_plans,
    bytecomp_plans,
    byteps_plans,
    layerwise_plans,
    mergecomp_plans,
    mg_wfbp_plans,
    secopa_plans,
)
from .averaging import USUAL_MOMENTUM_EVERY

MOST_ERROR = 0.1  # error that `auto_lossy` may make, over the gradient's norm; 16 bits make less
CHUNKS = coarse.named(0.1)  # sending a tenth of the chunks holds back at most 9 steps' gradients
CHUNKS_BF16 = replace(CHUNKS, **coarse.VARIANTS["bf16"])
MOST_DELAY_FROZEN = 10.0
MOST_DELAY = 1.0  # steps' gradients that error feedback may hold back: an error of 0.7 in each step


@dataclass(frozen=True)
class Automatic:
    """A benchmark method that plans its exchange from measurements: `planner` makes its planner for a number of ranks.

    `lossy` names the compressor or dense scheme of its plans, if they may use exactly one.
    """

    planner: Callable[[int], AutoPlanner]
    exact: bool = False
    lossy: str | None = None


def _planner(
    constraints: Constraints,
    world_size: int,
    search: Search = candidate_plans,
    averaging: AveragingPlanner | None = None,
) -> AutoPlanner:
    """Returns a planner that raises an error where it finds no plan, so that no method silently trains by default."""
    return AutoPlanner(constraints, search=search, must_plan=True, averaging=averaging)


def in_shards(planner: Callable[[int], AutoPlanner], world_size: int) -> AutoPlanner:
    """Returns the planner without what a model in shards cannot have: averages of parameters, and frozen chunks."""
    made = planner(world_size)
    lossy = tuple(each for each in made.constraints.lossy if not (isinstance(each, Scheme) and each.traits.freezes))
    return _planner(replace(made.constraints, lossy=lossy), world_size, made.search)


AUTOMATIC: dict[str, Automatic] = {
    "auto_lossy": Automatic(  # all ways that lose little, averaging of parameters in groups too
        partial(
            _planner,
            Constraints(
                (
                    HalfPrecision(values="bfloat16"),
                    ErrorFeedback(BlockInt(8)),
                    PowerSGD(2),
                    ErrorFeedback(TopK(0.01)),
                    CHUNKS,
                    CHUNKS_BF16,
                ),
                most_error=MOST_ERROR,
                most_delay=MOST_DELAY,
                most_delay_frozen=MOST_DELAY_FROZEN,
            ),
            averaging=AveragingPlanner(momentum_every=USUAL_MOMENTUM_EVERY),
        )
    ),
    "auto_averages": Automatic(  # exact averages of gradients, or averages of parameters in groups
        partial(_planner, Constraints(), averaging=AveragingPlanner(momentum_every=USUAL_MOMENTUM_EVERY))
    ),
    "mg_wfbp": Automatic(partial(_planner, Constraints(), search=mg_wfbp_plans), exact=True),
    "lazy": Automatic(partial(_planner, Constraints(), search=LazyPlans()), exact=True),
    "lazy_bf16": Automatic(
        partial(_planner, Constraints((HalfPrecision(values="bfloat16"),), always=True), search=LazyPlans()),
        lossy="bf16",
    ),
    "csc_free": Automatic(partial(_planner, Constraints((CHUNKS,)), search=FreeRatio())),
}

CUTS = "cuts"
EVERYTHING: dict[str, Search] = {  # searches that compress all they may; for `cuts` with a number see `parted`
    "layerwise": layerwise_plans,
    CUTS: candidate_plans,
    "mergecomp": mergecomp_plans,
    "lazy": LazyPlans(),
}
CHOSEN: dict[str, Search] = {  # searches that choose which gradients to compress; routes take compressors only
    "secopa": secopa_plans,
    "byteps": byteps_plans,
    "bytecomp": bytecomp_plans,
}
ENDINGS = (*EVERYTHING, *CHOSEN)
ENDINGS_IN_WORDS = (
    f"{', '.join(f'NAME_{ending}' for ending in ENDINGS)}, and NAME_{CUTS}Y with exactly Y buckets of compressed "
    "gradients, where NAME is bf16, powersgd2, or a compressor"
)


@dataclass(frozen=True)
class NameParts:
    """The parts of a name as bf16_cuts3: compressor or dense scheme, search for a plan, and number of buckets."""

    lossy: str
    ending: str
    count: int | None = None

    @property
    def search(self) -> Search:
        if self.count is not None:
            return CountedCuts(self.count)
        if self.ending == CUTS and _matrices_only(self.lossy):
            return best_cuts_plans  # gradsync's search has only buckets of gradients that are ready one after another
        return {**EVERYTHING, **CHOSEN}[self.ending]

    def planner(self, world_size: int, momentum: float) -> AutoPlanner:
        by_name = self.ending in CHOSEN and compressors.is_known(self.lossy)  # bf16 is a scheme, too
        lossy = (
            compressors.named(self.lossy, momentum=momentum, summands=world_size).trained
            if by_name
            else lossy_of(self.lossy, world_size, momentum)
        )
        constraints = Constraints(
            (lossy,),
            always=self.ending in EVERYTHING,
            matrices_only=_matrices_only(self.lossy),
        )
        return _planner(constraints, world_size, self.search)


def parted(name: str) -> NameParts | None:
    """Splits a name into compressor or scheme, search for a plan and number of buckets, if any; None for other names.

    Raises:
        ValueError: the search after a compressor or scheme is unknown or cannot use it, or the number of buckets is
            below 1.
    """
    if is_lossy(name):
        return None
    stem, _, ending = name.rpartition("_")
    if not is_lossy(stem):
        return None
    lossy_of(stem, compressors.USUAL_RANKS)  # raises for a number that its compressor does not take
    if ending in CHOSEN and not compressors.is_known(stem):
        raise ValueError(f"{name!r}: {stem} is a scheme without payloads; {ending} needs a compressor")
    if ending in CHOSEN and stem in VOTES:
        raise ValueError(
            f"{name!r}: {stem} needs a learning rate for votes, which does not suit the gradients that {ending} leaves "
            f"dense; use {', '.join(EVERYTHING)}"
        )
    if ending in ENDINGS:
        return NameParts(stem, ending)
    if not ending.startswith(CUTS):
        raise ValueError(f"unknown search {ending!r} in the method {name!r}; there are {ENDINGS_IN_WORDS}")
    number = ending.removeprefix(CUTS)
    if not re.fullmatch(r"[1-9]\d*", number):
        raise ValueError(f"{name!r}: behind {CUTS} there must be a whole number of buckets from 1 on, got {number!r}")
    return NameParts(stem, CUTS, int(number))


def automatic(name: str, momentum: float = 0.0) -> Automatic | None:
    """Returns the method of this name that plans its exchange from measurements; None for other names.

    Args:
        momentum: the momentum that `fit_optimizer` took from the optimiser.

    Raises:
        ValueError: the search in the name is unknown or cannot use its compressor, or no bucket is asked for.
    """
    if name in AUTOMATIC:
        return AUTOMATIC[name]
    if (waits := re.fullmatch(r"lazy_(\d+)kb", name)) is not None:
        return Automatic(partial(_planner, Constraints(), search=LazyPlans(1e3 * int(waits[1]))), exact=True)
    found = parted(name)
    if found is None:
        return None
    return Automatic(partial(found.planner, momentum=momentum), lossy=found.lossy)


def _matrices_only(name: str) -> bool:
    return compressors.is_known(name) and compressors.named(name).family.matrices_only
