"""Name the licences that packages do not declare in words a machine reads: read from the files that
they install, and written into a CycloneDX list of components.
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
    """The list with a licence for every component.
    Errors: ValueError for one that neither declares one nor is named here, and for one that is
    named here in vain.
    """
    bare = [each for each in listing["components"] if not each.get("licenses")]
    names = {each["name"] for each in bare}
    if unknown := names - LICENCES.keys():
        raise ValueError(
            f"{', '.join(sorted(unknown))}: no licence is declared; read the package's files and"
            " name it in tools/licences.py"
        )
    if vain := LICENCES.keys() - names:
        raise ValueError(f"{', '.join(sorted(vain))}: declared or gone; remove the line here")
    for each in bare:
        expression = LICENCES[each["name"]]
        each["licenses"] = [{"acknowledgement": "concluded", "expression": expression}]
    return listing


def main(path: Path) -> None:
    listing = complete(json.loads(path.read_text(encoding="utf-8")))
    listing["components"] = [dict(sorted(each.items())) for each in listing["components"]]
    text = json.dumps(listing, indent=2, ensure_ascii=False)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
