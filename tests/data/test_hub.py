"""Yambda's files from the hub: the real client, in processes of its own, against a hub on this machine."""

import contextlib
import copy
import functools
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hub_server
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recml_sasrec.config import Config, ConfigError
from recml_sasrec.config_checks import validate
from recml_sasrec.data import hub as yambda_hub
from recml_sasrec.data.events import DataError

LISTENS, DISLIKES = "flat/50m/listens.parquet", "flat/50m/dislikes.parquet"
DISLIKE_ROWS = 107_776  # published
PUBLISHED_SHA256 = "eed9cbd094af1e189507d2f8132a0dc9653b90e65480125c7cdccd601e0592d1"  # of LISTENS


def parquet(rows: int) -> bytes:
    """A flat file with 12 bytes a row that don't compress; each number of rows is another content."""
    rng = np.random.default_rng(rows)
    columns = {name: rng.integers(0, 2**31, rows, np.uint32) for name in ("uid", "timestamp", "item_id")}
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, use_dictionary=False)
    return file.getvalue()


class Client:
    """A process in which ``recml_sasrec.data.hub`` fetches, with an environment of its own."""

    def __init__(self, endpoint: str, home: Path, **environment: str) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
        own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self._environment = kept | own | environment

    @functools.cached_property
    def _process(self) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).with_name("hub_client.py"))]
        return subprocess.Popen(
            command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def twin(self) -> "Client":
        """Another process of the same environment."""
        other = copy.copy(self)
        vars(other).pop("_process", None)
        return other

    def ask(self, path: str, **request) -> None:
        format, size, name = path.split("/")
        request = {"kind": "fetch", "size": size, "format": format, "event": name.split(".")[0], **request}
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def stop(self, number: int) -> int:
        """Sends a signal; returns the exit status."""
        self._process.send_signal(number)
        self._process.communicate()
        return self._process.returncode

    def fetch(self, path: str, **request) -> dict:
        """{"path": of the local file} or {"error": a sentence}, and "seconds"."""
        self.ask(path, **request)
        assert self._process.stdout
        answer = json.loads(self._process.stdout.readline())
        assert "crash" not in answer, answer["crash"]
        if "error" in answer:
            assert "\n" not in answer["error"]
        return answer

    def close(self) -> None:
        if "_process" in vars(self):
            self._process.communicate()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(hub, the client's home, a client that is online, one with HF_HUB_OFFLINE, one whose hub doesn't answer)."""
    home = tmp_path_factory.mktemp("home")
    with contextlib.ExitStack() as stack:
        hub, address = stack.enter_context(hub_server.serve())
        clients = (
            Client(address, home),
            Client(address, home, HF_HUB_OFFLINE="1"),
            Client("http://127.0.0.1:9", home),  # the discard port: nobody listens
        )
        for client in clients:
            stack.callback(client.close)
        yield hub, home, *clients


def files_below(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if path.is_file() or path.is_symlink())


def test_a_file_is_downloaded_once_and_then_comes_from_the_cache_with_or_without_the_hub(world):
    hub, home, online, offline, unreachable = world
    content = hub.files[DISLIKES] = parquet(DISLIKE_ROWS)
    left = home / "hub/datasets--yandex--yambda/blobs" / f"{hashlib.sha256(content).hexdigest()}.deadbeef.incomplete"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(b"of a download that was killed")
    live = left.with_name(left.name.replace("deadbeef", "beefbeef"))  # of a process that still downloads
    live.write_bytes(b"")
    os.utime(left, (time.time() - 3600,) * 2)

    hub.requests.clear()
    # without a cached copy: one sentence, and soon, though the client's own patience is half a minute
    answer = unreachable.fetch(DISLIKES)
    assert "http://127.0.0.1:9 can't be reached (ConnectError" in answer["error"]
    assert DISLIKES in answer["error"] and "give config.data.path a local copy" in answer["error"]
    assert answer["seconds"] < 20
    answer = offline.fetch(DISLIKES)
    assert DISLIKES in answer["error"] and "HF_HUB_OFFLINE forbids" in answer["error"]
    assert not hub.requests

    path = online.fetch(DISLIKES)["path"]
    assert Path(path).read_bytes() == content
    assert path.endswith(f"snapshots/{hub_server.COMMIT}/{DISLIKES}")
    assert [r.range for r in hub.gets(DISLIKES)] == [None]
    assert not left.exists() and live.exists()

    hub.requests.clear()
    assert online.fetch(DISLIKES)["path"] == path
    assert [(r.server, r.method) for r in hub.requests] == [("hub", "HEAD")]
    hub.requests.clear()
    assert online.fetch(DISLIKES, revision=hub_server.COMMIT)["path"] == path
    assert not hub.requests  # a commit never changes
    assert unreachable.fetch(DISLIKES)["path"] == path
    assert offline.fetch(DISLIKES)["path"] == path
    hub.refusals = [503]
    assert online.fetch(DISLIKES)["path"] == path
    hub.refusals = [429, 503]  # with nothing in the cache the client tries again
    hub.files["flat/5b/unlikes.parquet"] = parquet(10)
    assert "path" in online.fetch("flat/5b/unlikes.parquet")


def test_a_broken_connection_is_resumed_where_it_broke(world):
    hub, _, online, *_ = world
    path = "flat/500m/unlikes.parquet"
    content = hub.files[path] = parquet(1_000_000)
    assert len(content) > 11 << 20  # the client writes in pieces of 10 MB
    hub.drop_after[path] = 11 << 20
    answer = online.fetch(path)
    if "error" in answer:  # the oldest clients resume in the next run
        assert "start again" in answer["error"]
        answer = online.fetch(path)
    assert Path(answer["path"]).read_bytes() == content
    assert [r.range for r in hub.gets(path)] == [None, f"bytes={10 << 20}-"]


def test_a_stopped_download_leaves_nothing_behind(world):
    hub, home, online, *_ = world
    path = "flat/500m/undislikes.parquet"
    content = hub.files[path] = parquet(1_100_000)
    hub.stall_after[path] = 11 << 20
    client = online.twin()
    client.ask(path)
    parts = f"hub/datasets--yandex--yambda/blobs/{hashlib.sha256(content).hexdigest()}*.incomplete"
    deadline = time.monotonic() + 30
    while not any(part.stat().st_size for part in home.glob(parts)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert client.stop(signal.SIGTERM) == -signal.SIGTERM
    hub.awake.set()
    # the oldest clients keep their part SHA256.incomplete, and go on with it
    assert not [part for part in home.glob(parts) if part.name.count(".") > 1]
    assert Path(online.fetch(path)["path"]).read_bytes() == content


def test_other_bytes_than_announced_are_refused_and_fetched_anew(world):
    hub, home, online, *_ = world
    path = "sequential/50m/undislikes.parquet"
    content = hub.files[path] = parquet(1_000)
    hub.sent[path] = content[:500] + bytes([content[500] ^ 1]) + content[501:]
    error = online.fetch(path)["error"]
    assert f"sha256 {hashlib.sha256(hub.sent[path]).hexdigest()}, not {hashlib.sha256(content).hexdigest()}" in error
    assert "start again to download it anew" in error
    assert not [entry for entry in files_below(home) if entry.endswith((path, hashlib.sha256(content).hexdigest()))]
    hub.sent[path] = content[:-100]  # cut short
    error = online.fetch(path)["error"]
    assert f"should be of size {len(content)} but has size {len(content) - 100}" in error and "start again" in error
    del hub.sent[path]
    assert Path(online.fetch(path)["path"]).read_bytes() == content
    assert len(hub.gets(path)) == 3


def test_the_published_checksum_and_row_counts_are_held_to(world):
    hub, _, online, offline, _ = world
    hub.files[LISTENS] = parquet(100)
    error = online.fetch(LISTENS)["error"]
    assert hashlib.sha256(hub.files[LISTENS]).hexdigest() in error and PUBLISHED_SHA256 in error
    assert "set config.data.revision to a commit that has it" in error
    assert not hub.gets(LISTENS)  # seen before a byte of it is downloaded
    hub.announced[LISTENS] = (PUBLISHED_SHA256, len(hub.files[LISTENS]))  # as if it were the right one
    assert f"not {PUBLISHED_SHA256}" in online.fetch(LISTENS)["error"]
    assert "is not in the cache" in offline.fetch(LISTENS)["error"]

    path = "flat/500m/dislikes.parquet"
    hub.files[path] = parquet(3)
    error = online.fetch(path)["error"]
    assert f"{path!r} of the cache has 3 rows but the published file 1,128,113" in error
    hub.files[path] = b"PAR1 is not enough"
    assert "is not a complete parquet file; it is deleted from the cache" in online.fetch(path)["error"]
    assert len(hub.gets(path)) == 2

    path = "sequential/500m/listens.parquet"  # a cached file that was damaged since
    hub.files[path] = parquet(2_000)
    os.truncate(online.fetch(path)["path"], 1_000)
    assert "start again to download it anew" in offline.fetch(path)["error"]
    assert Path(online.fetch(path)["path"]).read_bytes() == hub.files[path]


def test_what_the_hub_has_not_or_does_not_give_is_named_with_the_remedy(world):
    hub, _, online, *_ = world
    error = online.fetch("sequential/5b/multi_event.parquet")["error"]
    assert "no file 'sequential/5b/multi_event.parquet' at revision 'main'" in error
    error = online.fetch("flat/5b/likes.parquet", revision="v9")["error"]
    assert "no revision 'v9'; set config.data.revision" in error

    path = "sequential/50m/likes.parquet"
    hub.files[path], hub.tokens[path] = parquet(11), "hf_right"
    error = online.fetch(path)["error"]
    assert f"refuses {path!r}" in error and "(401, no token is set); run `hf auth login` or set HF_TOKEN" in error
    error = online.fetch(path, environment={"HF_TOKEN": "hf_wrong"})["error"]
    assert "(403, the token that is set gives no access)" in error
    assert "path" in online.fetch(path, environment={"HF_TOKEN": "hf_right"})
    assert [r.authorization for r in hub.gets(path)] == [None]  # the token stays with the hub


def test_no_room_is_said_before_anything_is_written(world):
    hub, home, online, *_ = world
    path = "flat/5b/undislikes.parquet"
    hub.files[path] = parquet(100_000)
    own = hub.etag_and_size(path)
    hub.announced[path] = (own[0], 10**18)
    before = files_below(home)
    error = online.fetch(path)["error"]
    assert f"{path!r} needs 1,000,000,000,000,000,000 bytes but the cache" in error and "set HF_HUB_CACHE" in error
    assert not hub.gets(path) and files_below(home) == before
    del hub.announced[path]
    error = online.fetch(path, largest_file=100_000)["error"]  # as a disk that fills up meanwhile
    assert f"{path!r} can't be written to the cache" in error and "(File too large); free disk space" in error
    # the oldest clients keep a part that they go on with
    assert not [
        entry
        for entry in files_below(home)
        if own[0] in entry and not entry.endswith((".lock", f"{own[0]}.incomplete"))
    ]
    assert "path" in online.fetch(path)


def test_the_store_is_built_from_the_hub(world, tmp_path):
    hub, _, online, *_ = world
    path = "flat/50m/undislikes.parquet"
    file = io.BytesIO()
    pq.write_table(pa.table({"uid": [3, 3, 1], "timestamp": [5, 0, 0], "item_id": [70, 90, 90]}), file)
    hub.files[path] = file.getvalue()
    answer = online.fetch(path, kind="store", cache=str(tmp_path))
    assert (answer["users"], answer["items"]) == ([1, 3], [90, 90, 70])


def test_a_directory_of_the_same_layout_or_a_file_is_taken_instead(tmp_path):
    (tmp_path / "flat/50m").mkdir(parents=True)
    (tmp_path / LISTENS).write_bytes(b"")
    data = Config().data
    data.source, data.path = "yambda", str(tmp_path)
    assert yambda_hub.locate(data) == str(tmp_path / LISTENS)
    data.yambda_format, data.yambda_event = "sequential", "unlikes"
    with pytest.raises(
        DataError, match=r"has no 'sequential/50m/unlikes.parquet', only flat/50m/listens.parquet; choose"
    ):
        yambda_hub.locate(data)
    data.path = str(tmp_path / LISTENS)
    assert yambda_hub.locate(data) == data.path


@pytest.mark.parametrize("event", ["listens", "likes", "dislikes", "unlikes", "undislikes", "multi_event"])
def test_every_file_has_its_published_path_and_a_typo_gets_the_nearest_name(event):
    for size in ("50m", "500m", "5b"):
        for format in ("flat", "sequential"):
            assert yambda_hub.file_name(size, format, event) == f"{format}/{size}/{event}.parquet"
            config = Config()
            config.data.yambda_size, config.data.yambda_format, config.data.yambda_event = size, format, event
            config.split.test_start = 1
            validate(config)
    config.data.yambda_event = event[:-1]
    with pytest.raises(ConfigError, match=f"config.data.yambda_event={event[:-1]} is unknown; did you mean '{event}'"):
        validate(config)
    with pytest.raises(DataError, match=f"no '{event[:-1]}'; did you mean '{event}'"):
        yambda_hub.file_name("50m", "flat", event[:-1])
    with pytest.raises(DataError, match="no '5m'; did you mean '50m'"):
        yambda_hub.file_name("5m", "flat", event)
