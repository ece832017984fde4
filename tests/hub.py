"""A stand-in for the Hugging Face Hub: a dataset's git repository over HTTP, large files by Git
LFS, on the loopback.
"""

import hashlib
import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

NAME = "datasets/AgentGym/AgentGym-RL-Data-ID"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"


class Hub:
    """Commits files to a repository and serves it; `start` and `stop` are the test's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repository = folder / NAME
        self.large: dict[str, bytes] = {}  # oid -> content
        self.repository.mkdir(parents=True)
        self.git("init", "-q", "-b", "main")
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                oid = self.path.rpartition("/")[2]
                if self.path.startswith("/lfs/") and oid in hub.large:
                    self.reply(200, {"Content-Type": "application/octet-stream"}, hub.large[oid])
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
                self.reply(
                    200,
                    {"Content-Type": "application/vnd.git-lfs+json"},
                    json.dumps({"objects": objects}).encode(),
                )

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
                self.reply(int(headers.pop("Status", "200 OK").split()[0]), headers, content)

            def reply(self, status: int, headers: dict[str, str], content: bytes) -> None:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self.origin = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.url = f"{self.origin}/{NAME}"
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def git(self, *arguments: str) -> str:
        command = ["git", "-c", "user.name=Hub", "-c", "user.email=hub@example.org", *arguments]
        return subprocess.run(
            command, cwd=self.repository, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self, files: dict[str, bytes], large: tuple[str, ...] = ()) -> str:
        """The new commit's id. Files named in `large` are kept by LFS."""
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
