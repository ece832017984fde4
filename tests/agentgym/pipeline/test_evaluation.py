"""Any policy under a protocol: nothing is lost, nothing is played twice, and nothing that failed is
a failure of the policy.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agentgym.commands.evaluate import INVALID, code_of
from agentgym.config import ConfigError, load_config
from agentgym.evaluation.episodes import read_episodes
from agentgym.evaluation.paired import align
from agentgym.evaluation.protocol import EvaluationRequest
from agentgym.evaluation.result import Outcome, Result
from agentgym.evaluation.stored import stored_result
from agentgym.pipeline.contenders import invite
from agentgym.pipeline.evaluated import show
from agentgym.pipeline.evaluation import evaluate_policy, protocol_for, regrade
from agentgym.store.lease import LeaseHeld
from envs.registry import load_spec

pytestmark = pytest.mark.integration
OPTIONS = {"levels": ["GoToRedBallNoDists"], "view": "compact", "actions": "low"}
TEXTCRAFT = {"goals": ["paper", "melon seeds"], "distractors": 0}
NUM_ITEMS, MAX_TURNS = 6, 4
KEY = "sk-nobody-may-ever-write-this"


@pytest.fixture(scope="module")
def endpoints(serving):
    with (
        serving("babyai", OPTIONS) as (babyai, _),
        serving("textcraft", {"goals": ["paper", "melon seeds"], "distractors": 0}) as (
            textcraft,
            _,
        ),
    ):
        yield {"babyai": babyai, "textcraft": textcraft}


@pytest.fixture
def cfg(tmp_path, tiny_params, endpoints):
    return load_config(
        tiny_params(tmp_path, endpoint=endpoints["babyai"]),
        [f"env.options.{name}={json.dumps(value)}" for name, value in OPTIONS.items()],
    )


def ask(policy, **more):
    changes = {
        "items": {"num": NUM_ITEMS},
        "max_turns": MAX_TURNS,
        "greedy": False,
        "num_samples": 2,
        "concurrency": 4,
        **more.pop("changes", {}),
    }
    return EvaluationRequest(policy=policy, changes=changes, **more)


class Endpoint:
    """An OpenAI-compatible endpoint that keeps books. trouble: request number -> what it answers
    in place of a completion: a status, `slow`, `cut` or `empty`; refusing: text whose
    conversations get 500.
    """

    def __init__(self, trouble=None, retry_after="0", refusing=None):
        self.trouble, self.retry_after, self.refusing = trouble or {}, retry_after, refusing
        self.num, self.told, self.untold, self.refused = 0, [0, 0, 0], 0, 0
        self.heads, self.asked = [], []
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                self.say(200, {"data": [{"id": "stub"}]})

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.answer(self, asked)

            def say(self, status, tree, *, cut=False, **headers):
                body = json.dumps(tree).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body) + 50 * cut))
                self.end_headers()
                self.wfile.write(body)
                if cut:
                    self.close_connection = True

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)

    def answer(self, handler, asked):
        with self.lock:
            self.num += 1
            now = self.trouble.get(self.num)
            self.heads.append(dict(handler.headers))
            self.asked.append(asked)
        if self.refusing and self.refusing in json.dumps(asked["messages"]):
            now = 500
        if isinstance(now, int):
            with self.lock:
                self.refused += 1
            said = {"error": f"not with {handler.headers['Authorization']}"}
            handler.say(now, said, Retry_After=self.retry_after)
            return
        if now == "slow":
            time.sleep(1.5)
        if now in ("slow", "cut", "empty"):
            with self.lock:
                self.untold += 1
        if now == "empty":
            handler.say(200, {})
            return
        tokens = (20 * len(asked["messages"]), 5, 2)
        usage = {
            "prompt_tokens": tokens[0],
            "completion_tokens": tokens[2],
            "total_tokens": tokens[0] + tokens[2],
            "prompt_tokens_details": {"cached_tokens": tokens[1]},
        }
        if now is None:
            with self.lock:
                self.told = [a + b for a, b in zip(self.told, tokens, strict=True)]
        choice = {"message": {"content": "move forward"}, "finish_reason": "stop"}
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            handler.say(200, {"choices": [choice], "usage": usage}, cut=now == "cut")

    def __enter__(self):
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)


def test_chance_is_evaluated_once_kept_shown_and_graded_again(cfg):
    ran = evaluate_policy(cfg, ask("random"))
    assert (ran.how, code_of(ran), ran.result.is_complete) == ("ran", 0, True)
    assert len(ran.result.slots) == 12
    assert ran.result.coverage == 1.0
    assert {slot.family for slot in ran.result.slots} == {"GoToRedBallNoDists"}
    assert all(slot.task for slot in ran.result.slots)
    again = evaluate_policy(cfg, ask("random"))
    assert (again.how, again.result) == ("done", ran.result)
    assert show(cfg, ran.result.digest[:8]).result == ran.result
    assert Result.load(ran.folder) == ran.result
    rows = list(read_episodes(ran.folder / "episodes.parquet"))
    assert len(rows) == 12
    assert sum(row["success"] for row in rows) == sum(slot.success for slot in ran.result.slots)
    page = (ran.folder / "report.html").read_text()
    assert "default-src 'none'" in page
    assert "<script" not in page
    graded = regrade(cfg, ran.result.digest[:8])
    assert list(graded.changed) == []
    outcomes = [(slot.outcome, slot.success, slot.reward) for slot in ran.result.slots]
    found = [(slot.outcome, slot.success, slot.reward) for slot in graded.result.slots]
    assert found == outcomes
    assert graded.result.digest != ran.result.digest
    other = evaluate_policy(cfg, ask("random", changes={"seed": 2}))
    assert (other.how, other.result.digest != ran.result.digest) == ("ran", True)
    with pytest.raises(ConfigError, match="is none; there are"):
        show(cfg, "ffff")
    runs = ledger_runs(cfg)
    assert sorted(runs) == sorted({each.result.digest for each in (ran, graded, other)})
    assert runs[ran.result.digest].data.metrics["eval/coverage"] == 1.0


def test_an_evaluation_on_record_is_graded_again_on_what_the_owner_configured_alone(
    tmp_path, tiny_params
):
    recipes = shutil.copy("envs/textcraft/recipes.json", tmp_path)
    params = tiny_params(tmp_path, env={"name": "textcraft", "options": {}})
    own = load_config(params, [f"env.options.recipes={recipes}"])
    ran = evaluate_policy(own, ask("random", changes={"items": {"ids": ["textcraft_0"], "num": 1}}))
    assert ran.result.is_complete
    with pytest.raises(ConfigError, match="textcraft as on record would use recipes"):
        regrade(load_config(params), ran.result.digest[:8])
    assert regrade(own, ran.result.digest[:8]).changed == []


def ledger_runs(cfg):
    from agentgym.tracking.deliver import tracker_of

    tracker = tracker_of(cfg)
    found = tracker.client.search_runs(
        [tracker.experiment_id], filter_string="tags.kind = 'evaluation'"
    )
    return {run.data.tags["evaluation_key"]: run for run in found}


def test_two_environments_are_played_side_by_side_each_as_its_protocol_says(
    cfg, endpoints, tmp_path
):
    protocol = tmp_path / "both.yaml"
    protocol.write_text(
        json.dumps(
            {
                "envs": [
                    {
                        "env": {
                            "name": "babyai",
                            "options": OPTIONS,
                            "endpoints": [endpoints["babyai"]],
                        },
                        "items": {"ids": ["babyai_1", "babyai_2"]},
                        "max_turns": 3,
                        "num_samples": 2,
                    },
                    {
                        "env": {
                            "name": "textcraft",
                            "endpoints": [endpoints["textcraft"]],
                            "options": TEXTCRAFT,
                        },
                        "items": {"ids": ["textcraft_0"]},
                        "max_turns": 2,
                        "greedy": True,
                    },
                ]
            }
        )
    )
    asked = EvaluationRequest(policy="echo:inventory", protocol=str(protocol))
    result = evaluate_policy(cfg, asked).result
    assert result.envs == ("babyai", "textcraft")
    turns = {(slot.env, slot.sample): slot.num_turns for slot in result.slots}
    assert turns == {("babyai", 1): 3, ("babyai", 2): 3, ("textcraft", 0): 2, ("textcraft", 1): 2}
    assert result.numbers["babyai"]["invalid_actions"]["mean"] == 1.0  # it has no such action
    assert result.numbers["textcraft"]["invalid_actions"]["mean"] == 0.0
    assert "greedy" not in result.numbers["babyai"]["summary"]
    assert result.numbers["textcraft"]["summary"]["greedy"]["mean"] == 0.0


def test_an_endpoint_in_trouble_loses_nothing_and_every_token_is_counted(
    cfg, tmp_path, monkeypatch, capfd, caplog
):
    monkeypatch.setenv("AGENTGYM_SECRET_STUB", KEY)
    prices = tmp_path / "prices.yaml"
    prices.write_text("models: {stub: {input: 2.0, cached: 1.0, output: 10.0}}")
    trouble = {2: 429, 3: 500, 5: "slow", 8: "cut", 11: "empty", 14: 429, 15: 503}
    with Endpoint(trouble, retry_after="1") as stub:
        ran = evaluate_policy(
            cfg,
            ask(
                stub.url,
                key_variable="AGENTGYM_SECRET_STUB",
                timeout_s=1.0,
                max_retries=4,
                prices=prices,
            ),
        )
        assert {head["Authorization"] for head in stub.heads} == {f"Bearer {KEY}"}
    result, usage = ran.result, ran.result.usage
    assert (code_of(ran), result.coverage, result.is_complete) == (0, 1.0, True)
    assert all(slot.failed == () for slot in result.slots)
    assert usage.num_calls == stub.num
    assert [usage.input_tokens, usage.cached_tokens, usage.output_tokens] == stub.told
    assert (usage.num_untold, usage.num_failed) == (stub.untold, stub.untold + stub.refused)
    assert stub.untold == 3
    assert usage.known == {"input": None, "cached": None, "output": None}
    fresh, cached, output = stub.told[0] - stub.told[1], stub.told[1], stub.told[2]
    assert result.about["cost"]["amount"] == pytest.approx((2 * fresh + cached + 10 * output) / 1e6)
    assert result.about["cost"]["exact"] is False
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 5
    said = capfd.readouterr()
    assert not any(KEY.encode() in each for each in written)
    assert KEY not in said.out + said.err + caplog.text


def test_a_hosted_model_is_told_the_rules_and_has_room_to_answer(cfg):
    lines = []
    with Endpoint() as stub:
        alone = {"num_samples": 1, "max_turns": 2, "items": {"num": 1}}
        found = evaluate_policy(cfg, ask(stub.url, changes=alone), tell=lines.append)
        system, user = stub.asked[0]["messages"]
        assert (system["role"], user["role"]) == ("system", "user")
        assert "turn left, turn right - turn a quarter on the spot" in system["content"]
        assert stub.asked[0]["max_tokens"] == 512
        (line,) = lines
        assert "characters of instructions, at most 512 tokens a reply and 3072 an episode" in line
        assert line in found.result.about["notes"]
        assert found.result.about["instructions"] == {"babyai": system["content"]}

        formed = evaluate_policy(cfg, ask(stub.url, changes={**alone, "action_format": "react"}))
        told = stub.asked[-1]["messages"][0]["content"]
        assert told.startswith(system["content"])
        assert "Action: your action" in told

        shown = {"instructions": True, "examples": 1}
        worked = evaluate_policy(cfg, ask(stub.url, changes={**alone, **shown}))
        told = stub.asked[-1]["messages"][0]["content"]
        assert told.startswith(system["content"])
        assert "Example 1\nObservation: goal: go to the yellow key\n" in told
        assert "Example 2" not in told

        # what somebody chose holds
        chosen = {"instructions": False, "max_new_tokens": 9, "context_tokens": 300}
        bare = evaluate_policy(cfg, ask(stub.url, changes={**alone, **chosen}))
        assert stub.asked[-1]["messages"][0]["role"] == "user"
        assert stub.asked[-1]["max_tokens"] == 9
        kept = evaluate_policy(cfg, ask(stub.url, changes=alone, kept=["max_new_tokens"]))
        assert stub.asked[-1]["max_tokens"] == cfg.rollout.max_new_tokens
        long = evaluate_policy(cfg, ask(stub.url, changes={**alone, "max_new_tokens": 700}))
        assert stub.asked[-1]["max_tokens"] == 700  # more than the run's whole context
        again = evaluate_policy(cfg, ask(stub.url, changes=alone))
        assert (again.how, again.result.digest) == ("done", found.result.digest)
    asked = [each.result for each in (found, formed, worked, bare, kept, long)]
    assert len({each.digest for each in asked}) == 6
    # one protocol: what a model is told is its own, and results compare
    chance = evaluate_policy(cfg, ask("random", changes=alone))
    assert set(align(chance.result, found.result)) == {"babyai"}


def test_a_folder_handed_over_is_told_the_rules_and_a_checkpoint_of_ours_as_it_was_trained(
    cfg, model_folder, tmp_path
):
    alone = {"num_samples": 1, "max_turns": 2, "items": {"num": 1}}
    handed = tmp_path / "handed-over"
    shutil.copytree(model_folder, handed)
    (handed / "chat.json").unlink()  # no other program writes it
    lines = []
    ours = evaluate_policy(cfg, ask(str(model_folder), changes=alone), tell=lines.append)
    assert (lines, ours.result.about["instructions"]) == ([], {})
    theirs = evaluate_policy(cfg, ask(str(handed), changes=alone), tell=lines.append)
    assert "You are in a grid of rooms" in theirs.result.about["instructions"]["babyai"]
    # its window is not exceeded
    assert "at most 256 tokens a reply and 512 an episode" in lines[0]
    policy = dict(theirs.result.identity["policy"])
    assert policy.pop("asked")["babyai"]["max_new_tokens"] == 256
    assert policy == ours.result.identity["policy"]


def test_longer_episodes_leave_fewer_in_flight_unless_their_number_was_chosen(
    cfg, model_folder, tmp_path
):
    handed = tmp_path / "handed-over"
    shutil.copytree(model_folder, handed)
    (handed / "chat.json").unlink()

    def in_flight(**changes):
        request = EvaluationRequest(policy=str(handed), changes=changes)
        return invite(cfg, protocol_for(cfg, request), request).protocol.concurrency

    before = cfg.rollout.concurrency
    assert in_flight() == before * cfg.model.context_tokens // 512
    assert in_flight(concurrency=before) == before


def test_what_cannot_be_answered_is_kept_as_such_and_played_again_when_it_can(cfg):
    with Endpoint() as stub:
        first = evaluate_policy(cfg, ask(stub.url, changes={"items": {"num": 1}})).result
        goal = next(read_episodes(show(cfg, "").folder / "episodes.parquet"))["first_observation"]
    assert first.coverage == 1.0
    with Endpoint(refusing=json.dumps(goal)[1:-1]) as stub:
        asked = ask(stub.url, max_retries=0, model="stub", changes={"max_attempts": 2})
        ran = evaluate_policy(cfg, asked)
        failed = [slot for slot in ran.result.slots if not slot.counts]
        assert failed
        assert all(slot.outcome is Outcome.INTERRUPTED for slot in failed)
        assert [len(slot.failed) for slot in failed] == [2] * len(failed)
        assert all(slot.reward is None for slot in failed)
        assert code_of(ran) == INVALID
        numbers = ran.result.numbers["babyai"]
        assert numbers["coverage"] == pytest.approx(1 - len(failed) / 12)
        assert ran.result.usage.num_failed == 2 * len(failed)
        stub.refusing = None
        before = stub.num
        mended = evaluate_policy(cfg, asked)
    assert (mended.how, code_of(mended)) == ("resumed", 0)
    assert stub.num - before <= MAX_TURNS * len(failed)
    assert {slot.item_id for slot in mended.result.slots if slot.failed} == {
        slot.item_id for slot in failed
    }
    retried = mended.result.numbers["babyai"]["retried"]
    assert retried["num"] == len(failed)
    assert [slot for slot in mended.result.slots if not slot.failed] == [
        slot for slot in ran.result.slots if not slot.failed
    ]
    assert len(list(read_episodes(mended.folder / "episodes.parquet"))) == 12 + 2 * len(failed)


@pytest.mark.parametrize("limit", [True, 1, 0.1])
def test_it_stops_at_failures_beyond_the_limit_and_goes_on_from_there(cfg, limit):
    with Endpoint(dict.fromkeys(range(9, 40), 500)) as stub:
        asked = ask(
            stub.url,
            max_retries=0,
            model="stub",
            changes={"max_attempts": 1, "fail_on_error": limit, "concurrency": 1},
        )
        stopped = evaluate_policy(cfg, asked)
        assert "failed for good" in stopped.stopped
        assert code_of(stopped) == 1
        assert stopped.result.outcomes["interrupted"] == (1 if limit is True else 2)
        assert stopped.result.outcomes["not_played"] > 0
        stub.trouble = {}
        assert code_of(evaluate_policy(cfg, asked)) == 0


def test_a_limit_of_cost_stops_cleanly_and_counts_over_restarts(cfg, tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: EUR\nmodels: {stub: {input: 1000000.0}}")  # 1 a token
    with Endpoint() as stub:
        asked = ask(stub.url, prices=prices, max_cost=100.0, changes={"concurrency": 1})
        stopped = evaluate_policy(cfg, asked)
        assert "limit of cost is reached: " in stopped.stopped
        assert stopped.result.about["cost"]["amount"] == stub.told[0] >= 100
        assert stub.told[0] < 100 + 20 * 8  # the request in flight
        spent = stub.num
        assert "limit of cost" in evaluate_policy(cfg, asked).stopped
        assert stub.num == spent  # none was sent
        more = asked.model_copy(update={"max_cost": 1e6})
        done = evaluate_policy(cfg, more)
        assert (done.how, code_of(done)) == ("resumed", 0)
        assert done.result.usage.input_tokens == stub.told[0]
        assert done.result.about["cost"] == {
            "amount": stub.told[0],
            "currency": "EUR",
            "exact": True,
        }


def test_an_endpoint_that_refuses_the_key_ends_the_evaluation_at_once(cfg, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTGYM_SECRET_STUB", KEY)
    with Endpoint(dict.fromkeys(range(1, 100), 401)) as stub:
        asked = ask(stub.url, key_variable="AGENTGYM_SECRET_STUB", changes={"concurrency": 2})
        stopped = evaluate_policy(cfg, asked)
        assert "status 401" in stopped.stopped
        assert "not with Bearer ***" in stopped.stopped  # it repeated the key
        assert stub.num <= 2
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in each for each in written)


def test_one_writer_at_a_time(cfg):
    from agentgym.pipeline.table import open_store

    ran = evaluate_policy(cfg, ask("random", changes={"min_coverage": 0.5, "seed": 9}))
    store = open_store(cfg)
    with store.open("evaluation", ran.manifest.key):
        other = store.open("evaluation", ran.manifest.key)
        with pytest.raises(LeaseHeld):
            other.__enter__()


def test_killed_at_five_random_points_the_report_is_that_of_an_undisturbed_one(
    cfg, tmp_path, tiny_params, endpoints, model_folder
):
    changes = {
        "deterministic": True,
        "chunk_episodes": 2,
        "num_samples": 3,
        "greedy": True,
        "concurrency": 4,
        "max_new_tokens": 4,
        "context_tokens": 256,
    }
    asked = ask(str(model_folder), changes=changes)
    whole = evaluate_policy(cfg, asked)
    total = len(whole.result.slots)
    other = load_config(
        tiny_params(tmp_path / "killed", endpoint=endpoints["babyai"]),
        [f"env.options.{name}={json.dumps(value)}" for name, value in OPTIONS.items()],
    )
    points = sorted(random.Random().sample(range(1, total), 5))
    for point in points:
        ended = in_child(lambda point=point: evaluate_policy(other, asked, Killing(point)))
        assert os.WIFSIGNALED(ended), ended
    resumed = evaluate_policy(other, asked)
    assert resumed.how == "resumed", points
    assert resumed.result.to_bytes() == whole.result.to_bytes(), points
    assert resumed.manifest.digest == whole.manifest.digest
    files = [each.folder / "evaluation.png" for each in (whole, resumed)]
    assert files[0].read_bytes() == files[1].read_bytes()


class Killing:
    """Kills the process once so many episodes are over, of all its predecessors too."""

    def __init__(self, point):
        self.left = point

    def start(self, what, total):
        pass

    def advance(self, count=1, note=""):
        self.left -= count
        if self.left <= 0 and count == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def in_child(work):
    """How a forked process that does this ended."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, make_model, tokenizer, keep):
    from agentgym.models.checkpoint import new_checkpoint, save_pretrained

    folder = tmp_path_factory.mktemp("model") / "tiny"
    checkpoint = new_checkpoint(make_model(), tokenizer)
    save_pretrained(folder, *keep(checkpoint.snapshot(), checkpoint.files()))
    return folder


