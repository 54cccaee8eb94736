"""Exported models pushed to, and loaded from, a hub on this machine by the real client."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from recml_sasrec import Recommender, export
from tests import model_hub_server
from tests.model_hub_server import READER, TOKEN
from tests.test_recommender import same
from tests.tiny import log_of, untrained_run

ROOT = pathlib.Path(__file__).parent.parent


class Client:
    """A process in which ``recml_sasrec.model_hub`` pushes and fetches, with an environment of its own."""

    def __init__(self, endpoint: str, home: pathlib.Path, **environment: str) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
        own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        # the newer storage is a service beside the hub, which this one doesn't have
        self.environment = kept | own | {"HF_HUB_DISABLE_XET": "1", "JAX_PLATFORMS": "cpu"} | environment
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.model_hub_server"],
            cwd=ROOT, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __call__(self, **request) -> dict:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "crash" not in answer, answer["crash"]
        if "error" in answer:
            assert "\n" not in answer["error"]
        return answer

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(hub, client, client with HF_HUB_OFFLINE, client whose hub doesn't answer, run, exported folder)."""
    folder = tmp_path_factory.mktemp("hub")
    rng = np.random.default_rng(0)
    workdir = untrained_run(folder, log_of(folder, [[int(i) for i in rng.integers(40, size=8)] for _ in range(30)]))
    export.export_run(workdir, folder / "model")
    with model_hub_server.serve() as (hub, address):
        home = folder / "home"
        clients = (
            Client(address, home),
            Client(address, home, HF_HUB_OFFLINE="1"),
            Client("http://127.0.0.1:9", home),  # the discard port: nobody listens
        )
        yield hub, *clients, workdir, folder / "model"
        for client in clients:
            client.close()


def test_a_pushed_model_is_loaded_from_the_hub_and_then_from_the_cache(world):
    hub, online, offline, unreachable, workdir, model = world
    assert "HF_HUB_OFFLINE" in offline(fetch="hf://me/first")["error"]
    answer = online(push="me/first", folder=str(model), private=False, token=TOKEN)
    assert answer["url"].endswith("/me/first") and not hub.repos["me/first"].private
    ((commit, files, message),) = hub.repos["me/first"].commits
    assert files == {path.name: path.read_bytes() for path in model.iterdir()} and "SASRec" in message
    assert hub.blobs and any(path.startswith("/verify/") for _, path in hub.requests)

    hub.requests.clear()
    fetched = pathlib.Path(online(fetch="hf://me/first")["folder"])
    gets = {path.rpartition("/")[2] for method, path in hub.requests if method == "GET" and "/resolve/" in path}
    assert gets == {"config.json", "encoder.stablehlo", "items.parquet", "model.safetensors"}
    assert online(fetch=f"hf://me/first@{commit}")["folder"] == str(fetched)
    assert offline(fetch="hf://me/first")["folder"] == unreachable(fetch="hf://me/first")["folder"] == str(fetched)
    history = [1, 2, 3]
    same(Recommender.load(fetched).recommend([history])[0], Recommender.load(workdir).recommend([history])[0])
    assert {path for _, path in hub.unknown} <= {"/api/agent-harnesses"}  # which the client can do without

    answer = online(push="me/first", folder=str(model), private=True, token=TOKEN)  # again, as another commit
    assert "url" in answer and not hub.repos["me/first"].private


def test_a_private_model_needs_a_token_to_read(world):
    hub, online, *_, model = world
    online(push="me/secret", folder=str(model), private=True, token=TOKEN)
    assert hub.repos["me/secret"].private
    error = online(fetch="hf://me/secret")["error"]
    assert "no token is set" in error and "run `hf auth login` or set HF_TOKEN" in error
    assert "folder" in online(fetch="hf://me/secret", token=READER)


def test_what_the_hub_refuses_is_said_in_one_sentence(world):
    hub, online, offline, unreachable, _, model = world
    push = {"push": "me/second", "folder": str(model), "private": False}
    error = online(**push)["error"]
    assert "can't be pushed to 'me/second'" in error and "401, no token is set" in error
    assert f"push the complete folder with --workdir {model} --push me/second" in error
    assert "403, the token that is set gives no access" in online(**push, token=READER)["error"]
    assert "HF_HUB_OFFLINE forbids" in offline(**push, token=TOKEN)["error"]
    assert "http://127.0.0.1:9 can't be reached, ConnectError" in unreachable(**push, token=TOKEN)["error"]
    assert "http://127.0.0.1:9 can't be reached" in unreachable(fetch="hf://me/none")["error"]
    assert "me/second" not in hub.repos
    error = online(fetch="hf://me/none")["error"]
    assert error.startswith("hf://me/none can't be fetched (") and "check the name" in error and "local folder" in error
    online(push="me/third", folder=str(model), private=False, token=TOKEN)
    assert "no such revision; name one of its branches" in online(fetch="hf://me/third@v9")["error"].replace(")", "")
    hub.repos["me/third"].commits.append(("0" * 40, {"README.md": b"other"}, ""))
    assert "hf://me/third holds no exported model (no config.json," in online(fetch="hf://me/third")["error"]
    hub.status = 500
    assert "answers 500" in online(**push, token=TOKEN)["error"]
    hub.status = 0
    for name in ("hf://shop", "hf://a/b/c", "hf://a b/c", "hf:///", "hf://me/-x"):
        assert "is no name of a repository; write user/name" in online(fetch=name)["error"]


def test_the_commands_export_push_and_recommend_from_the_hub(world, tmp_path):
    hub, online, *_, workdir, _ = world
    run = lambda *words: subprocess.run(  # noqa: E731
        [sys.executable, "-m", *map(str, words)],
        cwd=ROOT, env=online.environment | {"HF_TOKEN": TOKEN}, capture_output=True, text=True,
    )  # fmt: skip
    done = run("recml_sasrec.export", "--workdir", workdir, "--output", tmp_path / "m", "--push", "me/cli", "--private")
    assert done.returncode == 0, done.stderr
    assert "/me/cli" in done.stdout and hub.repos["me/cli"].private
    done = run("recml_sasrec.recommend", "--workdir", "hf://me/cli@main", "--history", "1 2 3", "--k", "4")
    assert done.returncode == 0, done.stderr
    expected = Recommender.load(workdir).recommend([[1, 2, 3]], k=4)[0]
    same([(pair["item"], pair["score"]) for pair in json.loads(done.stdout)["items"]], expected)
