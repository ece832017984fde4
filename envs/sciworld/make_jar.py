"""Script that builds `slots.jar` from `java/`: `python -m envs.sciworld.make_jar`.
It needs a JDK; a server needs only the archive.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from envs.sciworld.jvm import WRAPPER, find_engine

SOURCES = Path(__file__).with_name("java")
JAVA_VERSION = "8"  # any newer runtime loads it
JDK = "17"  # built the shipped archive; other versions may give other bytes


def build(target: Path) -> None:
    """Compile SOURCES into the archive `target`. Equal sources and compilers give equal bytes.
    Errors: FileNotFoundError without a JDK, ValueError without the package scienceworld,
    CalledProcessError if the compilation fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        sources = sorted(str(path) for path in SOURCES.rglob("*.java"))
        options = ["--release", JAVA_VERSION, "-Xlint:-options", "-cp", str(find_engine())]
        subprocess.run(["javac", *options, "-d", folder, *sources], check=True)
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(Path(folder).rglob("*.class")):
                name = path.relative_to(folder).as_posix()
                archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), path.read_bytes())


if __name__ == "__main__":
    build(WRAPPER)
    sys.stdout.write(f"{WRAPPER}\n")
