"""Chat templates, which are programs: one that came with a model is run in a process of its own,
with limits on all it could use up.

`python -m agentgym.models.template` is that process: it reads one JSON object and writes one.
"""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

CHAT_TEMPLATE = (  # of the models made here, and so the one that needs no process
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{{ m['content']"
    " }}<|end|>{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}{% if"
    " add_generation_prompt %}<|assistant|>{% endif %}"
)
CPU_S = 3  # for all conversations together; a template in use takes milliseconds
MEMORY_BYTES = 1 << 30  # on top of what the process needs before it begins
MAX_CHARS = 1_000_000  # of all texts
DEADLINE_S = 120.0  # of the whole process: it imports transformers, on a machine that may be busy
TODAY = datetime(2024, 7, 26)  # for templates that ask: Llama's own where it has no clock
# of the environment; no secret is among them
_KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "LANG")

Conversation = Sequence[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Rendered:
    texts: list[str | ValueError]  # the error where the template refuses a conversation
    is_dated: bool  # the template asked for the date, and got TODAY


def render(
    tokenizer: Any, conversations: Sequence[Conversation], variables: dict[str, bool]
) -> Rendered:
    """What the tokenizer's chat template makes of each conversation, an answer's beginning added
    after a user's message. variables: handed to the template.

    It is the same on every day and in every process.
    Errors: ValueError where the template takes longer or more than any sound one.
    """
    if tokenizer.chat_template == CHAT_TEMPLATE:
        return Rendered(
            [
                tokenizer.apply_chat_template(
                    list(each), tokenize=False, add_generation_prompt=_is_asked(each)
                )
                for each in conversations
            ],
            is_dated=False,
        )
    asked = {
        "template": tokenizer.get_chat_template(),
        "variables": {**tokenizer.special_tokens_map, **variables},
        "conversations": list(map(list, conversations)),
    }
    answer = json.loads(_in_a_process(json.dumps(asked, default=str)))
    return Rendered(
        [
            (
                each["text"]
                if "text" in each
                else ValueError(f"the chat template refuses a conversation: {each['error']}")
            )
            for each in answer["texts"]
        ],
        answer["is_dated"],
    )


@functools.lru_cache(maxsize=8)
def _in_a_process(asked: str) -> str:
    """Errors: ValueError."""
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    command = [sys.executable, "-m", "agentgym.models.template"]
    try:
        done = subprocess.run(
            command,
            input=asked,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            env=environment,
            encoding="utf-8",
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"the model's chat template was not done within {DEADLINE_S:g} s; use one that only"
            " appends"
        ) from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it was killed"])[-1][:200]
        limits = f"{CPU_S} s, {MEMORY_BYTES >> 20} MiB, {MAX_CHARS} characters"
        raise ValueError(
            f"the model's chat template met a limit ({limits}): {said} (code {done.returncode});"
            " use one that only appends"
        )
    return done.stdout


def _is_asked(conversation: Conversation) -> bool:
    return conversation[-1]["role"] == "user"


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Run a template over conversations; nothing but what it writes is limited here.
    Errors: ValueError if it writes too much.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    texts: list[dict[str, str]] = []
    dates: list[str] = []

    def strftime_now(format: str) -> str:
        dates.append(TODAY.strftime(format))
        return dates[-1]

    num_chars = 0
    for conversation in asked["conversations"]:
        random.seed(0)  # Jinja has a filter that draws
        try:
            rendered, _ = render_jinja_template(
                conversations=[conversation],
                chat_template=asked["template"],
                add_generation_prompt=_is_asked(conversation),
                **{**asked["variables"], "strftime_now": strftime_now},
            )
            texts.append({"text": rendered[0]})
        except MemoryError:
            raise
        except Exception as error:  # whatever a template raises is its answer to this conversation
            texts.append({"error": f"{type(error).__name__}: {error}"[:200]})
        num_chars += sum(map(len, texts[-1].values()))
        if num_chars > MAX_CHARS:
            raise ValueError("it wrote too much")
    return {"texts": texts, "is_dated": bool(dates)}


def main() -> int:
    """The process. Exit code 0 unless a limit was met."""
    import transformers.utils.chat_template_utils  # noqa: F401  # not within the limits

    asked = json.loads(sys.stdin.read())
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    with open("/proc/self/statm", encoding="utf-8") as file:
        memory = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        written = json.dumps(answer(asked))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
