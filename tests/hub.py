"""A stand-in for the Hugging Face Hub on loopback: a dataset's git repository over HTTP, with large
files by Git LFS.
"""

import hashlib
import json
import os
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from tests.answering import Handler

NAME = "datasets/AgentGym/AgentGym-RL-Data-ID"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"


class Hub:
    """Dataset repository with commits, served by a server with the handlers `answers()`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repository = folder / NAME
        self.large: dict[str, bytes] = {}  # oid -> content
        self.repository.mkdir(parents=True)
        self.git("init", "-q", "-b", "main")

    def answers(self):
        """Return the handler class for its server."""
        hub = self

        class Answers(Handler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                oid = self.path.rpartition("/")[2]
                if self.path.startswith("/lfs/") and oid in hub.large:
                    self.send(hub.large[oid], Content_Type="application/octet-stream")
                else:
                    self.from_git(b"")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if not self.path.endswith(".git/info/lfs/objects/batch"):
                    self.from_git(body)
                    return
                objects = [
                    {
                        **wanted,
                        "actions": {"download": {"href": f"{hub.origin}/lfs/{wanted['oid']}"}},
                    }
                    for wanted in json.loads(body)["objects"]
                ]
                told = json.dumps({"objects": objects}).encode()
                self.send(told, Content_Type="application/vnd.git-lfs+json")

            def from_git(self, body: bytes) -> None:
                url = urlsplit(self.path)
                done = subprocess.run(
                    ["git", "http-backend"],
                    input=body,
                    capture_output=True,
                    timeout=60,
                    env={
                        **os.environ,
                        "GIT_PROJECT_ROOT": str(hub.folder),
                        "GIT_HTTP_EXPORT_ALL": "1",
                        "REQUEST_METHOD": self.command,
                        "PATH_INFO": url.path,
                        "QUERY_STRING": url.query,
                        "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                        "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                        "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                    },
                )
                head, _, content = done.stdout.partition(b"\r\n\r\n")
                headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if line)
                status = int(headers.pop("Status", "200 OK").split()[0])
                self.send(content, status, **headers)

        return Answers

    @property
    def url(self) -> str:
        return f"{self.origin}/{NAME}"

    def git(self, *arguments: str) -> str:
        command = ["git", "-c", "user.name=Hub", "-c", "user.email=hub@example.org", *arguments]
        return subprocess.run(
            command, cwd=self.repository, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self, files: dict[str, bytes], large: tuple[str, ...] = ()) -> str:
        """Commit files; those in `large` are stored by LFS. Return the new commit's id."""
        for name, content in files.items():
            path = self.repository / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name in large:
                oid = hashlib.sha256(content).hexdigest()
                self.large[oid] = content
                content = POINTER.format(oid, len(content)).encode()
            path.write_bytes(content)
        if large:
            rules = "".join(f"{name} filter=lfs diff=lfs merge=lfs -text\n" for name in large)
            (self.repository / ".gitattributes").write_text(rules)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "lists")
        return self.git("rev-parse", "HEAD")
