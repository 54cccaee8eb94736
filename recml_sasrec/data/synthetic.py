"""A seeded generator of Yambda-shaped listens, for the embedded default and for tests.

Shares follow the published statistics of Yambda (arXiv 2505.22238): log-normal histories, repeats, popularity skew,
zero gaps, played ratios, growing activity. The sequence can be learned: items form albums, users play runs of an
album's tracks in order, return to albums they know, and have favourite genres.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recml_sasrec.config import SyntheticConfig
from recml_sasrec.data.events import DataError
from recml_sasrec.data.folders import remove_stale, temporary_name
from recml_sasrec.data.yambda import LAST_SECOND
from recml_sasrec.files import unfinished

VERSION = 2
GROUP_EVENTS = 1 << 20  # events of a row group, about

ALBUM = 10  # tracks
GENRES = 20
TASTES = 2  # genres a user mostly listens to
SIGMA = 1.009  # of the log-normal history lengths: mean 5,030 and median 3,024
RETURN = 0.85  # share of runs of an album the user knows: about 69 % of events repeat an earlier (user, item)
RUN = 10.0  # mean events of a run
NOISE = 0.1  # share of events that break the run, mostly skipped tracks
POPULARITY = (1.3, 2.0)  # an album's weight is (rank + offset) ** -exponent
SESSION = 10.0  # mean events of a session
ZERO_GAP = 0.19  # share of gaps of 0 s
GROWTH = 0.979  # density of activity 1 + GROWTH * t: 1.84 times as much in the last 30 days as in the first 30
SCHEMA = pa.schema(
    [
        pa.field("uid", pa.uint32(), nullable=False),
        pa.field("timestamp", pa.uint32(), nullable=False),
        pa.field("item_id", pa.uint32(), nullable=False),
        pa.field("is_organic", pa.uint8(), nullable=False),
        pa.field("played_ratio_pct", pa.uint16()),
        pa.field("track_length_seconds", pa.uint32()),
    ]
)


def cached_file(config: SyntheticConfig, cache: str) -> str:
    """The generated file of a configuration in the cache, written on first use; returns its path."""
    key = json.dumps({**dataclasses.asdict(config), "version": VERSION}, sort_keys=True)
    name = f"synthetic-{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}.parquet"
    path = os.path.join(cache, "synthetic", name)
    if not os.path.exists(path):
        write(config, path)
    return path


def write(config: SyntheticConfig, path: str) -> None:
    """Writes flat listens sorted by (uid, timestamp): LZ4, a row group at a time, renamed into place when complete.

    Raises:
        DataError: sizes that make no data, or a folder that can't be written.
    """
    if config.users < 1 or config.items < 2 * ALBUM or config.events_per_user < 1:
        raise DataError(
            f"config.data.synthetic with users {config.users}, items {config.items}, "
            f"events_per_user {config.events_per_user} "
            f"makes no data; use at least 1 user, {2 * ALBUM} items and 1 event"
        )
    users = max(1, GROUP_EVENTS // config.events_per_user)
    catalogue = Catalogue(config.seed, config.items)
    groups = (
        _group(config, catalogue, first, min(first + users, config.users)) for first in range(0, config.users, users)
    )
    write_groups(path, SCHEMA, groups)


def write_groups(path: str, schema: pa.Schema, groups: Iterable[pa.Table]) -> None:
    """Streams tables to a parquet file (LZ4), a row group each, renamed into place when complete.

    Raises:
        DataError: the folder can't be written.
    """
    parent, name = os.path.split(os.path.abspath(path))
    work = os.path.join(parent, temporary_name(name))
    try:
        os.makedirs(parent, exist_ok=True)
        remove_stale(parent, name)
        with unfinished(work):
            with pq.ParquetWriter(work, schema, compression="lz4") as writer:
                for group in groups:
                    writer.write_table(group)
            os.replace(work, path)
    except OSError as error:
        raise DataError(
            f"{path!r} can't be written ({error.strerror or error}); "
            "free disk space or choose another config.data.cache"
        ) from error


class Catalogue:
    """Albums of tracks with genres and popularity; sparse ids that tell nothing of them.

    Args:
        seed: of the generator.
        items: tracks of all albums.
        popularity: exponent and offset of an album's weight.
        lonely: items of no album, numbered after the tracks.
        density: share of the numbers in the range of the ids that are ids.
    """

    def __init__(
        self,
        seed: int,
        items: int,
        popularity: tuple[float, float] = POPULARITY,
        lonely: int = 0,
        density: float = 0.1,
    ) -> None:
        rng = np.random.default_rng([seed, 0])
        ids = 22 + np.cumsum(rng.geometric(density, items + lonely)) - 1
        self.ids = rng.permutation(ids).astype(np.uint32)
        self.lengths = np.clip(rng.lognormal(np.log(200), 0.35, len(ids)), 20, 3_600).astype(np.uint32)
        self.items = items
        self.albums = -(-items // ALBUM)  # the last one may have fewer tracks
        exponent, offset = popularity
        weights = (np.arange(self.albums) + offset) ** -exponent
        self.genres = min(GENRES, self.albums)
        # Album a has genre a % genres, so that a genre's k-th album is album k * genres + genre.
        self.genre_cdf = [
            np.cumsum(weights[g :: self.genres]) / weights[g :: self.genres].sum() for g in range(self.genres)
        ]
        self.cdf = np.cumsum(weights) / weights.sum()

    def tracks(self, album: np.ndarray) -> np.ndarray:
        return np.minimum(ALBUM, self.items - album * ALBUM)


def _group(config: SyntheticConfig, catalogue: Catalogue, first: int, last: int) -> pa.Table:
    """The listens of users first..last-1."""
    rng = np.random.default_rng([config.seed, 1, first])
    mean = config.events_per_user
    counts = np.maximum(rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, last - first).round(), 1).astype(np.int64)
    user = np.repeat(np.arange(last - first), counts)
    item, noise = draw_items(rng, catalogue, counts, user)
    return listens(rng, catalogue, counts, user, item, noise, first)


def listens(
    rng: np.random.Generator,
    catalogue: Catalogue,
    counts: np.ndarray,
    user: np.ndarray,
    item: np.ndarray,
    noise: np.ndarray,
    first: int,
) -> pa.Table:
    """The rows of some users' listens, sorted by (uid, timestamp).

    Args:
        counts: int64 [U], listens of each user.
        user: int64 [n], the user of each listen, ascending from 0.
        item: int64 [n], its index in the catalogue.
        noise: bool [n], whether it breaks the run.
        first: number of the first user.
    """
    table = {
        "uid": ((user + first + 1) * 100).astype(np.uint32),
        "timestamp": _times(rng, counts, user),
        "item_id": catalogue.ids[item],
        "is_organic": (rng.random(len(user)) < 0.5).astype(np.uint8),
        "played_ratio_pct": _ratios(rng, noise),
        "track_length_seconds": catalogue.lengths[item],
    }
    return pa.table(table, schema=SCHEMA)


def draw_items(
    rng: np.random.Generator, catalogue: Catalogue, counts: np.ndarray, user: np.ndarray, returns: float = RETURN
) -> tuple[np.ndarray, np.ndarray]:
    """(index of the item, whether it breaks the run) of every event; ``returns``: share of runs of a known album."""
    total = len(user)
    begin = np.cumsum(counts) - counts
    starts = rng.random(total) < 1 / RUN
    starts[begin] = True
    run = np.cumsum(starts) - 1  # of each event
    run_user = user[starts]
    run_begin = np.flatnonzero(starts)
    num_runs = len(run_user)
    own_first = run[begin][run_user]  # the first run of the run's user
    # A run returns to a recent one of the same user: follow the references to their ends, doubling the step.
    age = np.arange(num_runs) - own_first
    back = np.ceil(age * rng.random(num_runs) ** 2).astype(np.int64)  # recent runs more often
    origin = np.arange(num_runs) - np.where(rng.random(num_runs) < returns, back, 0)
    while np.any(origin[origin] != origin):
        origin = origin[origin]
    album = _albums(rng, catalogue, run_user, len(counts))[origin]
    # A run starts at the first track or anywhere, and goes round.
    start = np.where(rng.random(num_runs) < 0.7, 0, rng.integers(0, ALBUM, num_runs))
    track = (start[run] + np.arange(total) - run_begin[run]) % catalogue.tracks(album)[run]
    item = album[run] * ALBUM + track
    noise = rng.random(total) < NOISE
    noisy_album = np.searchsorted(catalogue.cdf, rng.random(total)).clip(max=catalogue.albums - 1)
    noisy = noisy_album * ALBUM + rng.integers(0, ALBUM, total) % catalogue.tracks(noisy_album)
    return np.where(noise, noisy, item), noise


def _albums(rng: np.random.Generator, catalogue: Catalogue, run_user: np.ndarray, users: int) -> np.ndarray:
    """An album for each run: mostly of the user's genres, by popularity."""
    tastes = rng.integers(0, catalogue.genres, (users, TASTES))
    genre = tastes[run_user, rng.integers(0, TASTES, len(run_user))]
    draw = rng.random(len(run_user))
    album = np.searchsorted(catalogue.cdf, draw)
    faithful = rng.random(len(run_user)) < 0.9
    for number, cdf in enumerate(catalogue.genre_cdf):
        chosen = faithful & (genre == number)
        album[chosen] = np.searchsorted(cdf, draw[chosen]) * catalogue.genres + number
    return album.clip(max=catalogue.albums - 1)


