"""Numbers in the documents equal those in the result files; in the README every number comes from a
result or is a plain fact listed here.

A row of PAGES names a part of the page (a line, or the paragraph that links the result) and the
numbers from the result file that must appear there, in this order. The words between them are free.
A number of the README that no row covers and FACTS does not list has no source.
"""

import math
import re
from pathlib import Path

import pytest

from agentgym.algorithms.recipe import RECIPES
from agentgym.config import load_config
from tests.published import (
    choosing_seeds,
    equal_cpu,
    long_against_sft,
    p_value,
    percent,
    result,
    signed,
    unlock,
)

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
WORDS = (
    "two three four five six seven eight nine ten eleven twelve fifteen sixteen twenty thirty forty"
    " fifty sixty hundred thousand"
)
NUMBER = re.compile(
    rf"(?<![\w.@/\-])[+−-]?\d[\d.,]*(?![\w])|\b(?:{'|'.join(WORDS.split())})\b", re.IGNORECASE
)

# not results: properties of the code, its requirements and its sources
FACTS = (
    "0.25 M-parameter",  # checked below
    "300 demonstrations",
    "at most 6, 9 and 12 turns",
    "512 test items, 12 turns, greedy and 4 samples at temperature 1; 95% intervals",
    "Python 3.11 or 3.12",
    "## Two commands",
    "## Four doors",
    "## Three pages",
    "one machine, Ray",
    "never a reward of 0",
    "with 95 % intervals",
    "No model of 3 or 7 billion parameters",
    "for example Qwen3.5",
    "agentgym-babyai version 1",
    "moves to version 1",
    "Apache-2.0",
)


def pipeline_rows():
    """Numbers of the first run of pipeline.json, for each line of the sample output."""
    for name, found in result("pipeline")["runs"][0]["evaluations"].items():
        title = {"initialize": "untrained"}.get(name, name.replace("-", " "))
        numbers = re.findall(r"\d", title)
        for key in ("greedy", "avg_at_4", "pass_at_4"):
            row = found["summary"][key]
            numbers += [percent(row["mean"], 1), percent(row["low"]), percent(row["high"])]
        if gain := (found["paired"] or {}).get("avg_at_4"):
            numbers.append(f"{100 * gain['mean']:+.1f}")
            numbers += [f"{100 * gain[end]:+.0f}" for end in ("low", "high")]
        yield line(title), numbers


def times():
    """Seconds of the sample output's parts, as its run printed them."""
    return list(map(str, result("pipeline")["runs"][0]["parts_s"].values()))


def pace():
    """Pace as the sample output's run printed it."""
    found = result("pipeline")["runs"][0]["pace"]
    return [str(found["multiple"]), f"{found['reference_s']:.1f}"]


def drift():
    """Number of the default recipe's seeds, mean and lowest success at the end, and largest
    fall.
    """
    numbers = []
    for recipe in ("default", "former"):
        found = result("drift")["summary"][recipe]
        assert found["seeds"] == 10
        numbers += [found["last_mean"], found["last_least"], max(found["falls"])]
    return ["Ten", *(f"{100 * number:.1f}" for number in numbers)]


def learned():
    tables = {table["name"]: table["rows"] for table in result("learn")["tables"]}
    rl = [row for row in tables["learn"] if not row["group"]]
    alone = {row["recipe"]: row for row in tables["offline"] if not row["group"]}
    return rl, alone


def rl_success():
    rl, _ = learned()
    means = [row["success"]["avg_at_4"]["mean"] for row in rl]
    worst = min((min(row["success"]["avg_at_4"]["per_seed"]), row["recipe"]) for row in rl)
    start = {percent(row["start"]["avg_at_4"]["mean"]) for row in rl}
    assert len(start) == 1
    seeds, items = {len(row["seeds"]) for row in rl}, {row["evaluation"]["num_items"] for row in rl}
    ends = [percent(min(means)), percent(max(means))]
    return [*map(str, (*seeds, *items)), *start, *ends, worst[1], percent(worst[0])]


def supervised():
    return [
        percent(learned()[1][name]["success"]["avg_at_4"]["mean"])
        for name in ("sft", "dpo", "agent_evol")
    ]


