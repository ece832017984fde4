"""WebArena: tasks in a web browser, on the embedded sites or a deployment of WebArena's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from envs.dialect import Dialect
from envs.env import EnvSpec
from envs.examples import recorded
from envs.options import check_known, choose, hint, one_of, seconds, secret_variable, whole_number

if TYPE_CHECKING:
    from envs.webarena.evaluators import Judge
    from envs.webarena.tabs import Limits

DEFAULTS: dict[str, Any] = {
    "tasks": "embedded",
    "sites": "embedded",
    "missing_sites": "refuse",
    "names": {},
    "storage_state": "",
    "judge": None,
    "browser": "",
    "concurrency": 0,
    "viewport": [1280, 720],
    "max_observation_chars": 16_000,
    "max_tabs": 8,
    "quiet_s": 0.1,
    "settle_s": 2.0,
    "goto_s": 30.0,
    "seed": 0,
}
NAMES = {  # the addresses that policies see instead of the sites' real ones
    "shopping": "http://onestopmarket.com",
    "shopping_admin": "http://luma.com/admin",
    "reddit": "http://reddit.com",
    "gitlab": "http://gitlab.com",
    "wikipedia": "http://wikipedia.org",
    "map": "http://openstreetmap.org",
    "homepage": "http://homepage.com",
}

_INSTRUCTIONS = """\
You act in a web browser to reach an objective. You are shown the page as an accessibility tree: \
each line has the id of an element, its \
role and its name. You also see the open tabs, the address of the page, the objective and your \
previous action.
Think first if you like. Then end your reply with one action in triple backticks, for example \
```click [12]```:
click [id]: click the element. An option of a list is chosen by a click on it.
hover [id]: move the mouse over it.
type [id] [text] [1 or 0]: click the element and type the text; with 1 (also if left out) Enter is \
pressed after it, with 0 it is not.
press [keys]: press a key or a combination such as Control+a.
scroll [down] or scroll [up]: move the page by one screen.
new_tab, tab_focus [number], close_tab: open a tab, go to one, close the current one.
goto [url], go_back, go_forward: move between pages.
stop [answer]: the objective is reached; give the answer in brackets if one is asked for. If the \
objective cannot be reached, say N/A.
Only elements that are shown can be used; ids change when a new page is opened. Do one thing at a \
time."""


class WebArenaReset(BaseModel):
    id: int = Field(validation_alias="env_idx")
    seed: int = 0  # accepted and not used, as in AgentGym's server
    data_idx: int = Field(validation_alias="idx")


DIALECT = Dialect(
    greeting="ok",
    reset=WebArenaReset,
    created=lambda environment: {"env_idx": environment.id},
    shown=lambda environment: {"observation": environment.observation, **environment.opening},
    stepped=lambda environment: {
        "observation": environment.observation,
        "reward": environment.reward,
        "terminated": environment.done and not environment.truncated,
        "truncated": environment.truncated,
        "info": environment.info,
    },
    polite=False,
    looked=lambda environment: environment.observation,
    opened=lambda simulator: dict(simulator.about),
    closed=lambda closed: {"closed": "closed" if closed else "no such environment"},
    reset_failed={"observation": "TimeoutError", "sites": "Error", "object": "Error"},
    step_failed=lambda text: {
        "observation": text,
        "reward": 0,
        "terminated": False,
        "truncated": False,
        "info": {},
    },
)


def spec(options: dict[str, Any]) -> EnvSpec:
    """Build the environment from its options (see the README); sites and browser start later.

    Errors: ValueError naming the wrong option and the nearest known one, the task and its wrong
    field, or the package to install.
    """
    chosen = choose("webarena", options, DEFAULTS)
    try:
        import playwright.async_api  # noqa: F401
    except ImportError:
        raise ValueError(
            "webarena needs Playwright; install it from the checkout: pip install -e '.[webarena]'"
        ) from None
    from envs.webarena.chromium import find_browser, use_sandbox
    from envs.webarena.helpers import check_calls
    from envs.webarena.places import Embedded, Place, Shared
    from envs.webarena.tasks import embedded_gold, identity, load
    from envs.webarena.world import Episode, Setting

    executable = find_browser(_text(chosen, "browser"))
    embedded = chosen["sites"] == "embedded"
    sites = Embedded.addresses() if embedded else _addresses(chosen["sites"])
    skips = one_of("webarena", chosen, "missing_sites", ("refuse", "skip")) == "skip"
    tasks = load(_tasks_file(chosen), sites, skip_missing=skips)
    check_calls(tasks.values(), embedded=embedded)
    given = whole_number("webarena", chosen, "concurrency", 0, 1024)
    concurrency = given or 2 * (os.cpu_count() or 1)
    seed = whole_number("webarena", chosen, "seed", 0, 2**31 - 1)
    make: Callable[[], Place] = partial(Embedded, executable, concurrency, seed)
    if not embedded:
        make = partial(Place, executable, concurrency, sites)
        make()  # checks the addresses; starts nothing
    use_sandbox()  # checks its variable
    shared = Shared(make)
    setting = Setting(
        tasks=tasks,
        sites=shared.get,
        names=_names(chosen["names"], sites),
        limits=_limits(chosen),
        max_chars=whole_number("webarena", chosen, "max_observation_chars", 100, 1_000_000),
        judge=_judge(chosen["judge"]),
        gold=embedded_gold(sites) if chosen["tasks"] == "embedded" and embedded else {},
        storage=_storage(chosen, not embedded and any(t.storage_state for t in tasks.values())),
    )
    return EnvSpec(
        name="webarena",
        dialect=DIALECT,
        instructions=_INSTRUCTIONS,
        make=lambda: Episode(setting),
        options=chosen,
        offers_hints=True,
        probe_actions=("scroll [down]",),
        probe_task=min(tasks),
        blocking=True,
        awaited=True,
        close=shared.stop,
        examples=partial(recorded, Path(__file__).with_name("examples.json")),
        identity=partial(identity, tasks),
    )


def _tasks_file(chosen: Mapping[str, Any]) -> Path:
    if chosen["tasks"] == "embedded":
        return Path(__file__).with_name("tasks.json")
    path = Path(_text(chosen, "tasks"))
    if not path.exists():
        near = hint(path, ["embedded"], cutoff=0.6)
        raise ValueError(f"webarena option tasks: there is no file or folder {str(path)!r}{near}")
    return path


def _addresses(value: Any) -> dict[str, str]:
    from envs.webarena.tasks import SITE_NAMES

    is_named = isinstance(value, dict) and all(isinstance(url, str) for url in value.values())
    if not is_named or not value:
        raise ValueError(
            'webarena option sites: expected "embedded" or an object such as {"shopping":'
            f' "http://host:7770"}}, got {value!r}'
        )
    check_known("webarena", "sites", "site", value, SITE_NAMES)
    return {name: url.rstrip("/") for name, url in value.items()}


def _names(value: Any, sites: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return (real, shown) URL of each site, longest real URL first. Errors: ValueError.
    value: the option `names`, site name -> shown URL; for other sites NAMES has it.
    """
    if not isinstance(value, dict) or not all(isinstance(url, str) for url in value.values()):
        raise ValueError(
            'webarena option names: expected an object such as {"shopping":'
            f' "http://onestopmarket.com"}}, got {value!r}'
        )
    for name in value:
        if name not in sites:
            raise ValueError(
                f"webarena option names: {name!r} is no configured site; there are:"
                f" {', '.join(sorted(sites))}"
            )
    shown = {**NAMES, **{name: url.rstrip("/") for name, url in value.items()}}
    pairs = ((url, shown[name]) for name, url in sites.items())
    return tuple(sorted(pairs, key=lambda pair: -len(pair[0])))


