"""What a Hub answers to each request, by route; no socket is held here."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from repositories import LFS_FROM, LFS_SUFFIXES, Blob, Files, Repo

if TYPE_CHECKING:
    from server import HubServer


class Problem(Exception):
    """What the Hub answers with an error: its status, and the error's name."""

    def __init__(self, code: int, error: str, message: str) -> None:
        super().__init__(message)
        self.code, self.error = code, error


_ID = r"(?P<id>[\w.-]+/[\w.-]+)"
_TYPE = r"(?P<type>models|datasets|spaces|kernels)"
ROUTES: list[tuple[str, str, str]] = [
    ("GET", rf"^/api/{_TYPE}/{_ID}$", "info"),
    ("GET", rf"^/api/{_TYPE}/{_ID}/revision/(?P<rev>[^/]+)$", "info"),
    ("GET", rf"^/api/{_TYPE}/{_ID}/refs$", "refs"),
    ("GET", rf"^/api/{_TYPE}/{_ID}/commits/(?P<rev>[^/]+)$", "history"),
    ("GET", rf"^/api/{_TYPE}/{_ID}/tree/(?P<rev>[^/]+)(?:/(?P<path>.*))?$", "tree"),
    ("POST", rf"^/api/{_TYPE}/{_ID}/paths-info/(?P<rev>[^/]+)$", "paths"),
    ("POST", rf"^/api/{_TYPE}/{_ID}/preupload/(?P<rev>[^/]+)$", "preupload"),
    ("POST", rf"^/api/{_TYPE}/{_ID}/commit/(?P<rev>[^/]+)$", "commit"),
    ("POST", rf"^/api/{_TYPE}/{_ID}/branch/(?P<rev>[^/]+)$", "branch"),
    ("DELETE", rf"^/api/{_TYPE}/{_ID}/branch/(?P<rev>[^/]+)$", "unbranch"),
    ("POST", r"^/api/repos/create$", "create"),
    ("POST", r"^/api/validate-yaml$", "yaml"),
    ("GET", r"^/api/organizations/(?P<org>[\w.-]+)/overview$", "organization"),
    ("GET", r"^/api/whoami-v2$", "whoami"),
    ("POST", rf"^/(?:{_TYPE}/)?{_ID}\.git/info/lfs/objects/batch$", "batch"),
    ("PUT", r"^/store/(?P<oid>[0-9a-f]{64})$", "store"),
    ("POST", r"^/store/(?P<oid>[0-9a-f]{64})/verify$", "verify"),
    ("GET", r"^/store/(?P<oid>[0-9a-f]{64})$", "fetch"),
    ("GET", rf"^/api/resolve-cache/{_TYPE}/{_ID}/(?P<rev>[^/]+)/(?P<path>.+)$", "resolve"),
    ("GET", rf"^/(?:{_TYPE}/)?{_ID}/resolve/(?P<rev>[^/]+)/(?P<path>.+)$", "resolve"),
]


@dataclass
class Answer:
    """A response before it is sent."""

    body: bytes = b""
    code: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def json(data: Any, code: int = 200) -> Answer:
        return Answer(json.dumps(data).encode(), code, {"Content-Type": "application/json"})