def verdicts(of):
    return [each for each in result("learn")["verdicts"] if of in each["what"]]


def worst_of_the_chosen():
    """Lowest sampled success over all recipes and seeds, with each recipe's best horizon."""
    found = verdicts("ends at 85% or more with every seed")
    worst = [re.search(r"worst: seed \d with ([\d.]+) %", each["figures"])[1] for each in found]
    assert len(worst) >= 6
    return str(math.floor(min(map(float, worst))))


def dpo():
    (found,) = verdicts("dpo improves on its own start")
    assert found["ok"] is False
    return list(re.search(r"\[([+-][\d.]+), ([+-][\d.]+)\]", found["figures"]).groups())


def below_grpo():
    verdict = next(
        each for each in result("learn")["verdicts"] if each["what"].startswith("control (b)")
    )
    assert verdict["ok"] is False
    return [re.match(r"GRPO minus SFT \+([\d.]+) ", verdict["figures"])[1], rl_success()[0]]


def losses():
    rows = {row["recipe"]: row for row in result("losses")["rows"]}
    (start,) = {percent(row["start"]["avg_at_4"]["mean"]) for row in rows.values()}
    (seeds,) = {len(row["seeds"]) for row in rows.values()}
    ends = [percent(rows[n]["success"]["avg_at_4"]["mean"], 1) for n in ("gspo", "cispo", "grpo")]
    return [start, *ends, str(seeds)]


def machine(name):
    found = result(name)["machine"]
    return [str(found["cores"]), *found["cpu"]]


def faults():
    hits = [trial for trial in result("faults")["trials"] if trial["hit"]]
    bad = [trial for trial in hits if any(trial["failures"].values())]
    return [str(len(hits)), str(len({trial["kind"] for trial in hits})), str(len(hits) - len(bad))]


def engines():
    """Success of each seed through vLLM and the built-in engine, and their ratio of token rates."""
    found = result("engines")
    assert found["verdict"]["ok"]
    ended = [*found["verdict"]["vllm"], *found["verdict"]["torch"]]
    return ["Three", *map(str, ended), str(found["throughput"]["vllm_over_torch"])]


def real_model():
    run, *others = result("real-model")["runs"]
    assert [each["seed"] for each in (run, *others)] == list(range(1 + len(others)))
    evaluations = run["evaluations"]
    ends = [evaluations[each]["summary"]["avg_at_1"]["mean"] for each in ("warm-start", "stage-1")]
    gain = evaluations["stage-1"]["paired"]["avg_at_1"]
    assert evaluations["initialize"]["summary"]["avg_at_1"]["high"] < ends[0]
    assert run["audit"] == "passed"
    return [
        str(math.ceil(run["wall_s"] / 60)),
        f"{run['peak_gib']:.1f}",
        *map(percent, ends),
        *(f"{100 * gain[key]:+.1f}" for key in ("mean", "low", "high")),
    ]


def runs(key):
    return [run[key] for run in result("pipeline")["runs"]]


def checkpoints():
    found = result("checkpoints")
    shares = [found["memory_of_two_to_one"][phase] for phase in ("build", "commit", "resume")]
    times = [row["time_to_copy"][phase] for phase in ("commit", "resume") for row in found["ranks"]]
    return [f"{each:.2f}" for each in (*shares, *times)]


def decisions():
    false = result("decisions")["false_positives"]
    families = max(each["families"] for each in result("decisions")["cases"])
    return [
        *(percent(false[name], 1) for name in ("ours", "ours_highest")),
        *(percent(false["mean_lowest"]), str(families)),
        percent(false["items_highest_with_families"]),
    ]


def powers():
    """Rows of the table: items, samples, and the shares of detected gains of 5 and 10 points,
    without families and with ten.
    """
    shares = {
        (each["items"], each["samples"], each["families"], each["gain"]): each["said"]["ours"]
        for each in result("decisions")["cases"]
    }
    for items in (100, 200, 500):
        for samples in (1, 4, 8):
            found = [shares[items, samples, f, gain] for f in (0, 10) for gain in (0.05, 0.1)]
            yield [str(items), str(samples), *(f"{each:.2f}".lstrip("0") for each in found)]


