"""Prints what a server of one environment needs: `python envs/requirements.py ENV
[pyproject.toml]`.
For the container, which installs this and nothing else; needs only the standard library.
"""

import sys
import tomllib
from pathlib import Path


def requirements(env: str, pyproject: Path) -> list[str]:
    """Of extra `envs`, and of the extra named like the environment, if there is one."""
    extras = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    return [*extras["envs"], *extras.get(env, ())]


if __name__ == "__main__":
    file = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parents[1] / "pyproject.toml"
    sys.stdout.write("\n".join(requirements(sys.argv[1], file)) + "\n")