class Endpoints:
    """One method per route: (match, query, body) -> Answer. Holds no socket."""

    def __init__(self, hub: HubServer) -> None:
        self.hub = hub

    def _repo(self, match: re.Match[str]) -> Repo:
        kind = (match["type"] or "models").removesuffix("s")
        repo = self.hub.repos.get((kind, match["id"]))
        if repo is None:
            raise Problem(404, "RepoNotFound", f"Repository {match['id']} not found")
        return repo

    def _at(self, match: re.Match[str]) -> tuple[Repo, str, Files]:
        repo = self._repo(match)
        revision = unquote(match.groupdict().get("rev") or "main")
        sha = repo.resolve(revision)
        if sha is None:
            raise Problem(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, sha, repo.commits[sha]

    # reading

    def info(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        repo, sha, files = self._at(match)
        siblings = [{"rfilename": path} for path in sorted(files)]
        author = repo.name.split("/")[0]
        return Answer.json(
            {"_id": "0" * 24, "id": repo.name, "author": author, "sha": sha, "private": False,
             "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": [],
             "lastModified": "2026-01-01T00:00:00.000Z", "createdAt": "2026-01-01T00:00:00.000Z",
             "siblings": siblings}
        )  # fmt: skip

    def refs(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        repo = self._repo(match)

        def rows(refs: dict[str, str], prefix: str) -> list[dict[str, str]]:
            return [
                {"name": n, "ref": f"refs/{prefix}/{n}", "targetCommit": s} for n, s in refs.items()
            ]

        branches, tags = rows(repo.branches, "heads"), rows(repo.tags, "tags")
        return Answer.json({"branches": branches, "tags": tags, "converts": []})

    def history(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        repo, sha, _ = self._at(match)
        return Answer.json(
            [{"id": c, "authors": [{"user": "loopback"}], "date": "2026-01-01T00:00:00.000Z",
              "title": "a commit", "message": ""} for c in repo.history(sha)]
        )  # fmt: skip

    def tree(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        _, _, files = self._at(match)
        folder = unquote(match["path"] or "").strip("/")
        start = f"{folder}/" if folder else ""
        inside = {p: b for p, b in files.items() if p.startswith(start)}
        if folder and not inside:
            raise Problem(404, "EntryNotFound", f"{folder} does not exist")
        recursive = query.get("recursive", "").lower() in ("true", "1")
        rows: dict[str, dict[str, Any]] = {}
        for path, blob in sorted(inside.items()):
            parts = path[len(start) :].split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                above = start + "/".join(parts[:depth])
                rows[above] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": above}
            if recursive or len(parts) == 1:
                rows[path] = _row(path, blob)
        return _page(list(rows.values()), match.string, query, self.hub.url)

    def paths(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        _, _, files = self._at(match)
        wanted = json.loads(body)["paths"]
        return Answer.json([_row(p, files[p]) for p in wanted if p in files])

    def resolve(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        _, sha, files = self._at(match)
        path = unquote(match["path"])
        blob = files.get(path)
        if blob is None:
            raise Problem(404, "EntryNotFound", f"Entry not found: {path}")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
        if not blob.lfs and self.hub.sends_on and "resolve-cache" not in match.string:
            kind = match["type"] or "models"
            where = f"/api/resolve-cache/{kind}/{match['id']}/{sha}/{match['path']}"
            return Answer(b"", 307, {"Location": where})
        if not blob.lfs:
            return Answer(blob.data, 200, {**headers, "Content-Type": "text/plain"})
        headers |= {
            "X-Linked-Etag": f'"{blob.sha256}"',
            "X-Linked-Size": str(len(blob.data)),
            "Location": f"{self.hub.store_url}/store/{blob.sha256}",
        }
        return Answer(b"", 302, headers)

    def fetch(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        data = self.hub.lfs.get(match["oid"])
        if data is None:
            raise Problem(404, "EntryNotFound", "no such object")
        return Answer(data, 200, {"ETag": f'"{match["oid"]}"', "Accept-Ranges": "bytes"})

    def organization(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        name = match["org"]
        known = name in self.hub.trusted or any(n.startswith(f"{name}/") for _, n in self.hub.repos)
        if not known:
            raise Problem(404, "", "This organization does not exist")
        trusted = name in self.hub.trusted
        return Answer.json({"name": name, "fullname": name, "trustedKernelPublisher": trusted})

    def whoami(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        return Answer.json({"type": "user", "name": "loopback", "orgs": []})

    # writing

    def create(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        asked = json.loads(body)
        kind, owner = asked.get("type") or "model", asked.get("organization") or "loopback"
        name = f"{owner}/{asked['name']}"
        prefix = "" if kind == "model" else f"{kind}s/"
        answer = {"url": f"{self.hub.url}/{prefix}{name}", "name": name, "id": "0" * 24}
        if (kind, name) in self.hub.repos:
            return Answer.json({"error": "You already created this repo", **answer}, 409)
        repo = self.hub.repos[kind, name] = Repo(kind, name)
        repo.commit("main", {".gitattributes": Blob(b"*.so filter=lfs\n", False)}, "initial commit")
        return Answer.json(answer)

    def branch(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        repo, name = self._repo(match), unquote(match["rev"])
        if name in repo.branches:
            raise Problem(409, "", f"Reference already exists: {name}")
        start = (json.loads(body) if body else {}).get("startingPoint") or "main"
        sha = repo.resolve(start)
        if sha is None:
            raise Problem(404, "RevisionNotFound", f"Invalid rev id: {start}")
        repo.branches[name] = sha
        return Answer.json({}, 201)

    def unbranch(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        if self._repo(match).branches.pop(unquote(match["rev"]), None) is None:
            raise Problem(404, "RevisionNotFound", "no such branch")
        return Answer.json({})

    def yaml(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        return Answer.json({"errors": [], "warnings": []})

    def preupload(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        _, _, files = self._at(match)
        rows = []
        for asked in json.loads(body)["files"]:
            path = asked["path"]
            large = path.endswith(LFS_SUFFIXES) or asked["size"] > LFS_FROM
            there = files.get(path)
            row = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            rows.append(row | ({"oid": there.etag} if there is not None else {}))
        return Answer.json({"files": rows})

    def batch(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        self._repo(match)
        rows = []
        for asked in json.loads(body)["objects"]:
            row = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.lfs:
                href = f"{self.hub.url}/store/{asked['oid']}"
                row["actions"] = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            rows.append(row)
        return Answer.json({"transfer": "basic", "objects": rows})

    def store(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        if hashlib.sha256(body).hexdigest() != match["oid"]:
            raise Problem(400, "", "the content does not have this sha256")
        self.hub.lfs[match["oid"]] = body
        return Answer()

    def verify(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        if len(self.hub.lfs.get(match["oid"], b"")) != json.loads(body)["size"]:
            raise Problem(404, "", "the object was not uploaded")
        return Answer()

    def commit(self, match: re.Match[str], query: dict[str, str], body: bytes) -> Answer:
        repo, sha, files = self._at(match)
        branch = unquote(match["rev"])
        if branch not in repo.branches:
            raise Problem(404, "RevisionNotFound", f"no branch {branch}")
        files, message = dict(files), ""
        for line in body.splitlines():
            row = json.loads(line)
            key, value = row["key"], row["value"]
            if key == "header":
                message = value["summary"]
                if value.get("parentCommit", sha) != sha:
                    raise Problem(412, "", "A commit has happened since. Please refresh")
            elif key == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
            elif key == "lfsFile":
                if value["oid"] not in self.hub.lfs:
                    raise Problem(400, "", f"{value['path']}: the LFS object was not uploaded")
                files[value["path"]] = Blob(self.hub.lfs[value["oid"]], True)
            elif key == "deletedFile":
                files.pop(value["path"], None)
            elif key == "deletedFolder":
                start = value["path"].rstrip("/") + "/"
                files = {p: b for p, b in files.items() if not p.startswith(start)}
        new = repo.commit(branch, files, message)
        prefix = "" if repo.kind == "model" else f"{repo.kind}s/"
        url = f"{self.hub.url}/{prefix}{repo.name}/commit/{new}"
        return Answer.json({"success": True, "commitUrl": url, "commitOid": new})


OPEN_WRITES = ("yaml", "store", "paths")  # neither needs a token


def _row(path: str, blob: Blob) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "file", "oid": blob.oid, "size": len(blob.data), "path": path}
    if blob.lfs:
        pointer = len(blob.pointer)
        row["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": pointer}
    return row


PAGE = 50


def _page(rows: list[dict[str, Any]], path: str, query: dict[str, str], url: str) -> Answer:
    """Rows in pages, as the Hub sends them: the next one's address is in the `Link` header."""
    start = int(query.get("cursor", "0"))
    answer = Answer.json(rows[start : start + PAGE])
    if start + PAGE < len(rows):
        rest = "&".join(f"{k}={v}" for k, v in query.items() if k != "cursor")
        answer.headers["Link"] = f'<{url}{path}?{rest}&cursor={start + PAGE}>; rel="next"'
    return answer
