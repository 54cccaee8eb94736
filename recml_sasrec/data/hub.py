"""Yambda's files on the Hugging Face Hub: found by path, fetched once, checked against what is published.

Cache, resumption of a broken connection, token (``hf auth login`` or HF_TOKEN), mirror (HF_ENDPOINT) and offline mode
(HF_HUB_OFFLINE) are ``huggingface_hub``'s own. Added here: no download without room for it, no file with other bytes
than the hub announces, and one sentence for whatever goes wrong. A refused file leaves the cache, so the next run
fetches it anew.
"""

import contextlib
import glob
import hashlib
import logging
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pyarrow as pa
import pyarrow.parquet as pq

from recml_sasrec.config import DataConfig
from recml_sasrec.config_checks import nearest
from recml_sasrec.data.events import DataError

REPO = "yandex/yambda"
SIZES = ("50m", "500m", "5b")
FORMATS = ("flat", "sequential")
EVENTS = ("listens", "likes", "dislikes", "unlikes", "undislikes", "multi_event")

# Published (arXiv 2505.22238): rows of the flat files in the order of SIZES; a sequential file has a row a user.
_ROWS = {
    "listens": (46_467_212, 466_512_103, 4_649_567_411),
    "likes": (881_456, 9_033_960, 89_334_605),
    "dislikes": (107_776, 1_128_113, 11_579_143),
}
_SHA256 = {
    "flat/50m/listens.parquet": "eed9cbd094af1e189507d2f8132a0dc9653b90e65480125c7cdccd601e0592d1",
    "flat/50m/likes.parquet": "694087077dbacfcc1d22a5ca85cc6bd8ab182361933406e60500624c6a422bc4",
}
_IS_COMMIT, _IS_SHA256 = re.compile("[0-9a-f]{40}").fullmatch, re.compile("[0-9a-f]{64}").fullmatch
_ABANDONED = 900  # seconds without a write; the client gives up far earlier
_OR_LOCAL = "or give config.data.path a local copy"

log = logging.getLogger("recml_sasrec")


def file_name(size: str, format: str, event: str) -> str:
    """The path of a file inside the repository, such as ``flat/50m/listens.parquet``.

    Raises:
        DataError: Yambda has no such size, format or event; the nearest one is named.
    """
    for value, allowed in ((size, SIZES), (format, FORMATS), (event, EVENTS)):
        if value not in allowed:
            near = nearest(value, allowed)
            hint = f"did you mean {near!r}?" if near else f"choose one of {', '.join(allowed)}"
            raise DataError(f"Yambda has no {value!r}; {hint}")
    return f"{format}/{size}/{event}.parquet"


def locate(data: DataConfig) -> str:
    """The local path of the configuration's file of Yambda: given, inside a given directory, or fetched.

    Raises:
        DataError: the directory has no such file, or what ``fetch`` raises.
    """
    if not data.path:
        return fetch(data.yambda_size, data.yambda_format, data.yambda_event, data.revision)
    path = os.path.expanduser(data.path)
    if not os.path.isdir(path):
        return path
    name = file_name(data.yambda_size, data.yambda_format, data.yambda_event)
    if os.path.exists(file := os.path.join(path, name)):
        return file
    there = sorted(glob.glob("*/*/*.parquet", root_dir=path)) or sorted(os.listdir(path))
    raise DataError(
        f"directory {path!r} has no {name!r}, only {', '.join(there[:12]) or 'nothing'}{', ...' * (len(there) > 12)}; "
        "choose with config.data.yambda_format, yambda_size and yambda_event, or unset config.data.path to fetch it"
    )


