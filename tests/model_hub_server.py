"""A small Hugging Face Hub for model repositories: what huggingface_hub asks of one to push a folder and fetch it.

Files over ``LARGE`` bytes go through Git LFS, as on the hub; its newer storage (Xet) is not offered. Run as a module it
is a client: python -m tests.model_hub_server reads one JSON request a line and answers each with a line.
"""

import base64
import contextlib
import hashlib
import json
import re
import sys
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

from tests.local_server import running

LARGE = 2_000
TOKEN, READER = "hf_writer", "hf_reader"  # who may write, and who may only read


class Repo:
    def __init__(self, private: bool) -> None:
        self.private = private
        self.commits: list[tuple[str, dict[str, bytes], str]] = []  # (id, files by path, message)


class Hub:
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}  # of LFS, by sha256
        self.requests: list[tuple[str, str]] = []
        self.unknown: list[tuple[str, str]] = []
        self.status = 0  # of every answer, where not 0


@contextlib.contextmanager
def serve():
    """Yields (hub, its address)."""
    hub = Hub()
    with running(_Handler, hub=hub) as address:
        yield hub, address


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object = None, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content_Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle_request(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        hub.requests.append((self.command, path))
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ")
        routes = (
            ("POST", "/api/repos/create", self.create),
            ("POST", "/api/validate-yaml", lambda body: self.answer(200, {"errors": [], "warnings": []})),
            ("POST", "/api/models/(.+/.+)/preupload/main", self.preupload),
            ("POST", "/(.+/.+).git/info/lfs/objects/batch", self.batch),
            ("PUT", "/blobs/([0-9a-f]{64})", self.upload),
            ("POST", "/verify/([0-9a-f]{64})", self.verify),
            ("POST", "/api/models/(.+/.+)/commit/main", self.commit),
            ("GET", "/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", self.info),
            ("GET", "/api/models/([^/]+/[^/]+)/tree/([^/]+)", self.tree),
            ("HEAD|GET", "/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.resolve),
        )
        for method, pattern, act in routes:
            match = re.fullmatch(pattern, path)
            if match and re.fullmatch(method, self.command):
                if hub.status:
                    return self.answer(hub.status, {"error": "asked for"})
                writes = self.command in ("POST", "PUT") and "/blobs/" not in path
                if writes and token != TOKEN:
                    return self.answer(403 if token else 401, {"error": "no access"})
                if not writes and (repo := hub.repos.get(match[1])) and repo.private and token not in (TOKEN, READER):
                    return self.answer(401, {"error": "no access"}, X_Error_Code="RepoNotFound")
                return act(body, *match.groups())
        hub.unknown.append((self.command, path))
        return self.answer(404, {"error": "no such address"})

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def create(self, body: bytes) -> None:
        request = json.loads(body)
        name = f"{request['organization']}/{request['name']}"
        assert request.get("type", "model") == "model"
        new = name not in self.hub.repos
        private = request.get("private") or request.get("visibility") == "private"  # clients before and since 2.0
        self.hub.repos.setdefault(name, Repo(bool(private)))
        self.answer(200 if new else 409, {"url": f"http://{self.headers['Host']}/{name}"})

    def preupload(self, body: bytes, name: str) -> None:
        files = [
            {"path": f["path"], "uploadMode": "lfs" if f["size"] > LARGE else "regular", "shouldIgnore": False}
            for f in json.loads(body)["files"]
        ]
        self.answer(200, {"files": files})

    def batch(self, body: bytes, name: str) -> None:
        host = f"http://{self.headers['Host']}"
        objects = [
            {
                **file,
                "actions": {
                    "upload": {"href": f"{host}/blobs/{file['oid']}"},
                    "verify": {"href": f"{host}/verify/{file['oid']}"},
                },
            }
            for file in json.loads(body)["objects"]
        ]
        self.answer(200, {"transfer": "basic", "objects": objects})

    def upload(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.blobs[oid] = body
        self.answer(200)

    def verify(self, body: bytes, oid: str) -> None:
        self.answer(200 if len(self.hub.blobs[oid]) == json.loads(body)["size"] else 400)

    def commit(self, body: bytes, name: str) -> None:
        repo = self.hub.repos[name]
        files, message = dict(repo.commits[-1][1]) if repo.commits else {}, ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile"
                files[value["path"]] = self.hub.blobs[value["oid"]]
        commit = hashlib.sha1(body + str(len(repo.commits)).encode()).hexdigest()
        repo.commits.append((commit, files, message))
        url = f"http://{self.headers['Host']}/{name}/commit/{commit}"
        self.answer(200, {"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def find(self, name: str, revision: str | None) -> tuple[str, dict[str, bytes], str] | None:
        """The commit; where there is none the answer is sent."""
        repo = self.hub.repos.get(name)
        if repo is None:
            self.answer(401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return None
        for commit in reversed(repo.commits):
            if revision in (None, "main", commit[0]):
                return commit
        self.answer(404, {"error": "no such revision"}, X_Error_Code="RevisionNotFound")
        return None

    def info(self, body: bytes, name: str, revision: str | None) -> None:
        if commit := self.find(name, revision):
            siblings = [{"rfilename": path} for path in commit[1]]
            self.answer(200, {"id": name, "modelId": name, "sha": commit[0], "siblings": siblings})

    def tree(self, body: bytes, name: str, revision: str) -> None:
        if commit := self.find(name, revision):
            self.answer(200, [_entry(path, content) for path, content in commit[1].items()])

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        if commit := self.find(name, revision):
            if path in commit[1]:
                etag = f'"{hashlib.sha256(commit[1][path]).hexdigest()}"'
                self.answer(200, commit[1][path], ETag=etag, X_Repo_Commit=commit[0])
            else:
                self.answer(404, {"error": "no such file"}, X_Error_Code="EntryNotFound")


def _entry(path: str, content: bytes) -> dict:
    sha = hashlib.sha256(content).hexdigest()
    lfs = {"oid": sha, "size": len(content), "pointerSize": 130}
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest(), "lfs": lfs}


def main() -> None:
    """The client: huggingface_hub reads its environment when it is imported, so each needs a process of its own."""
    import os
    import pathlib

    from recml_sasrec import model_hub

    for line in sys.stdin:
        request = json.loads(line)
        os.environ["HF_TOKEN"] = request.pop("token", "")
        try:
            if "push" in request:
                result = {"url": model_hub.push(pathlib.Path(request["folder"]), request["push"], request["private"])}
            else:
                result = {"folder": str(model_hub.local_folder(request["fetch"]))}
        except ValueError as error:
            result = {"error": str(error)}
        except Exception as error:
            result = {"crash": repr(error)}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
