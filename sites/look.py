"""Stylesheets: one per site, made of a common part, a palette, the site's own rules and its
pictures.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from urllib.parse import quote

from sites.web import Response

_FOLDER = Path(__file__).resolve().parent / "templates" / "css"
_PALETTES = {
    "shop": "--accent:#1f5f57;--deep:#173f3a;--tint:#eef4f2;--page:#fff",
    "admin": "--accent:#a04a1d;--deep:#2e2a28;--tint:#f6efe9;--page:#faf8f6",
    "forum": "--accent:#7a3b63;--deep:#4d2540;--tint:#f7eff4;--page:#faf7f4",
    "hub": "--accent:#2a5b9b;--deep:#1c2a42;--tint:#eef3fa;--page:#fff",
}
# 24 x 24 line drawings
_ICONS = {
    "mug": "M5 7h10v9a3 3 0 0 1-3 3H8a3 3 0 0 1-3-3zM15 9h2a2 2 0 0 1 0 5h-2M8 3v2M12 3v2",
    "pan": "M3 12a6 6 0 1 0 12 0a6 6 0 1 0-12 0M15 12h7",
    "kettle": "M6 10h10l2 10H4zM8 10a3 3 0 0 1 6 0M16 12l4-3M11 7V5",
    "knife": "M4 20l5-5M8 16L19 4c2 5-2 10-8 15z",
    "jar": "M7 4h10v3H7zM6 9c0-1 1-2 2-2h8c1 0 2 1 2 2v10a2 2 0 0 1-2 2H8a2 2 0 0 1-2-2zM6 13h12",
    "lamp": "M8 4h8l3 8H5zM12 12v8M8 20h8",
    "throw": "M5 5h14v12H5zM7 17v3M10 17v3M14 17v3M17 17v3M5 9h14M5 13h14",
    "clock": "M4 12a8 8 0 1 0 16 0a8 8 0 1 0-16 0M12 7v5l4 2",
    "candle": "M9 10h6v10H9zM12 10V8M12 3c2 2 2 5 0 5s-2-3 0-5",
    "cushion": "M5 8c4-2 10-2 14 0c2 3 2 6 0 9c-4 2-10 2-14 0c-2-3-2-6 0-9M12 12h.1",
    "book": "M6 4h12v16H6zM9 4v16M12 8h3M12 11h3",
    "pen": "M5 19l3-1L19 7l-2-2L6 16zM15 7l2 2",
    "box": "M4 9h16v10H4zM9 9v10M15 9v10M6 9V5M18 9V6",
    "chair": "M8 4h8v8H8zM6 12h12v3H6zM12 15v3M8 21l4-3l4 3",
    "screen": "M4 5h16v10H4zM9 20h6M12 15v5",
    "headphones": "M5 15v-3a7 7 0 0 1 14 0v3M4 14h3v5H4zM17 14h3v5h-3z",
    "speaker": "M7 3h10v18H7zM9 15a3 3 0 1 0 6 0a3 3 0 1 0-6 0M12 7h.1",
    "battery": "M4 8h14v8H4zM20 11v2M8 10v4M11 10v4",
    "camera": "M7 11a5 5 0 1 0 10 0a5 5 0 1 0-10 0M10 11a2 2 0 1 0 4 0M8 20h8M12 16v4",
    "keyboard": "M3 7h18v10H3zM6 10h.1M9 10h.1M12 10h.1M15 10h.1M18 10h.1M7 14h10",
    "backpack": "M7 9a5 5 0 0 1 10 0v11H7zM10 4V3h4v1M9 14h6v4H9z",
    "tent": "M3 19L12 5l9 14zM12 5v14M9 19l3-6l3 6",
    "bag": "M8 3h8v16a2 2 0 0 1-2 2h-4a2 2 0 0 1-2-2zM8 8h8M12 8v13",
    "stove": "M6 14h12M8 14l-2 6M16 14l2 6M12 4c3 4 3 7 0 7s-3-3 0-7",
    "torch": "M4 12h16M9 9h6v6H9zM12 6V3M7 7L5 5M17 7l2-2",
    "mat": "M4 8h12v8H4zM16 8a4 4 0 0 1 0 8a2 2 0 0 1 0-5",
    "shoe": "M3 16V9l5 2l4-3c1 3 4 5 9 5v3zM3 19h18",
    "band": "M5 12a4 4 0 0 1 7 0a4 4 0 0 0 7 0M5 12v3M19 12v3",
    "helmet": "M3 15a9 8 0 0 1 18 0zM8 9v6M13 7v8M5 15l2 4",
    "bottle": "M10 3h4v4l2 3v9a2 2 0 0 1-2 2h-4a2 2 0 0 1-2-2v-9l2-3zM8 13h8",
    "tube": "M8 4h8l-1 14H9zM9 18h6v3H9z",
    "soap": "M5 10h14v7H5zM8 6h.1M12 4h.1M15 7h.1",
    "drop": "M12 3c4 6 6 8 6 11a6 6 0 0 1-12 0c0-3 2-5 6-11",
    "sun": (
        "M8 12a4 4 0 1 0 8 0a4 4 0 1 0-8 0M12 3v2M12 19v2M3 12h2M19 12h2M6 6l1 1M17 17l1 1M18 6l-1"
        " 1M7 17l-1 1"
    ),
    "puzzle": "M5 8h5a2 2 0 1 1 4 0h5v5a2 2 0 1 0 0 3v4H5z",
    "dice": "M5 5h14v14H5zM9 9h.1M15 9h.1M12 12h.1M9 15h.1M15 15h.1",
    "blocks": "M4 13h7v7H4zM13 13h7v7h-7zM8 5h8v7H8z",
    "bear": (
        "M6 12a6 6 0 1 0 12 0a6 6 0 1 0-12 0M5 7a2 2 0 1 1 3-2M19 7a2 2 0 1 0-3-2M10 11h.1M14"
        " 11h.1M11 14h2"
    ),
    "kite": "M12 3l6 7l-6 8l-6-8zM12 18c0 2 3 1 3 3M6 10h12M12 3v15",
}


@cache
def css(folder: str) -> Response:
    """Response with the stylesheet of the site whose templates are in `folder`; cached."""
    parts = [
        f":root{{{_PALETTES[folder]}}}",
        (_FOLDER / "base.css").read_text(encoding="utf-8"),
        (_FOLDER / f"{folder}.css").read_text(encoding="utf-8"),
    ]
    if folder == "shop":
        parts += [_picture(name, path) for name, path in _ICONS.items()]
        parts += [f".s{n}{{width:{n * 10}%}}" for n in range(11)]
    return Response(
        200,
        "\n".join(parts).encode(),
        {"content-type": "text/css; charset=utf-8", "cache-control": "max-age=3600"},
    )


def _picture(name: str, path: str) -> str:
    svg = (
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 24 24' fill='none' stroke='#fff'"
        " stroke-width='1.4' stroke-linecap='round' stroke-linejoin='round'><path"
        f" d='{path}'/></svg>"
    )
    return f'.i-{name}{{background-image:url("data:image/svg+xml,{quote(svg, safe="/:=")}")}}'
