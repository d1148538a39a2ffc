"""A Hub on 127.0.0.1: as much of its protocol as publishing, listing and loading a model needs, kept in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WRITE_TOKEN, READ_TOKEN = "hf_loopbackWriteToken", "hf_loopbackReadToken"
NAMESPACES = ("org", "somebody")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass
class Repo:
    """One repository: every commit is a full listing path -> content, every branch a commit."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    lfs_paths: set[str] = field(default_factory=set)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        parent = self.branches.get(branch, "")
        digest = hashlib.sha1(parent.encode() + str(len(self.commits)).encode())
        for path, content in sorted(files.items()):
            digest.update(path.encode() + content)
        sha = digest.hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class LoopbackHub:
    """
    Attributes:
        faults: place -> (status, error code, message), answered instead of the real thing; places are "create", "branch",
            "preupload", "batch", "upload", "commit".
        on_upload: called when the body of a large file starts to arrive; may wait or raise.
        requests: method and path of every request.
        uploads: oids of large files whose bytes arrived.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: dict[str, tuple[int, str, str]] = {}
        self.on_upload: Callable[[], None] | None = None
        self.requests: list[str] = []
        self.uploads: list[str] = []
        self.lock = threading.RLock()
        hub = self

        class Handler(_Handler):
            state = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self, cache: Any, token: str | None = WRITE_TOKEN) -> dict[str, str]:
        """Variables that send a process's huggingface_hub here, with its caches in the folder `cache`."""
        variables = {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_MODULES_CACHE": str(cache / "modules")}
        # The chunk store of the real Hub is another service; without it the client speaks LFS.
        variables.update(HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0", HF_HUB_DISABLE_TELEMETRY="1")
        return variables if token is None else {**variables, "HF_TOKEN": token}


@contextmanager
def running_hub() -> Iterator[LoopbackHub]:
    """A hub for the block."""
    hub = LoopbackHub()
    try:
        yield hub
    finally:
        hub.close()


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: LoopbackHub

    def log_message(self, *_: Any) -> None:
        pass

    # ------------------------------------------------------------------ routing

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        self._read = False
        path = urllib.parse.urlsplit(self.path).path
        self.state.requests.append(f"{self.command} {path}")
        try:
            for pattern, method in _ROUTES:
                if match := re.fullmatch(pattern, f"{self.command} {path}"):
                    parts = [urllib.parse.unquote(part) for part in match.groups()]
                    getattr(self, method)(*parts)
                    return
            raise _Refused(404, "", f"no route for {self.command} {path}")
        except _Refused as refused:
            self._drain()
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message} if refused.code or refused.message else {}
            self._send(refused.status, json.dumps({"error": refused.message}).encode(), headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode())

    def _body(self) -> bytes:
        self._read = True
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _drain(self) -> None:
        if not getattr(self, "_read", False):
            self._body()
        self._read = False

    # ------------------------------------------------------------------ rights

    def _fault(self, place: str) -> None:
        if place in self.state.faults:
            raise _Refused(*self.state.faults[place])

    def _token(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        if token not in (None, WRITE_TOKEN, READ_TOKEN):
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        return token

    def _may_write(self) -> None:
        token = self._token()
        if token is None:
            raise _Refused(401, "", "Invalid username or password.")
        if token == READ_TOKEN:
            raise _Refused(403, "", "You don't have the rights to write to this namespace.")

    def _repo(self, name: str) -> Repo:
        repo = self.state.repos.get(name)
        if repo is None or (repo.private and self._token() is None):
            raise _Refused(404 if self._token() else 401, "RepoNotFound", "Repository not found")
        return repo

    def _commit_of(self, repo: Repo, revision: str) -> str:
        sha = repo.resolve(revision)
        if sha is None:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    # ------------------------------------------------------------------ writing

    def create(self) -> None:
        payload = json.loads(self._body())
        self._fault("create")
        self._may_write()
        namespace = payload.get("organization") or "somebody"
        if namespace not in NAMESPACES:
            raise _Refused(403, "", f"You don't have the rights to create a model under the namespace {namespace!r}")
        name = f"{namespace}/{payload['name']}"
        reply = {"url": f"{self.state.url}/{name}", "name": name, "id": "1"}
        with self.state.lock:
            if name in self.state.repos:
                self._send(409, json.dumps({**reply, "error": "You already created this model repo"}).encode())
                return
            repo = Repo(private=payload.get("private") or payload.get("visibility") == "private")
            repo.commit("main", {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
            self.state.repos[name] = repo
        self._json(reply)

    def branch(self, name: str, branch: str) -> None:
        self._body()
        self._fault("branch")
        self._may_write()
        repo = self._repo(name)
        if branch in repo.branches:
            raise _Refused(409, "", "Reference already exists")
        repo.branches[branch] = repo.branches["main"]
        self._json({})

    def validate_yaml(self) -> None:
        content = json.loads(self._body())["content"]
        if not content.startswith("---\n"):
            self._json({"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
            return
        self._json({"errors": [], "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        files = json.loads(self._body())["files"]
        self._fault("preupload")
        self._may_write()
        repo = self._repo(name)
        current = repo.commits[self._commit_of(repo, revision)]

        def describe(file: dict[str, Any]) -> dict[str, Any]:
            path = file["path"]
            large = path.endswith((".safetensors", ".png")) or file["size"] > 10 * 2**20
            oid = None
            if path in current:
                content = current[path]
                oid = hashlib.sha256(content).hexdigest() if large else _git_oid(content)
            return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}

        self._json({"files": [describe(file) for file in files]})

    def batch(self, name: str) -> None:
        payload = json.loads(self._body())
        self._fault("batch")
        self._may_write()
        self._repo(name)

        def action(wanted: dict[str, Any]) -> dict[str, Any]:
            if wanted["oid"] in self.state.objects:
                return dict(wanted)
            return {**wanted, "actions": {"upload": {"href": f"{self.state.url}/lfs-upload/{wanted['oid']}"}}}

        self._json({"transfer": "basic", "objects": [action(wanted) for wanted in payload["objects"]]})

    def upload(self, oid: str) -> None:
        if self.state.on_upload is not None:
            self.state.on_upload()
        content = self._body()
        self._fault("upload")
        if hashlib.sha256(content).hexdigest() != oid:
            raise _Refused(400, "", "content does not match its oid")
        self.state.objects[oid] = content
        self.state.uploads.append(oid)
        self._send(200, b"")

    def commit(self, name: str, revision: str) -> None:
        lines = [json.loads(line) for line in self._body().splitlines() if line.strip()]
        self._fault("commit")
        self._may_write()
        repo = self._repo(name)
        with self.state.lock:
            head = self._commit_of(repo, revision)
            parent = lines[0]["value"].get("parentCommit")
            if parent is not None and parent != head:
                raise _Refused(412, "", "A commit has happened since. Please refresh and try again.")
            files = dict(repo.commits[head])
            for line in lines[1:]:
                key, value = line["key"], line["value"]
                if key == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif key == "lfsFile":
                    if value["oid"] not in self.state.objects:
                        raise _Refused(400, "", f"the large file {value['path']} was never uploaded")
                    files[value["path"]] = self.state.objects[value["oid"]]
                    repo.lfs_paths.add(value["path"])
                elif key == "deletedFile":
                    del files[value["path"]]
                else:
                    raise _Refused(400, "", f"unknown operation {key}")
            sha = repo.commit(revision, files)
        self._json({"success": True, "commitOid": sha, "commitUrl": f"{self.state.url}/{name}/commit/{sha}", "hookOutput": ""})

    # ------------------------------------------------------------------ reading

    def whoami(self) -> None:
        if self._token() is None:
            raise _Refused(401, "", "Invalid username or password.")
        role = "write" if self._token() == WRITE_TOKEN else "read"
        orgs = [{"name": n} for n in NAMESPACES[:1]]
        self._json({"type": "user", "name": "somebody", "orgs": orgs, "auth": {"accessToken": {"role": role}}})

    def info(self, name: str, revision: str = "main") -> None:
        repo = self._repo(name)
        sha = self._commit_of(repo, revision)
        siblings = [{"rfilename": path} for path in sorted(repo.commits[sha])]
        self._json({"id": name, "modelId": name, "sha": sha, "private": repo.private, "tags": [], "siblings": siblings})

    def refs(self, name: str) -> None:
        repo = self._repo(name)
        branches = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": sha} for b, sha in repo.branches.items()]
        self._json({"branches": branches, "tags": [], "converts": []})

    def tree(self, name: str, revision: str, folder: str = "") -> None:
        repo = self._repo(name)
        files = repo.commits[self._commit_of(repo, revision)]
        prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
        recursive = "recursive=true" in self.path.lower()
        entries: dict[str, dict[str, Any]] = {}
        for path, content in sorted(files.items()):
            if not path.startswith(prefix):
                continue
            rest = path[len(prefix) :]
            if "/" in rest:
                parent = prefix + rest.split("/")[0]
                entries.setdefault(parent, {"type": "directory", "path": parent, "oid": _git_oid(parent.encode()), "size": 0})
                if not recursive:
                    continue
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": _git_oid(content)}
            if path in repo.lfs_paths:
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            entries[path] = entry
        if prefix and not entries:
            raise _Refused(404, "EntryNotFound", f"{folder} does not exist")
        self._json(list(entries.values()))

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self._repo(name)
        sha = self._commit_of(repo, revision)
        if path not in repo.commits[sha]:
            self._send(404, b"Entry not found", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
            return
        content = repo.commits[sha][path]
        large = path in repo.lfs_paths
        etag = hashlib.sha256(content).hexdigest() if large else _git_oid(content)
        headers = {"X-Repo-Commit": sha, "ETag": f'"{etag}"', "Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        if large:
            headers.update({"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))})
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and self.command == "GET":
            first, last = int(asked[1]), int(asked[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            self._send(206, content[first : last + 1], headers)
            return
        self._send(200, content, headers)


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


_NAME = r"([^/]+/[^/]+)"
_ROUTES = (
    (r"POST /api/repos/create", "create"),
    (r"POST /api/validate-yaml", "validate_yaml"),
    (r"GET /api/whoami-v2", "whoami"),
    (rf"POST /api/models/{_NAME}/branch/(.+)", "branch"),
    (rf"POST /api/models/{_NAME}/preupload/([^/]+)", "preupload"),
    (rf"POST /api/models/{_NAME}/commit/([^/]+)", "commit"),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", "batch"),
    (r"PUT /lfs-upload/([0-9a-f]{64})", "upload"),
    (rf"GET /api/models/{_NAME}/refs", "refs"),
    (rf"GET /api/models/{_NAME}/tree/([^/]+)(?:/?)", "tree"),
    (rf"GET /api/models/{_NAME}/tree/([^/]+)/(.+)", "tree"),
    (rf"GET /api/models/{_NAME}/revision/(.+)", "info"),
    (rf"GET /api/models/{_NAME}", "info"),
    (rf"(?:GET|HEAD) /{_NAME}/resolve/([^/]+)/(.+)", "resolve"),
)
