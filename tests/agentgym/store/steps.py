"""A step of a store on each back end, for tests and their child processes."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import boto3

from agentgym.store.manifest import PassedStep
from agentgym.store.runstore import store_at

KEY = "ab" * 32
# every child process begins with this code
CHILD = """
import os, signal, socket, sys, time
from pathlib import Path
from agentgym.store import posix, runstore, s3
from agentgym.store.lease import Fenced, LeaseHeld
from tests.agentgym.store.steps import KEY, commit

def say(text):
    print(text, flush=True)

def wait_for(path):
    for _ in range(12000):
        if Path(path).exists():
            return
        time.sleep(0.005)
    sys.exit(f"waited in vain for {path}")

root, ttl_s, scratch = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
store = runstore.store_at(root, lease_ttl_s=ttl_s)
"""


@dataclass
class Place:
    """Location of a store, with direct access to its files in order to damage them."""

    root: str
    scratch: Path  # shared by this test and its children

    def store(self, ttl_s=30.0):
        return store_at(self.root, lease_ttl_s=ttl_s)

    @property
    def folder(self):
        return f"{self.root}/steps/stage-1-{KEY[:16]}"

    @property
    def _bucket(self):
        _, _, name, prefix = self.folder.split("/", 3)
        return boto3.resource("s3").Bucket(name), prefix

    def names(self):
        """Return the names of all files of the step, relative to its folder."""
        if self.root.startswith("s3://"):
            bucket, prefix = self._bucket
            return [
                found.key.removeprefix(f"{prefix}/")
                for found in bucket.objects.filter(Prefix=f"{prefix}/")
            ]
        return [
            path.relative_to(self.folder).as_posix()
            for path in Path(self.folder).rglob("*")
            if path.is_file()
        ]

    def blobs(self):
        return [name for name in self.names() if name.startswith("blobs/")]

    def write(self, name, data):
        if self.root.startswith("s3://"):
            bucket, prefix = self._bucket
            bucket.put_object(Key=f"{prefix}/{name}", Body=data)
        else:
            Path(self.folder, name).write_bytes(data)

    def read(self, name):
        if self.root.startswith("s3://"):
            bucket, prefix = self._bucket
            return bucket.Object(f"{prefix}/{name}").get()["Body"].read()
        return Path(self.folder, name).read_bytes()

    def delete(self, name):
        if self.root.startswith("s3://"):
            bucket, prefix = self._bucket
            bucket.Object(f"{prefix}/{name}").delete()
        else:
            Path(self.folder, name).unlink()

    def start(self, script, ttl_s=30.0):
        arguments = [sys.executable, "-c", CHILD + script, self.root, str(ttl_s), str(self.scratch)]
        return subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def line(child):
    return child.stdout.readline().strip()


def commit(writer, step, model=None, *, done=False, blobs=None, earlier=()):
    """Commit an optimizer step; `earlier` are the steps since the last commit."""

    def log(step):
        return {"metrics.jsonl": b"line %d\n" % step}

    return writer.commit(
        done=done,
        state={"global_step": step},
        parents={},
        config={},
        blobs=blobs or {"model": model or b"weights %d" % step},
        records=log(step),
        results={},
        timings={},
        earlier=[PassedStep({"global_step": each}, log(each)) for each in earlier],
    )


def commit_several(writer, first, last):
    """Write one commit of the optimizer steps `first` to `last`."""
    return commit(writer, last, earlier=range(first, last))
