"""Chat templates are programs: a template that came with a model runs in a separate process, with
limits on its time, memory and output.

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
from datetime import datetime
from typing import Any

CHAT_TEMPLATE = (  # of the models made here, so trusted: it runs in this process
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{{ m['content']"
    " }}<|end|>{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}{% if"
    " add_generation_prompt %}<|assistant|>{% endif %}"
)
CPU_S = 3  # for all conversations together; an ordinary template takes milliseconds
MEMORY_BYTES = 1 << 30  # in addition to the process's memory before the template runs
MAX_CHARS = 1_000_000  # of all texts
DEADLINE_S = 120.0  # of the whole process: it imports transformers, on a machine that may be busy
TODAY = datetime(2024, 7, 26)  # date for templates that show it: Llama's own default
# environment variables passed to the process; none contains a secret
_KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "LANG")

Conversation = Sequence[dict[str, str]]


def render(
    tokenizer: Any, conversations: Sequence[Conversation], variables: dict[str, bool]
) -> tuple[list[str | ValueError], bool]:
    """Render each conversation with the tokenizer's chat template, with the generation prompt
    if its last message is a user's. variables: passed to the template, except to CHAT_TEMPLATE.
    Result: (texts in order, a ValueError in place of one that the template refuses; True if the
    template asked for the date, and got TODAY), the same on every day and in every process.
    Errors: ValueError if the template exceeds a limit or its process fails.
    """
    if tokenizer.chat_template == CHAT_TEMPLATE:
        texts = [
            tokenizer.apply_chat_template(
                list(item), tokenize=False, add_generation_prompt=_is_asked(item)
            )
            for item in conversations
        ]
        return texts, False
    request = {
        "template": tokenizer.get_chat_template(),
        "variables": {**tokenizer.special_tokens_map, **variables},
        "conversations": list(map(list, conversations)),
    }
    answer = json.loads(_in_a_process(json.dumps(request, default=str)))
    texts = [
        item["text"]
        if "text" in item
        else ValueError(f"the chat template refuses a conversation: {item['error']}")
        for item in answer["texts"]
    ]
    return texts, answer["is_dated"]


@functools.lru_cache(maxsize=8)
def _in_a_process(request: str) -> str:
    """Run this module as a process on a JSON request; return its output (cached for 8 requests).
    Errors: ValueError if it exceeds a limit or fails.
    """
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    command = [sys.executable, "-m", "agentgym.models.template"]
    try:
        result = subprocess.run(
            command,
            input=request,
            capture_output=True,
            timeout=DEADLINE_S,
            env=environment,
            encoding="utf-8",
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"the model's chat template was not done within {DEADLINE_S:g} s; use one that only"
            " appends"
        ) from None
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["it was killed"])[-1][:200]
        limits = f"{CPU_S} s, {MEMORY_BYTES >> 20} MiB, {MAX_CHARS} characters"
        raise ValueError(
            f"the model's chat template met a limit ({limits}): {reason} (code"
            f" {result.returncode}); use one that only appends"
        )
    return result.stdout


def _is_asked(conversation: Conversation) -> bool:
    return conversation[-1]["role"] == "user"


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Render a request's `conversations` with its `template` and `variables`, for `render`.
    Return {"texts": [{"text": str} or {"error": str}, ...], "is_dated": True if the template asked
    for the date}.
    Errors: ValueError if the texts have more than MAX_CHARS; MemoryError.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    texts: list[dict[str, str]] = []
    dates: list[str] = []

    def strftime_now(format: str) -> str:
        dates.append(TODAY.strftime(format))
        return dates[-1]

    num_chars = 0
    for conversation in request["conversations"]:
        random.seed(0)  # Jinja has a filter that draws random items
        try:
            rendered, _ = render_jinja_template(
                conversations=[conversation],
                chat_template=request["template"],
                add_generation_prompt=_is_asked(conversation),
                **{**request["variables"], "strftime_now": strftime_now},
            )
            texts.append({"text": rendered[0]})
        except MemoryError:
            raise
        except Exception as error:  # a template refuses a conversation by raising anything
            texts.append({"error": f"{type(error).__name__}: {error}"[:200]})
        num_chars += sum(map(len, texts[-1].values()))
        if num_chars > MAX_CHARS:
            raise ValueError("it wrote too much")
    return {"texts": texts, "is_dated": bool(dates)}


def main() -> int:
    """Read a request from stdin, apply the limits, write the answer to stdout.
    Return the exit status: 1 if the answer is too long, else 0.
    """
    import transformers.utils.chat_template_utils  # noqa: F401  # before the limits apply

    request = json.loads(sys.stdin.read())
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime) + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    with open("/proc/self/statm", encoding="utf-8") as file:
        memory = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        written = json.dumps(answer(request))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