def _limits(chosen: Mapping[str, Any]) -> Limits:
    from envs.webarena.tabs import Limits

    size = chosen["viewport"]
    if not (
        isinstance(size, list | tuple)
        and len(size) == 2
        and all(isinstance(side, int) and 200 <= side <= 4000 for side in size)
    ):
        raise ValueError(
            "webarena option viewport: expected [width, height], each from 200 to 4000, got"
            f" {size!r}"
        )
    return Limits(
        width=size[0],
        height=size[1],
        tabs=whole_number("webarena", chosen, "max_tabs", 1, 50),
        quiet_s=seconds("webarena", chosen, "quiet_s", 5.0),
        settle_s=seconds("webarena", chosen, "settle_s", 20.0),
        goto_s=seconds("webarena", chosen, "goto_s", 60.0),
    )


def _judge(value: Any) -> Judge:
    from envs.webarena.judge import Endpoint, Rules

    if value is None:
        return Rules()
    known = {"base_url", "model", "api_key_env", "timeout_s"}
    if not isinstance(value, dict) or not {"base_url", "model"} <= value.keys() <= known:
        raise ValueError(
            "webarena option judge: expected base_url, model and perhaps api_key_env and"
            f" timeout_s, got {value!r}"
        )
    if not str(value["base_url"]).startswith(("http://", "https://")):
        given = f"base_url {value['base_url']!r}"
        raise ValueError(f"webarena option judge: {given} is no http(s) address")
    named = value.get("api_key_env", "")
    variable = secret_variable("webarena option judge: api_key_env", named) if named != "" else ""
    timeout_s = min(60.0, float(value.get("timeout_s", 40.0)))
    return Endpoint(str(value["base_url"]), str(value["model"]), variable, timeout_s)


def _storage(chosen: Mapping[str, Any], needed: bool) -> Path | None:
    value = _text(chosen, "storage_state")
    if value == "none" or (not value and not needed):
        return None
    if not value:
        raise ValueError(
            "webarena option storage_state: the tasks need logins; name the folder of their files,"
            ' or "none" to play logged out'
        )
    if not Path(value).is_dir():
        raise ValueError(f"webarena option storage_state: there is no folder {value!r}")
    return Path(value)


def _text(chosen: Mapping[str, Any], key: str) -> str:
    if not isinstance(chosen[key], str):
        raise ValueError(f"webarena option {key}: expected a text, got {chosen[key]!r}")
    return str(chosen[key])