def fetch(size: str, format: str, event: str, revision: str = "") -> str:
    """Downloads a file through huggingface_hub, or finds it in its cache; returns the local path.

    ``revision`` is a branch, tag or commit of the repository, empty for ``main``. A commit that is cached needs no
    network; of a branch the hub is asked for the newest, and the cached file is used where it doesn't answer.

    Raises:
        DataError: no such file or revision, no access, no network and no cached file, no room, or a wrong file.
    """
    name = file_name(size, format, event)
    revision = revision or "main"
    path = _cached(name, revision)
    if not (path and _IS_COMMIT(revision)):
        path = _newest(name, revision, path)
    _check_parquet(path, name, _ROWS[event][SIZES.index(size)] if format == "flat" and event in _ROWS else None)
    return path


def _cached(name: str, revision: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(REPO, name, revision=revision, repo_type="dataset")
    return found if isinstance(found, str) else None  # it may also know that the file doesn't exist


def _newest(name: str, revision: str, cached: str | None) -> str:
    """The file at the revision as the hub has it now; ``cached`` where the hub can't be asked."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        commit, etag, size = _ask(name, revision, patient=not cached)
    except Exception as error:  # all that the client lets through, see _sentence
        if not cached or _is_missing(error):
            raise DataError(_sentence(error, name, revision)) from error
        if not isinstance(error, OfflineModeIsEnabled):
            log.info("the hub can't be asked for %s (%s); the copy in the cache is used", name, type(error).__name__)
        return cached
    announced = etag if _IS_SHA256(etag) else None  # true of all large files
    published = _SHA256.get(name)
    if announced and published and announced != published:
        raise DataError(
            f"{name!r} of {REPO!r} at {revision!r} has sha256 {announced} but the published file has {published}; set "
            "config.data.revision to a commit that has it, or download this one and give config.data.path the copy"
        )
    blobs = os.path.join(_cache(), f"datasets--{REPO.replace('/', '--')}", "blobs")
    _remove_leftovers(blobs, etag)
    current = _cached(name, commit)
    if current and current == cached:
        return current
    new = not current and not os.path.exists(os.path.join(blobs, etag))
    if new:
        _check_room(name, size)
        log.info("fetching %s (%s bytes) of %s, commit %s", name, f"{size:,}", REPO, commit)
    try:
        with _clean_stop():
            path = hf_hub_download(REPO, name, repo_type="dataset", revision=revision)
    except Exception as error:
        raise DataError(_sentence(error, name, revision)) from error
    if new and (wanted := published or announced):
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != wanted:
            raise DataError(f"the download of {name!r} has sha256 {found}, not {wanted}; {_discard(path)}")
    return path


@contextlib.contextmanager
def _clean_stop() -> Iterator[None]:
    """A signal first unwinds the client, which then removes its part of a file, and only then has its usual effect."""
    caught: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()  # only there signals can be handled
    former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM) if main}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])


def _ask(name: str, revision: str, patient: bool) -> tuple[str, str, int]:
    """(commit, etag, bytes) of a file, by one HEAD request.

    A hub that isn't reached is an error at once: hf_hub_download alone would try for half a minute. With ``patient``, a
    hub that is busy is tried as long as the client thinks right.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    url = hf_hub_url(REPO, name, repo_type="dataset", revision=revision)
    try:
        answer = get_hf_file_metadata(url)
    except HfHubHTTPError as error:
        if not patient or error.response.status_code not in (408, 429, 500, 502, 503, 504):
            raise
        hf_hub_download(REPO, name, repo_type="dataset", revision=revision, dry_run=True)
        answer = get_hf_file_metadata(url)
    if answer.commit_hash is None or answer.etag is None:
        raise ValueError("the answer is not a hub's, check HF_ENDPOINT and proxies")
    return answer.commit_hash, answer.etag, answer.size or 0


def _is_missing(error: Exception) -> bool:
    from huggingface_hub.errors import RemoteEntryNotFoundError, RevisionNotFoundError

    return isinstance(error, RemoteEntryNotFoundError | RevisionNotFoundError)


def _sentence(error: BaseException, name: str, revision: str) -> str:
    """What happened and what to do, for anything the client raises: its own errors, those of its HTTP library and of
    the Xet library (RuntimeErrors), and the file system's.
    """
    from huggingface_hub import constants, errors, get_token

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        error = error.__cause__  # it only says that there was no file to fall back to
    reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200].rstrip(".: ")
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{REPO!r} has no revision {revision!r}; set config.data.revision to one of its branches, tags or commits, "
            "or leave it empty for main"
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return (
            f"{REPO!r} has no file {name!r} at revision {revision!r}; choose another config.data.revision, {_OR_LOCAL}"
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            token = "the token that is set gives no access" if get_token() else "no token is set"
            return (
                f"{constants.ENDPOINT} refuses {name!r} of {REPO!r} ({status}, {token}); run `hf auth login` or set "
                f"HF_TOKEN, accept the terms on the data set's page if it has any, {_OR_LOCAL}"
            )
        if status == 404:
            return f"{constants.ENDPOINT} has no data set {REPO!r}; check HF_ENDPOINT, {_OR_LOCAL}"
        return (
            f"{constants.ENDPOINT} answers {status} to the request for {name!r} of {REPO!r}; try again later, set "
            f"HF_ENDPOINT to a mirror, {_OR_LOCAL}"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"{name!r} of {REPO!r} at {revision!r} is not in the cache {_cache()!r} and HF_HUB_OFFLINE forbids "
            f"to fetch it; unset that once, {_OR_LOCAL}"
        )
    # the HTTP library is the client's choice (httpx, httpx2): its errors have the base of the client's own
    if isinstance(error, errors.HfHubHTTPError.__bases__[0]):
        return (
            f"{name!r} of {REPO!r} is not in the cache {_cache()!r} and {constants.ENDPOINT} can't be reached "
            f"({reason}); connect and start again, set HF_ENDPOINT to a mirror, {_OR_LOCAL}"
        )
    if isinstance(error, OSError) and error.errno:
        return (
            f"{name!r} can't be written to the cache {_cache()!r} ({error.strerror}); free disk space or set "
            "HF_HUB_CACHE to another folder"
        )
    return f"{name!r} of {REPO!r} can't be fetched ({reason}); start again, {_OR_LOCAL}"


def _cache() -> str:
    from huggingface_hub import constants

    return os.path.abspath(os.path.expanduser(constants.HF_HUB_CACHE))


def _check_room(name: str, size: int) -> None:
    folder = cache = _cache()
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free
    if free < size:
        raise DataError(
            f"{name!r} needs {size:,} bytes but the cache {cache!r} has room for {free:,}; free disk space or set "
            "HF_HUB_CACHE to another folder"
        )


def _remove_leftovers(blobs: str, etag: str) -> None:
    """Removes what killed downloads of a file have left, since the client never goes on with such a part."""
    for part in glob.glob(os.path.join(glob.escape(blobs), f"{glob.escape(etag)}.*.incomplete")):
        # another process may be at it; locks don't tell on every shared file system
        with contextlib.suppress(OSError):
            if time.time() - os.path.getmtime(part) > _ABANDONED:
                os.remove(part)


def _check_parquet(path: str, name: str, rows: int | None) -> None:
    try:
        found = pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name!r} of the cache is not a complete parquet file; {_discard(path)}") from error
    if rows is not None and found != rows:
        raise DataError(f"{name!r} of the cache has {found:,} rows but the published file {rows:,}; {_discard(path)}")


def _discard(path: str) -> str:
    """Takes a wrong file out of the cache; returns what to do next."""
    target = os.path.realpath(path)  # the cache's entry is a link to its content
    with contextlib.suppress(OSError):
        os.remove(target)
        if target != path:
            os.remove(path)
    if os.path.lexists(path):
        return f"delete {target!r} and start again to download it anew"
    return f"it is deleted from the cache, start again to download it anew, {_OR_LOCAL}"
