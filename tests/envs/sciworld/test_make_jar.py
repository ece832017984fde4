import shutil
import subprocess
import zipfile

import pytest

from envs.sciworld.jvm import WRAPPER
from envs.sciworld.make_jar import JDK, build


def compiler():
    """Return the major version of `javac`; "" if it is not installed."""
    if shutil.which("javac") is None:
        return ""
    return (
        subprocess.run(["javac", "-version"], capture_output=True, text=True, check=True)
        .stdout.split()[1]
        .partition(".")[0]
    )


@pytest.mark.skipif(compiler() != JDK, reason=f"needs JDK {JDK}")
def test_the_archive_is_made_of_the_source_beside_it(tmp_path):
    built = tmp_path / "slots.jar"
    build(built)
    with zipfile.ZipFile(built) as ours, zipfile.ZipFile(WRAPPER) as shipped:
        assert ours.namelist() == shipped.namelist()
        for name in ours.namelist():
            assert ours.read(name) == shipped.read(name), (
                f"{name} is of another source; run python -m envs.sciworld.make_jar"
            )
