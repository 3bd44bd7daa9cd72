"""Coarse-grained schemes by the names that records and `gradsync bench` give them: `csc0.1`, `csc0.1_bf16_exact`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from . import CoarseGrained, HalfPrecision

CHUNK = 1 << 15  # elements; tensors with fewer travel dense
MOMENTUM = 0.9

VARIANTS: dict[str, dict[str, Any]] = {  # what a word behind the ratio changes; without any, what did best
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
USUAL = ("csc0.05", "csc0.1", "csc0.25", "csc0.1_bf16")  # measured unless others are named
NAMES_IN_WORDS = f"{', '.join(USUAL)}, with other ratios too, and behind them any of _{', _'.join(VARIANTS)}"


def named(ratio: float) -> CoarseGrained:
    """`csc` and this ratio."""
    return CoarseGrained(ratio=ratio, chunk=CHUNK, scoring="agreement", freeze=True)


def coarse(name: str, momentum: float) -> CoarseGrained | None:
    """The scheme of this name; None for other names. `momentum`: the optimiser's, for schemes that do it in its place.

    Raises:
        ValueError: for a ratio that is none.
    """
    form = re.fullmatch(r"csc(?P<ratio>\d+(?:\.\d+)?)(?P<words>(?:_[a-z0-9]+)*)", name)
    words = form["words"].split("_")[1:] if form else []
    if form is None or any(word not in VARIANTS for word in words):
        return None
    found = named(float(form["ratio"]))
    for word in words:
        found = replace(found, **VARIANTS[word])
    return replace(found, momentum=momentum) if found.momentum else found