def _times(rng: np.random.Generator, counts: np.ndarray, user: np.ndarray) -> np.ndarray:
    """uint32 seconds, multiples of 5, ascending within a user: sessions spread over 300 days, more towards the end."""
    total = len(user)
    starts = rng.random(total) < 1 / SESSION
    starts[np.cumsum(counts) - counts] = True
    session = np.cumsum(starts) - 1
    draw = rng.random(session[-1] + 1)
    when = (np.sqrt(1 + 2 * GROWTH * (1 + GROWTH / 2) * draw) - 1) / GROWTH * LAST_SECOND
    gap = rng.lognormal(np.log(200), 1.08, total)  # median 200 s, 90 % under 795 s
    gap[rng.random(total) < ZERO_GAP] = 0
    gap[starts] = 0
    elapsed = np.cumsum(gap)
    seconds = when[session] + elapsed - elapsed[starts][session]
    # What would run past the end is taken back before it.
    seconds = np.where(seconds > LAST_SECOND, 2 * LAST_SECOND - seconds, seconds).clip(0, LAST_SECOND)
    seconds = (seconds // 5 * 5).astype(np.int64)
    return (np.sort(user * (2 * LAST_SECOND) + seconds) % (2 * LAST_SECOND)).astype(np.uint32)


def _ratios(rng: np.random.Generator, noise: np.ndarray) -> pa.Array:
    """Played ratios in Yambda's shares (0: 7.4 %, 1-49: 29.2 %, 50-99: 8 %, 100: 55 %, over: .5 %), a few null."""
    total = len(noise)
    # Nine in ten of what breaks a run is skipped, the rest of the skips fall on the other events.
    low = rng.random(total) < np.where(noise, 0.9, (0.366 - 0.9 * NOISE) / (1 - NOISE))
    kind = rng.random(total)
    ratio = np.where(low, np.where(kind < 0.074 / 0.366, 0, rng.integers(1, 50, total)), 100)
    ratio = np.where(~low & (kind < 0.08 / 0.634), rng.integers(50, 100, total), ratio)
    ratio = np.where(~low & (kind > 1 - 0.0047 / 0.634), rng.integers(101, 160, total), ratio)
    return pa.array(ratio.astype(np.uint16), mask=rng.random(total) < 0.001)
