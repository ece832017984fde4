"""Tokenizers and chat templates shaped like those of common model families, made on the spot.

The templates treat system, user and assistant messages as the published ones do, in fewer
words. Added tokens, their blanks and the text splitting are the family's own.
"""

import json
from dataclasses import dataclass, field

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Tokenizer

TEXTS = [
    "system user assistant task: go to the red ball 2 steps ahead",
    "you see a red ball turn left turn right move forward invalid action",
    "You are a helpful assistant. Cutting Knowledge Date: December 2023 Today Date: 26 Jul 2024",
] * 4
ANSWER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
QWEN25 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful"
    " assistant.<|im_end|>\n{% endif %}" + PLAIN + ANSWER
)
# thoughts remain only after the last question; the last answer always has one
QWEN3 = """{%- set last = namespace(question=0) -%}
{%- for m in messages if m.role == 'user' %}{% set last.question = messages.index(m) %}{% endfor -%}
{%- for m in messages %}
    {%- set thought, said = '', m.content %}
    {%- if m.role == 'assistant' and '</think>' in said %}
        {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set said = said.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and loop.index0 > last.question and (loop.last or thought) %}
        {{- '<think>\\n' + thought + '\\n</think>\\n\\n' + said.lstrip('\\n') }}
    {%- else %}
        {{- said }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
LLAMA3 = """{%- for m in messages %}
    {%- set text = '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim %}
    {{- (bos_token if loop.first else '') + text + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
LLAMA31 = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n' }}
{{- 'Today Date: ' + date_string + '\\n\\n' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|eot_id|>' }}
""" + LLAMA3.replace("(bos_token if loop.first else '') + text", "text")
PHI3 = """{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
PHI4 = """{%- for m in messages %}
    {{- '' if m.role == 'assistant' else '<|im_start|>' + m.role + '<|im_sep|>' }}
    {{- m.content + '<|im_end|>' }}
    {{- '<|im_start|>assistant<|im_sep|>' if m.role == 'user' }}
{%- endfor %}"""
PHI4_MINI = """{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""
ZEPHYR = """{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
ALTERNATE = """{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}{% endfor %}"""
HEAD = """{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- if system is not none %}{% set messages = messages[1:] %}{% endif %}"""
MISTRAL1 = (
    HEAD
    + ALTERNATE
    + """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set before = system + '\\n\\n' if loop.first and system is not none else '' %}
        {{- ' [INST] ' + before + m.content + ' [/INST]' }}
    {%- else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}"""
)
MISTRAL3 = (
    HEAD
    + ALTERNATE
    + """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set before = system + '\\n\\n' if loop.last and system is not none else '' %}
        {{- '[INST] ' + before + m.content + '[/INST]' }}
    {%- else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}
{%- endfor %}"""
)
LLAMA2 = (
    HEAD
    + ALTERNATE
    + """
{%- for m in messages %}
    {%- set before = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if system is not none else '' %}
    {%- set text = (before if loop.first else '') + m.content %}
    {%- if m.role == 'user' %}{{ bos_token + '[INST] ' + text | trim + ' [/INST]' }}
    {%- else %}{{ ' ' + text | trim + ' ' + eos_token }}{% endif %}
{%- endfor %}"""
)
GEMMA_TURNS = (
    ALTERNATE
    + """
{%- for m in messages %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
    {{- (system + '\\n\\n' if loop.first and system is not none else '') + m.content | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
)
GEMMA2 = (
    """{{- bos_token }}{% set system = none %}{% if messages[0].role == 'system' %}
{{- raise_exception('System role not supported') }}{% endif %}"""
    + GEMMA_TURNS
)
GEMMA3 = HEAD + "{{ bos_token }}" + GEMMA_TURNS
DEEPSEEK_R1 = (
    HEAD
    + """{{ bos_token + (system or '') }}
{%- for m in messages %}
    {{- '<｜User｜>' + m.content if m.role == 'user' }}
    {{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token if m.role != 'user' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""
)
GRANITE3 = """{%- for m in messages %}
    {{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""
TEXT_TURNS = """{{- START }}{% for m in messages %}
    {{- '<|' + m.role + '|>\\n' + m.content }}
    {{- (eos_token if m.role == 'assistant' else '') + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""


def special(*tokens, **blanks):
    return [AddedToken(token, special=True, normalized=False, **blanks) for token in tokens]


def words(*tokens):
    return [AddedToken(token, special=False, normalized=False) for token in tokens]


@dataclass(frozen=True)
class Family:
    template: str
    # text splitting: qwen2 (its own class), bytes, digits (bytes, each digit alone),
    # prepend (SentencePiece: a blank before each text), first (before the first only), gemma
    kind: str
    eos: str
    tokens: list[AddedToken] = field(default_factory=list)
    bos: str | None = None


LLAMA_TOKENS = ["begin_of_text", "end_of_text", "start_header_id", "end_header_id"]
LLAMA_TOKENS = special(*(f"<|{name}|>" for name in (*LLAMA_TOKENS, "eom_id", "eot_id")))
TOOLS = ("<tool_call>", "</tool_call>")
THINK = ("<think>", "</think>")
IM = special("<|endoftext|>", "<|im_start|>", "<|im_end|>")
INST = special("[INST]", "[/INST]")
PHI3_TURNS = special("<|user|>", "<|system|>", "<|assistant|>", "<|end|>", rstrip=True)
START = {"bos": "<s>", "eos": "</s>"}
BEGIN = {"bos": "<|begin_of_text|>", "tokens": LLAMA_TOKENS}
FAMILIES = {
    "qwen2.5": Family(QWEN25, "qwen2", "<|im_end|>", words(*TOOLS)),
    "qwen3": Family(QWEN3, "qwen2", "<|im_end|>", words(*TOOLS, *THINK)),
    # Qwen3-...-Instruct-2507: without thoughts
    "qwen3-instruct": Family(PLAIN + ANSWER, "qwen2", "<|im_end|>", words(*TOOLS, *THINK)),
    # Qwen3-...-Thinking-2507: the generation prompt opens a thought
    "qwen3-thinking": Family(
        QWEN3[: QWEN3.index("{%- if add_generation_prompt")]
        + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
        "qwen2",
        "<|im_end|>",
        words(*TOOLS, *THINK),
    ),
    "llama3": Family(LLAMA3, "bytes", "<|end_of_text|>", **BEGIN),
    "llama3.1": Family(LLAMA31, "bytes", "<|eot_id|>", **BEGIN),
    "smollm2": Family(QWEN25, "digits", "<|im_end|>", IM, bos="<|im_start|>"),
    "phi3-mini": Family(PHI3, "prepend", "<|end|>", PHI3_TURNS, bos="<s>"),
    "phi4": Family(
        PHI4,
        "bytes",
        "<|im_end|>",
        special("<|im_start|>", "<|im_sep|>", "<|im_end|>", lstrip=True, rstrip=True),
    ),
    "phi4-mini": Family(PHI4_MINI, "bytes", "<|end|>", PHI3_TURNS),
    "tinyllama": Family(ZEPHYR, "prepend", **START),
    "mistral-v0.1": Family(MISTRAL1, "prepend", **START),
    "mistral-v0.3": Family(MISTRAL3, "first", tokens=INST, **START),
    "llama2": Family(LLAMA2, "prepend", **START),
    "yi": Family(PLAIN + ANSWER, "prepend", "<|im_end|>", IM),
    "gemma2": Family(
        GEMMA2,
        "gemma",
        "<eos>",
        special("<start_of_turn>", "<end_of_turn>") + words("<table>"),
        "<bos>",
    ),
    "gemma3": Family(
        GEMMA3,
        "gemma",
        "<eos>",
        special("<start_of_turn>", "<end_of_turn>") + words("<table>"),
        "<bos>",
    ),
    "deepseek-r1-qwen": Family(
        DEEPSEEK_R1,
        "bytes",
        "<｜end▁of▁sentence｜>",
        words("<｜User｜>", "<｜Assistant｜>", *THINK),
        "<｜begin▁of▁sentence｜>",
    ),
    "granite3": Family(
        GRANITE3,
        "digits",
        "<|end_of_text|>",
        special("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
    ),
    "olmo2": Family(
        TEXT_TURNS.replace("START", "bos_token"),
        "bytes",
        "<|endoftext|>",
        words("|||EMAIL_ADDRESS|||"),
        "<|endoftext|>",
    ),
    "falcon3": Family(TEXT_TURNS.replace("START", "''"), "digits", "<|endoftext|>"),
}


def tokenizer_of(name):
    """Return a tokenizer that splits text as the family's does, with its added tokens."""
    family = FAMILIES[name]
    if family.kind == "qwen2":
        base = Qwen2Tokenizer(
            pad_token="<|endoftext|>",
            unk_token="<|endoftext|>",
            eos_token="<|im_end|>",
            additional_special_tokens=["<|im_start|>"],
        )
        made = base.train_new_from_iterator(TEXTS, 340, show_progress=False)
        made.add_tokens(family.tokens)
    else:
        made = PreTrainedTokenizerFast(
            tokenizer_object=TRAINED[family.kind](), bos_token=family.bos, eos_token=family.eos
        )
        made.add_tokens(family.tokens)
    made.chat_template = family.template
    return made


def save_tiny_llama(folder):
    """Write a Llama of 2 layers with Llama 3's chat template, as `save_pretrained` does."""
    tokenizer = tokenizer_of("llama3")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def of_bytes(*before):
    inner = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*before, split])
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    )
    return inner


def sentencepiece(normalizer, split, special, **fields):
    """Return a BPE over characters, with byte fallback; blanks are ▁."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=140, show_progress=False))
    state = json.loads(inner.to_str())
    learned = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    vocab = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    state["model"] |= {
        "vocab": {token: index for index, token in enumerate(dict.fromkeys(vocab))},
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
    }
    inner = Tokenizer.from_str(json.dumps(state))
    inner.normalizer, inner.pre_tokenizer = normalizer, split
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *fields.get("end", ()),
        ]
    )
    inner.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    inner.add_tokens(words(*fields.get("blanks", ())))
    return inner


def prepend():
    spaced = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return sentencepiece(spaced, None, ("<unk>", "<s>", "</s>"), end=[decoders.Strip(" ", 1, 0)])


def first():
    split = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return sentencepiece(None, split, ("<unk>", "<s>", "</s>"), end=[decoders.Strip(" ", 1, 0)])


def gemma():
    split = pre_tokenizers.Split(" ", "merged_with_previous")
    return sentencepiece(
        normalizers.Replace(" ", "▁"),
        split,
        ("<pad>", "<eos>", "<bos>", "<unk>"),
        blanks=("\n", "\n\n", "▁▁", "▁▁▁"),
    )


TRAINED = {
    "bytes": of_bytes,
    "digits": lambda: of_bytes(pre_tokenizers.Digits(individual_digits=True)),
    "prepend": prepend,
    "first": first,
    "gemma": gemma,
}
