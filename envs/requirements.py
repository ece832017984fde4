"""Print the packages that one environment's server requires, one per line: `python
envs/requirements.py ENV [pyproject.toml]`.
The container installs these and nothing else. The script needs only the standard library.
"""

import sys
import tomllib
from pathlib import Path


def requirements(env: str, pyproject: Path) -> list[str]:
    """Return the requirements of extra `envs` and, if it exists, of the extra named `env`."""
    extras = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    return [*extras["envs"], *extras.get(env, ())]


if __name__ == "__main__":
    file = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parents[1] / "pyproject.toml"
    sys.stdout.write("\n".join(requirements(sys.argv[1], file)) + "\n")
