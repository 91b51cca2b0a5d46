"""The hub's cache written by hand, as its client writes it, and a hub that answers on this machine."""

import hashlib
import http.server
import json
import threading
from contextlib import contextmanager
from pathlib import Path


def commit(repository: str, revision: str) -> str:
    return hashlib.sha1(f"{repository}@{revision}".encode()).hexdigest()


def write_revision(cache: Path, repository: str, revision: str, files: dict[str, bytes]) -> Path:
    """One revision of a repository; its snapshot folder."""
    root = cache / ("models--" + repository.replace("/", "--"))
    sha = commit(repository, revision)
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / revision).write_text(sha)
    for name, data in files.items():
        blob = root / "blobs" / hashlib.sha256(data).hexdigest()
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(data)
        place = root / "snapshots" / sha / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(blob)
    return root / "snapshots" / sha


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves ``server.files``: {repository: {revision: {name: bytes}}}.

    An integer in place of a revision or a repository is the status of every request for it; ``server.cut`` holds names
    of files that are cut in half.
    """

    def log_message(self, *_):
        pass

    def _send(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(headers.pop("length", len(body))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status, repository, revision):
        codes = {401: "RepoNotFound", 403: "GatedRepo", 404: "RevisionNotFound"}
        self._send(status, **({"X_Error_Code": codes[status]} if status in codes else {}))

    def do_GET(self):
        path = self.path.split("?")[0].strip("/")
        self.server.asked.append(path)
        parts = path.split("/")
        api = parts[:2] == ["api", "models"]
        repository = "/".join(parts[2:4] if api else parts[:2])
        revisions = self.server.files.get(repository, 401)
        if isinstance(revisions, int):
            return self._refuse(revisions, repository, "")
        if api and parts[4] == "refs":
            branches = [{"name": r, "ref": f"refs/heads/{r}", "targetCommit": commit(repository, r)} for r in revisions]
            return self._send(200, json.dumps({"branches": branches, "converts": [], "tags": []}).encode())
        revision = parts[5 if api else 3]
        by_commit = {commit(repository, name): name for name in revisions}
        revision = by_commit.get(revision, revision)
        files = revisions.get(revision, 404)
        if isinstance(files, int):
            return self._refuse(files, repository, revision)
        sha = commit(repository, revision)
        if api:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            return self._send(200, json.dumps({"id": repository, "sha": sha, "siblings": siblings}).encode())
        name = "/".join(parts[4:])
        if name not in files:
            return self._send(404, X_Error_Code="EntryNotFound")
        data = files[name]
        body = data[: len(data) // 2] if name in self.server.cut and self.command == "GET" else data
        self.send_response(200)
        for key, value in (
            ("ETag", f'"{hashlib.sha1(data).hexdigest()}"'),
            ("X-Repo-Commit", sha),
            ("Content-Length", len(data)),
        ):
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.close_connection = True

    do_HEAD = do_GET


@contextmanager
def serving(files, cut=()):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.cut, server.asked = files, set(cut), []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