def gate():
    found = result("gate")
    (better,) = (
        each["PROMOTE"]
        for each in found["cases"]
        if (each["items"], each["samples"], each["families"], each["gain"]) == (512, 4, 0, 0.05)
    )
    shares = [found["false_promotions"], found["false_promotions_upper"]]
    shares += [found["highest"], found["highest_upper"], better]
    return [*(percent(share, 1) for share in shares), percent(found["looks"])]


def lora():
    found = result("lora")
    rank, lr = (found["changes"][index].rpartition("=")[2] for index in (0, 2))
    sizes = [run["bytes"] for run in found["runs"]]
    share = max(
        (size["adapter"] + size["its_optimizer"]) / (size["weights"] + size["their_optimizer"])
        for size in sizes
    )
    verdict = found["verdict"]
    successes = map(str, (*verdict["start"], *verdict["end"]))
    actions, items = f"{verdict['actions']:,}", str(verdict["items"])
    return [rank, lr, *successes, f"{share:.2f}", actions, items]


def fleets():
    found = result("fleets")
    calls = f"{found['all_calls_per_fleet']:.0f}"
    return [str(found["fleets"]), f"{found['wall_s_per_fleet']:.1f}", calls]


def packed():
    environments = result("packed")["environments"]
    return [
        str(environments[env][name])
        for name in ("tokens_ratio", "seconds_ratio")
        for env in ("sciworld", "webarena")
    ]


def packed_by_micro_batch():
    environments = result("packed")["environments"]
    return [
        f"{environments[env]['tokens_ratio_by_micro_batch']:.2f}"
        for env in ("sciworld", "webarena")
    ]


def line(start):
    """Pattern of the line that begins with `start`."""
    return rf"^{start}\b.*$"


def paragraph(link):
    """Pattern of the paragraph that links a result."""
    return rf"(?:^.+\n)*^.*{re.escape(f'results/{link}')}.*\n(?:^.+\n)*"


def section(heading):
    """Pattern of the section below a heading of the second level."""
    return rf"^## {heading}\n(?:(?!## ).*\n)*"


# page -> (pattern of a part, the numbers that must appear there in this order)
PAGES = {
    "README.md": [
        (line("make pipeline"), [str(math.ceil(max(runs("wall_s")) / 60)), *machine("pipeline")]),
        *pipeline_rows(),
        (line("time"), times()),
        (line("pace"), pace()),
        (line("Run it again"), [str(math.ceil(max(runs("again_s"))))]),
        (line(r"\| \[a real"), [*real_model()[2:4], real_model()[0]]),
        (line(r"\| \[default run"), ["ten", *drift()[1:3]]),
        (
            line(r"\| \[long horizon"),
            [
                *signed(*long_against_sft()["avg_at_4"][:3]),
                p_value(long_against_sft()["avg_at_4"][3]),
            ],
        ),
        (
            line(r"\| the same, greedy"),
            signed(*(long_against_sft()[each][0] for each in ("greedy", "pass_at_4"))),
        ),
        (line(r"\| \[packing"), packed_by_micro_batch()),
        (line(r"\| \[random kills"), [faults()[0], faults()[2]]),
        (
            r"^Success is sampled(?:.+\n)+",
            [str(len(result("unlock")["rows"][0]["seeds"])), *choosing_seeds()],
        ),
    ],
    "docs/reference/results.md": [
        (paragraph("pipeline.json"), [{3: "Three"}[len(runs("seed"))]]),
        (paragraph("drift.json"), drift()),
        (
            section("Recipes on the default task"),
            [*losses(), *rl_success(), worst_of_the_chosen(), *supervised(), *dpo(), *below_grpo()],
        ),
        (section("Behind a locked door"), [*unlock(), *equal_cpu(), *choosing_seeds()]),
        (paragraph("packed.json"), packed_by_micro_batch()),
        (paragraph("engines.json"), engines()),
        (paragraph("real-model.md"), real_model()),
        (paragraph("faults.md"), faults()),
    ],
    "docs/concepts/what-a-run-keeps.md": [(paragraph("checkpoints.json"), checkpoints())],
    "docs/concepts/paired-comparison.md": [
        (paragraph("decisions.json"), decisions()),
        *((line(rf"\| {row[0]} x {row[1]}"), row) for row in powers()),
    ],
    "docs/concepts/gate.md": [(paragraph("gate.json"), gate())],
    "docs/how-to/train-an-adapter.md": [(paragraph("lora.json"), lora())],
    "docs/how-to/kubernetes.md": [(paragraph("fleets.json"), fleets())],
    "docs/how-to/memory-and-speed.md": [
        (paragraph("rival.json"), [str(result("rival")["ratio"])]),
        (paragraph("packed.json"), packed()),
    ],
}
BOUND = [(page, *row) for page, rows in PAGES.items() for row in rows]