def test_a_checkpoint_scores_as_the_runs_own_evaluation_of_it_and_as_its_registered_version(
    copy_run, tmp_path, tiny_params, tiny_endpoint
):
    params = tiny_params(copy_run(tmp_path), endpoint=tiny_endpoint, deterministic=True)
    run = load_config(params)
    from agentgym.pipeline.table import finished, open_store

    store = open_store(run)
    own = finished(run, store)["evaluate-stage-2"]
    ours = stored_result(store, own)
    by_step = evaluate_policy(run, EvaluationRequest(policy=":stage-2"))
    registered = evaluate_policy(run, EvaluationRequest(policy=f"models:/{run.registered_model}/1"))
    numbers = by_step.result.numbers["babyai"]
    for name in ("greedy", "avg_at_2", "pass_at_2"):
        assert numbers["summary"][name]["mean"] == own.results["summary"][name]["mean"]
    for found in (by_step, registered):
        assert [slot.to_row()[4:] for slot in found.result.slots] == [
            slot.to_row()[4:] for slot in ours.slots
        ]
    assert by_step.result.identity["policy"] == ours.identity["policy"]
    assert registered.result.identity["policy"]["tokenizer"]


def test_a_repository_of_the_hub_is_evaluated_as_the_folder_of_its_files(
    cfg, model_folder, tmp_path, monkeypatch
):
    """The Hub's own cache, as a download leaves it; nothing is asked of a network."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    kept = tmp_path / "hub/models--somebody--tiny"
    shutil.copytree(model_folder, kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs/main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    by_name = evaluate_policy(cfg, ask("somebody/tiny"))
    assert (by_name.how, by_name.result.coverage) == ("ran", 1.0)
    # the same weights are the same question, whatever they are called
    for policy in (f"somebody/tiny@{commit}", str(model_folder)):
        again = evaluate_policy(cfg, ask(policy))
        assert (again.how, again.result.digest) == ("done", by_name.result.digest)
    with pytest.raises(ConfigError, match="somebody/other cannot be had from the Hub"):
        evaluate_policy(cfg, ask("somebody/other"))


def test_chance_is_refused_at_once_where_an_environment_gives_no_hints(
    serving, tmp_path, tiny_params
):
    silent = replace(load_spec("babyai", OPTIONS), offers_hints=False)
    with serving(silent) as (endpoint, _):
        for dialect, url in (("native", endpoint), ("agentgym", f"{endpoint}/agentgym")):
            cfg = load_config(tiny_params(tmp_path / dialect, endpoint=url))
            cfg = cfg.model_copy(update={"env": cfg.env.model_copy(update={"dialect": dialect})})
            with pytest.raises(ConfigError, match=f"babyai: {url} gives no hints, of which random"):
                evaluate_policy(cfg, ask("random"))
            assert not Path(cfg.store.path, "steps").exists()


def test_a_policy_that_is_not_there_is_refused_before_anything_starts(cfg, tmp_path):
    for policy, said in (
        (":stage-9", "unknown step"),
        ("models:/nobody@champion", "models:/nobody"),
        ("http://127.0.0.1:9/v1", "does not say which models"),
        (str(tmp_path), "holds no config.json"),
    ):
        with pytest.raises(ConfigError, match=said):
            evaluate_policy(cfg, ask(policy))
    with pytest.raises(ConfigError, match="endpoint promises"), Endpoint() as stub:
        evaluate_policy(cfg, ask(stub.url, changes={"deterministic": True}))
    assert not Path(cfg.store.path, "steps").exists()
