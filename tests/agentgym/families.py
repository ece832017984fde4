"""Tokenizers and chat templates of the shapes that families of models have, made on the spot.

The templates do in few words what those of Qwen2.5, Qwen3 and Llama 3 do with system, user and
assistant messages. Special tokens are theirs.
"""

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

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
# thoughts stay behind the last question alone, where the last answer always has one
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
LLAMA_TOKENS = ["begin_of_text", "end_of_text", "start_header_id", "end_header_id"]
LLAMA_TOKENS = [f"<|{name}|>" for name in (*LLAMA_TOKENS, "eom_id", "eot_id")]
TEMPLATES = {
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "qwen3-instruct": PLAIN + ANSWER,  # Qwen3-...-Instruct-2507: never thinks
    # Qwen3-...-Thinking-2507: the answer's beginning opens a thought
    "qwen3-thinking": QWEN3[: QWEN3.index("{%- if add_generation_prompt")]
    + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "llama3": LLAMA3,
    "llama3.1": LLAMA31,
}


def tokenizer_of(family):
    """A byte-level tokenizer of its loader's class, with the special tokens of the family."""
    is_llama = family.startswith("llama")
    base = Qwen2Tokenizer(
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=LLAMA_TOKENS if is_llama else ["<|im_start|>"],
    )
    made = base.train_new_from_iterator(TEXTS, 340, show_progress=False)
    if is_llama:
        made = PreTrainedTokenizerFast(
            tokenizer_object=made.backend_tokenizer,
            bos_token="<|begin_of_text|>",
            eos_token="<|end_of_text|>" if family == "llama3" else "<|eot_id|>",
            additional_special_tokens=LLAMA_TOKENS,
        )
    elif family.startswith("qwen3"):  # tokens of their own, though not special ones
        made.add_tokens([AddedToken(each, special=False) for each in ("<think>", "</think>")])
    made.chat_template = TEMPLATES[family]
    return made
