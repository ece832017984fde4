"""Licenses of packages that declare none in machine-readable form.

They are read from the files that the packages install, and written into a CycloneDX list of
components.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LICENCES = {  # name -> SPDX expression
    "antlr4-python3-runtime": "BSD-3-Clause",
    "axe-playwright-python": "MIT AND MPL-2.0",  # axe.min.js is Deque's
    "dvc-http": "Apache-2.0",
    "gto": "Apache-2.0",
    "huey": "MIT",
    "kubernetes-validate": "Apache-2.0",
    "protobuf": "BSD-3-Clause",
    "pygit2": "GPL-2.0-only WITH GCC-exception-2.0",
    "ray": "Apache-2.0",
    "transformers": "Apache-2.0",
}


def complete(listing: dict[str, Any]) -> dict[str, Any]:
    """Add a license to every component that declares none; return the list.
    Errors: ValueError for a component that neither declares a license nor is named here, and for a
    name here that is not needed.
    """
    bare = [component for component in listing["components"] if not component.get("licenses")]
    names = {component["name"] for component in bare}
    if unknown := names - LICENCES.keys():
        todo = "no licence is declared; read the package's files and name it in tools/licences.py"
        raise ValueError(f"{', '.join(sorted(unknown))}: {todo}")
    if vain := LICENCES.keys() - names:
        raise ValueError(f"{', '.join(sorted(vain))}: declared or gone; remove the line here")
    for component in bare:
        expression = LICENCES[component["name"]]
        component["licenses"] = [{"acknowledgement": "concluded", "expression": expression}]
    return listing


def main(path: Path) -> None:
    listing = complete(json.loads(path.read_text(encoding="utf-8")))
    listing["components"] = [dict(sorted(component.items())) for component in listing["components"]]
    text = json.dumps(listing, indent=2, ensure_ascii=False)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
