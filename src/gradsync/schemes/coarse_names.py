"""Names of coarse-grained schemes in records and in `gradsync bench`: `csc0.1`, `csc0.1_bf16_exact`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from . import CoarseGrained, HalfPrecision

CHUNK = 1 << 15  # elements; tensors with fewer travel dense
MOMENTUM = 0.9

VARIANTS: dict[
    str, dict[str, Any]
] = {  # settings that a word behind the ratio changes; the others are those that did best
    "bf16": {"scheme": HalfPrecision(values="bfloat16")},
    "fp16": {"scheme": HalfPrecision(values="float16")},
    "exact": {"choice": "exact"},
    "norm": {"scoring": "norm"},
    "relative": {"scoring": "relative"},
    "4k": {"chunk": 1 << 12},  # for models of small tensors
    "moving": {"freeze": False},
    "fading": {"freeze": False, "history": MOMENTUM},
    "dropped": {"freeze": False, "history": 0.0},
    "warm": {"warmup": (1.0, 0.5, 0.25), "steps_per_ratio": 20},
    "dgc": {"freeze": False, "momentum": MOMENTUM},
    "unmasked": {"freeze": False, "momentum": MOMENTUM, "masking": False},
}
USUAL = ("csc0.05", "csc0.1", "csc0.25", "csc0.1_bf16")  # the names that benchmarks run by default
NAMES_IN_WORDS = f"{', '.join(USUAL)}, with other ratios too, and behind them any of _{', _'.join(VARIANTS)}"


def named(ratio: float) -> CoarseGrained:
    """Returns the scheme of the name `csc<ratio>`: in each step it sums this share of a bucket's chunks.

    A chunk is a run of elements that is sent, or kept for a later step, as a whole. The scheme prefers chunks of large
    norm in which ranks do not cancel out. In chunks not sent, weights and optimiser state stay as they are.
    """
    return CoarseGrained(ratio=ratio, chunk=CHUNK, scoring="agreement", freeze=True)


def coarse(name: str, momentum: float) -> CoarseGrained | None:
    """Returns the scheme of a name such as `csc0.1_bf16`, which sums some chunks; None for names of another form.

    Args:
        name: `csc`, the share of chunks to send, in (0, 1], and any keys of `VARIANTS`, joined by underscores.
        momentum: the optimiser's coefficient, for schemes that apply momentum in place of the optimiser.

    Raises:
        ValueError: for a share outside (0, 1], or words that exclude each other, as in `csc0.1_fading_unmasked`.
    """
    form = re.fullmatch(r"csc(?P<ratio>\d+(?:\.\d+)?)(?P<words>(?:_[a-z0-9]+)*)", name)
    words = form["words"].split("_")[1:] if form else []
    if form is None or any(word not in VARIANTS for word in words):
        return None
    found = named(float(form["ratio"]))
    for word in words:
        found = replace(found, **VARIANTS[word])
    return replace(found, momentum=momentum) if found.momentum else found