def without(text, where, values):
    """Remove the values from the text; they must appear in this order in the part that matches."""
    part = re.search(where, text, re.MULTILINE)
    assert part, f"nothing matches {where!r}"
    kept, at = [text[: part.start()]], part.start()
    for value in values:
        whole = re.compile(rf"(?<![\d.+−])(?<!\D-){re.escape(value)}(?!\.?\d)")
        found = whole.search(text, at, part.end())
        assert found, f"{value} of {values} does not stand in {part[0]!r}"
        kept.append(text[at : found.start()])
        at = found.end()
    return "".join([*kept, text[at:]])


@pytest.mark.parametrize(("page", "where", "values"), BOUND, ids=range(len(BOUND)))
def test_a_number_is_that_of_its_file(page, where, values):
    without((ROOT / page).read_text(), where, values)


def test_another_number_or_order_is_found():
    for values in (["96.2", "94"], ["95.5", "96.1", "96.1"]):
        with pytest.raises(AssertionError, match="does not stand in"):
            without(README, line("stage 3"), values)


def unbound(text):
    """Numbers of the README that no row of PAGES covers and FACTS does not list, with the text
    around them.
    """
    for fact in FACTS:
        text = re.sub(re.escape(fact).replace(r"\ ", r"\s+"), "", text)
    for bound in PAGES["README.md"]:
        text = without(text, *bound)
    text = prose(text)
    return [text[max(0, found.start() - 40) : found.end() + 20] for found in NUMBER.finditer(text)]


def prose(text):
    """Remove code: commands (their comments stay), inline code, addresses."""
    text = re.sub(
        r"```sh\n(.*?)```",
        lambda block: "\n".join(line.partition("  #")[2] for line in block[1].splitlines()),
        text,
        flags=re.DOTALL,
    )
    return re.sub(r"(?<=\])\([^)]*\)|https?://\S+|`[^`\n]*`", "", text)


def test_no_other_number_stands_in_the_readme():
    assert unbound(README) == []


@pytest.mark.parametrize(
    "claim",
    [
        "It reaches 97 % sampled success.",
        "Twelve times as fast.",
        "It takes 14 s.",
        "a gain of +3.5 points",
    ],
)
def test_a_new_number_without_a_source_is_found(claim):
    assert len(unbound(f"{README}\n{claim}\n")) == 1


def test_the_plain_facts_are_those_of_the_default_run():
    cfg = load_config(ROOT / "params.yaml")
    assert (cfg.warm_start.num_demos, cfg.horizon.max_turns) == (300, (6, 9, 12))
    settings = cfg.evaluation
    assert (settings.num_items, settings.max_turns, settings.num_samples) == (512, 12, 4)
    assert (settings.temperature, settings.confidence) == (1.0, 0.95)
    assert len(RECIPES) == 13
    model = cfg.model
    head = model.hidden_size // model.num_heads
    attention = model.hidden_size * head * (2 * model.num_heads + 2 * model.num_kv_heads) + head * (
        model.num_heads + 2 * model.num_kv_heads
    )
    layer = attention + 3 * model.hidden_size * model.mlp_size + 2 * model.hidden_size
    # training may give the tokenizer fewer tokens
    most = model.num_layers * layer + model.hidden_size * (1 + model.vocab_size)
    assert 0.2 <= most / 1e6 <= 0.3


def test_no_index_of_builds_is_named_for_the_reader():
    for name in ("README.md", "Makefile"):
        assert not re.search(r"index-url\s+\S*(://|\.org|\.com)", (ROOT / name).read_text()), name
