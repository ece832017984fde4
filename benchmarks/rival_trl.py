"""TRL's GRPO on BabyAI, on an environment server of this project: the other side of rival.py.

`python rival_trl.py WAY URL MODEL ITEMS.json THREADS STEPS OUT.jsonl`, in an environment with TRL.
WAY is `rollout_func`, TRL's hook for a custom loop, here over whole batches; or
`environment_factory`, the loop that TRL documents for environments.
Writes one line per optimizer step: time, number of episodes, mean reward.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import requests
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ITEMS_PER_STEP, GROUP_SIZE = 16, 8
MAX_TURNS, MAX_NEW_TOKENS, CONTEXT_TOKENS = 12, 6, 512
HTTP = requests.Session()
HTTP.headers["Authorization"] = f"Bearer {os.environ['TRL_SERVER_TOKEN']}"
KEYS = (uuid.uuid4().hex for _ in itertools.count())
# environment_factory ends an episode only when the next observation does not fit the context
TOO_LONG = "x " * 600
# TRL requires that a chat template shows tool calls and tool results
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}"
    "{{ c['function']['arguments'] }}{% endfor %}<|end|>"
    "{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# every response is parsed as one call of `act`
CALLS = {
    "close": "<|end|>",
    "content": "text",
    "repeats": True,
    "transform": {
        "type": "function",
        "function": {"name": "act", "arguments": {"action": "{content}"}},
    },
}
RESPONSES = {
    "defaults": {"role": "assistant", "content": ""},
    "start_anchor": "<|assistant|>",
    "fields": {"tool_calls": CALLS},
}


def main() -> None:
    way, url, model, items, threads, steps, out = sys.argv[1:]
    torch.set_num_threads(int(threads))
    tokenizer = AutoTokenizer.from_pretrained(model)
    task_ids = json.loads(Path(items).read_text(encoding="utf-8"))
    own_loop = way == "rollout_func"
    with tempfile.TemporaryDirectory() as folder:
        config: dict[str, Any] = {
            "output_dir": folder,
            "max_steps": int(steps),
            "per_device_train_batch_size": ITEMS_PER_STEP * GROUP_SIZE,
            "gradient_accumulation_steps": 1,
            "steps_per_generation": 1,
            "num_generations": GROUP_SIZE,
            "num_iterations": 1,
            "shuffle_dataset": False,
            "beta": 0.0,
            "loss_type": "dapo",  # mean over the tokens of the batch, as `grpo` here
            "epsilon": 0.2,
            "epsilon_high": 0.28,
            "scale_rewards": "group",
            "learning_rate": 5e-4,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "adam_beta2": 0.99,
            "weight_decay": 0.0,
            "max_grad_norm": 0.3,
            "temperature": 1.0,
            "top_k": 0,
            "bf16": False,
            "gradient_checkpointing": False,
            "use_cpu": True,
            "seed": 0,
            "save_strategy": "no",
            "logging_steps": 1,
            "report_to": [],
            "disable_tqdm": True,
            "remove_unused_columns": False,
        }
        if own_loop:
            rows = [{"prompt": str(task_id)} for task_id in task_ids]
            config["max_completion_length"] = CONTEXT_TOKENS
            ways: dict[str, Any] = {
                "rollout_func": BatchedLoop(url, tokenizer),
                "reward_funcs": lambda outcome, **_: outcome,
            }
        else:
            tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSES
            prompt = [{"role": "user", "content": ""}]
            rows = [{"prompt": prompt, "task_id": task_id} for task_id in task_ids]
            config |= {
                "max_completion_length": 440,
                "max_tool_calling_iterations": MAX_TURNS,
                "generation_kwargs": {"max_new_tokens": MAX_NEW_TOKENS},
            }
            ways = {"environment_factory": lambda: Environment(url)}
        with open(out, "w", encoding="utf-8") as lines:
            trainer = GRPOTrainer(
                model=AutoModelForCausalLM.from_pretrained(model),
                processing_class=tokenizer,
                train_dataset=Dataset.from_list(rows),
                args=GRPOConfig(**config),
                callbacks=[StepLines(lines)],
                **ways,
            )
            trainer.train()


class StepLines(TrainerCallback):
    """Callback that writes a line per optimizer step."""

    def __init__(self, lines: Any) -> None:
        self._lines = lines

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "reward" in logs:
            row = {"time": time.time(), "episodes": ITEMS_PER_STEP * GROUP_SIZE}
            self._lines.write(json.dumps({**row, "reward": float(logs["reward"])}) + "\n")
            self._lines.flush()


class BatchedLoop:
    """Loop that plays all episodes turn by turn: one generate call and one request per turn."""

    def __init__(self, url: str, tokenizer: Any) -> None:
        self._url, self._tokenizer = url, tokenizer
        self._pad, self._end = tokenizer.pad_token_id, tokenizer.eos_token_id
        self._sampling = GenerationConfig(
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            pad_token_id=self._pad,
            eos_token_id=self._end,
        )

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        from trl.models.utils import unwrap_model_for_generation

        asked = [{"request_key": next(KEYS), "task_id": int(prompt)} for prompt in prompts]
        begun = self._send(asked)
        sessions = [reply["session_id"] for reply in begun]
        prompt_ids = [self._encode(f"<|user|>{r['observation']}<|assistant|>") for r in begun]
        completion_ids: list[list[int]] = [[] for _ in prompts]
        masks: list[list[int]] = [[] for _ in prompts]
        rewards, live = [0.0] * len(prompts), list(range(len(prompts)))
        with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
            for turn in range(1, MAX_TURNS + 1):
                responses = self._generate(model, [prompt_ids[i] + completion_ids[i] for i in live])
                actions = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
                replies = self._send(
                    [
                        {"session_id": sessions[i], "turn": turn, "action": action.strip()}
                        for i, action in zip(live, actions, strict=True)
                    ]
                )
                going_on = []
                for i, ids, reply in zip(live, responses, replies, strict=True):
                    completion_ids[i] += ids
                    masks[i] += [1] * len(ids)
                    rewards[i] += reply["reward"]
                    if reply["terminated"] or reply["truncated"] or turn == MAX_TURNS:
                        continue
                    end = "" if ids[-1] == self._end else "<|end|>"
                    observed = self._encode(f"{end}<|user|>{reply['observation']}<|assistant|>")
                    length = len(prompt_ids[i]) + len(completion_ids[i]) + len(observed)
                    if length + MAX_NEW_TOKENS > CONTEXT_TOKENS:
                        continue
                    completion_ids[i] += observed
                    masks[i] += [0] * len(observed)
                    going_on.append(i)
                live = going_on
                if not live:
                    break
        self._send([{"session_id": session} for session in sessions])
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": None,
            "env_mask": masks,
            "outcome": rewards,
        }

    def _send(self, requests_: list[dict[str, Any]]) -> list[dict[str, Any]]:
        reply = HTTP.post(f"{self._url}/batch", json={"requests": requests_}, timeout=60)
        return reply.json()["replies"]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def _generate(self, model: Any, histories: list[list[int]]) -> list[list[int]]:
        width = max(map(len, histories))
        ids = torch.tensor([[self._pad] * (width - len(one)) + one for one in histories])
        mask = (ids != self._pad).long()
        whole = model.generate(input_ids=ids, attention_mask=mask, generation_config=self._sampling)
        rows = whole[:, width:].tolist()
        return [row[: row.index(self._end) + 1] if self._end in row else row for row in rows]


class Environment:
    """One BabyAI session as TRL's `environment_factory` expects it."""

    def __init__(self, url: str) -> None:
        self._url, self._session = url, ""
        self._turn, self._reward, self._done = 0, 0.0, True

    def reset(self, task_id: int, **_: Any) -> str:
        if self._session:
            self._post("close")
        asked = {"request_key": next(KEYS), "task_id": task_id}
        reply = HTTP.post(f"{self._url}/create", json=asked, timeout=60).json()
        self._session, self._turn, self._reward = reply["session_id"], 0, 0.0
        self._done = False
        return reply["observation"]

    def act(self, action: str) -> str:
        """Act.

        Args:
            action: what to do
        """
        if self._done:
            return TOO_LONG
        self._turn += 1
        reply = self._post("step", turn=self._turn, action=action.strip())
        self._reward += reply["reward"]
        self._done = reply["terminated"] or reply["truncated"] or self._turn == MAX_TURNS
        return TOO_LONG if self._done else str(reply["observation"])

    def get_reward(self) -> float:
        return self._reward

    def _post(self, route: str, **body: Any) -> dict[str, Any]:
        body = {"session_id": self._session, **body}
        return HTTP.post(f"{self._url}/{route}", json=body, timeout=60).json()


if __name__ == "__main__":
    main()
