"""Models and tokenizers, from a seed, from the Hub or from a checkpoint."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentgym.config import ConfigError, ModelConfig, first_of
from agentgym.models.architecture import (
    TOKENIZER_NAMES,
    published_architecture,
    read_architecture,
    require_whole,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# else transformers would load weights of a pull request if a repository has only pickles
os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"

# these import transformers, which reads the variables
import agentgym.models.attention as attention
from agentgym.models.fidelity import require_faithful
from agentgym.models.half import widen_linear_layers
from agentgym.models.template import CHAT_TEMPLATE
from agentgym.models.tokenizer import load_tokenizer, require_rows

logger = logging.getLogger(__name__)

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"  # of CHAT_TEMPLATE
# All tokenizer files travel as one JSON blob {file name: text}.
TokenizerFiles = dict[str, str]


def set_threads(count: int = 1) -> None:
    """Let torch compute with `count` threads in the calling thread, at most one per core.

    On busy cores several threads are slow: each operation waits for the last thread.
    """
    torch.set_num_threads(min(count, os.cpu_count() or 1))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer on texts, with CHAT_TEMPLATE as its chat template.
    `vocab_size` is an upper bound: training stops when no pair repeats.

    The class is Qwen2's own: loaders pick it for every Qwen2 model, regardless of the folder's
    files, and another class would silently split text into other ids.
    """
    from transformers import Qwen2Tokenizer

    base = Qwen2Tokenizer(
        pad_token=PAD, unk_token=PAD, eos_token=END, additional_special_tokens=[USER, ASSISTANT]
    )
    tokenizer = base.train_new_from_iterator(texts, vocab_size, show_progress=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def new_model(
    config: ModelConfig, *, vocab_size: int, eos_id: int, pad_id: int, seed: int
) -> PreTrainedModel:
    """Make a Qwen2 of the configured size and dtype with weights drawn from `seed`.
    The state of torch's global generator is not changed.
    """
    tokens = {"eos_token_id": eos_id, "pad_token_id": pad_id, "bos_token_id": None}
    architecture = tiny_architecture(config, vocab_size=vocab_size, **tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn = from_config(architecture, torch.float32)
    if config.dtype != "auto":
        drawn.config.dtype = getattr(torch, config.dtype)
    return drawn.to(drawn.config.dtype)


def tiny_architecture(config: ModelConfig, **more: Any) -> PretrainedConfig:
    """Return transformers' configuration of a Qwen2. config: its size; more: further settings."""
    from transformers import Qwen2Config

    return Qwen2Config(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        intermediate_size=config.mlp_size,
        max_position_embeddings=config.context_tokens,
        tie_word_embeddings=True,
        **more,
    )


def load_hub(
    config: ModelConfig, tokenizer_folder: Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load (model, tokenizer) named by `config.name`: a Hub repository or a local folder.

    tokenizer_folder: None if the tokenizer is next to the model.
    Only safetensors are read, and no remote code is run. The stop tokens of generation_config.json
    are added to the model's config.
    Errors: ConfigError as `published_architecture`, as `load_tokenizer`, if the weights do not
    match the architecture, or if the tokenizer has more ids than the model; ValueError if the
    model computes something that is not supported.
    """
    architecture = published_architecture(config)
    if tokenizer_folder is not None:
        require_whole(tokenizer_folder)
    tokenizer = load_tokenizer(tokenizer_folder or config.name, config.revision, name=config.name)
    require_rows(tokenizer, architecture.get_text_config(decoder=True).vocab_size, config.name)
    model = _published_model(config, architecture)
    widen_linear_layers(model)
    stop_ids = listed(model.config.eos_token_id)
    extra_ids = set(listed(model.generation_config.eos_token_id)) - set(stop_ids)
    if extra_ids:
        model.config.eos_token_id = [*stop_ids, *sorted(extra_ids)]
    require_faithful(model)  # in its stored dtype
    return model, tokenizer


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Switch off progress bars of transformers and the Hub in a block: they clutter error texts."""
    from transformers.utils import logging as transformers_logging

    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _published_model(config: ModelConfig, architecture: PretrainedConfig) -> PreTrainedModel:
    """Load a published model; float16 weights become float32, with a warning.
    Errors: ConfigError as `from_config`, or naming tensors that are missing, unexpected, of another
    shape or tied to another value: transformers would draw weights at random or drop them.
    """
    from transformers import AutoModelForCausalLM

    report = _LoadReport()
    messages = logging.getLogger("transformers.modeling_utils")
    messages.addFilter(report)
    try:
        with no_progress_bar() if Path(config.name).is_dir() else nullcontext():
            model, keys = AutoModelForCausalLM.from_pretrained(
                config.name,
                config=architecture,
                revision=config.revision,
                attn_implementation=attention.RAGGED,
                use_safetensors=True,
                trust_remote_code=False,
                dtype=config.dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except KeyError as error:
        raise _without_interface(architecture, error) from None
    except RuntimeError:
        if not report.unmade:
            raise
        problems = {"not made of the tensors that are stored": report.unmade}
    else:
        ties = model.get_expanded_tied_weights_keys(all_submodels=True)
        problems = {
            "missing": keys["missing_keys"],
            "unexpected": keys["unexpected_keys"],
            "of another shape": {key for key, *_ in keys["mismatched_keys"]},
            "not equal to the tensor that tie_word_embeddings ties it to": (
                ties.keys() - model.all_tied_weights_keys.keys()
            ),
        }
    finally:
        messages.removeFilter(report)
    descriptions = [
        f"{first_of(sorted(names), 3)} {problem}" for problem, names in problems.items() if names
    ]
    if descriptions:
        raise ConfigError(
            f"the weights of {config.name} are not those of its config.json:"
            f" {'; '.join(descriptions)}; use a folder whose weights and config.json were saved"
            " together"
        )
    if model.dtype == torch.float16:
        logger.warning(
            "%s has float16 weights; they become float32, for small gradients are zero in float16:"
            " rollout.engine_dtype float16 samples in it, model.dtype bfloat16 halves the memory",
            config.name,
        )
        model = model.float()
        model.config.dtype = torch.float32
    return model


class _LoadReport(logging.Filter):
    """Filter that drops transformers' long report about weights and collects names in `unmade`."""

    def __init__(self) -> None:
        super().__init__()
        self.unmade: set[str] = set()  # tensors that could not be assembled from stored ones

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        self.unmade |= set(re.findall(r"on tensors destined for (\S+)\. Ckpt contains", text))
        return "LOAD REPORT" not in text


def listed(ids: int | list[int] | None) -> list[int]:
    """Return an eos_token_id as a list; a model's files have one id, several or None."""
    return [] if ids is None else [ids] if isinstance(ids, int) else ids


def from_config(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model with weights drawn from the global generator, with `RAGGED` attention and with
    linear layers as by `widen_linear_layers`.
    Errors: ConfigError if its attention does not use transformers' interface.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.RAGGED, dtype=dtype, trust_remote_code=False
        )
    except KeyError as error:
        raise _without_interface(config, error) from None
    widen_linear_layers(model)
    return model


def _without_interface(config: PretrainedConfig, error: KeyError) -> Exception:
    """Return ConfigError if `error` is that the model does not know RAGGED, else `error` itself."""
    if error.args != (attention.RAGGED,):
        return error
    return ConfigError(
        f"models of type {config.model_type} are not supported: their attention does not call"
        " transformers' attention interface; use another model, such as one of type qwen2 or llama"
    )


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters by name, detached, not copied; a tied tensor once, under its first name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def load_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Copy weights into the model's parameters, all or none; other dtypes are converted.
    Errors: ValueError naming parameters that are missing, unknown or of another shape.
    """
    parameters = dict(model.named_parameters())
    if parameters.keys() != weights.keys():
        raise ValueError(
            "weights do not fit the model: parameters"
            f" {sorted(parameters.keys() ^ weights.keys())[:3]} are on one side only"
        )
    # check all before copying the first: never half a model
    for name, parameter in parameters.items():
        if parameter.shape != weights[name].shape:
            raise ValueError(
                f"weights do not fit the model: {name} is {tuple(weights[name].shape)}, expected"
                f" {tuple(parameter.shape)}"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> TokenizerFiles:
    """Return name -> text of a fast tokenizer's files, as far as TOKENIZER_NAMES lists them."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {
            path.name: path.read_text(encoding="utf-8")
            for path in sorted(Path(folder).iterdir())
            if path.name in TOKENIZER_NAMES
        }


def tokenizer_from_files(files: TokenizerFiles) -> PreTrainedTokenizerBase:
    """Load a tokenizer from the files of `tokenizer_files`.
    Errors: ValueError for a file that no tokenizer has; ConfigError as `load_tokenizer`.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), files)
        return load_tokenizer(folder, name="a checkpoint")


def write_tokenizer(folder: Path, files: TokenizerFiles) -> None:
    """Write a tokenizer's files; none, but raise ValueError, if no tokenizer has one of them."""
    for name in sorted(files.keys() - TOKENIZER_NAMES):
        raise ValueError(
            f"a tokenizer has no file {name[:80]!r}; expected some of"
            f" {', '.join(sorted(TOKENIZER_NAMES))}"
        )
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


# drawn weights are replaced anyway, and drawing on the meta device takes longer than all the rest
_DRAWS = {"torch.nn.init", "transformers.initialization"}
_DRAWN = re.compile(r"(trunc_|kaiming_|xavier_)?(normal|uniform)_")


class _NothingAllocated(TorchFunctionMode):
    """A mode in which `torch.empty` allocates on the meta device and initializers draw nothing.
    Computed tensors, such as the frequencies of a rotary embedding, are real.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        elif getattr(func, "__module__", "") in _DRAWS and _DRAWN.fullmatch(func.__name__):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def empty_model(architecture: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build the model of a config.json text in evaluation mode, its parameters on the meta device.
    Errors: ValueError if the model is not supported.
    """
    with _NothingAllocated():
        model = from_config(read_architecture(architecture), dtype)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"{type(model).__name__} does not compute its buffer {name}")
    change_parameters(model, lambda parameter: parameter.to("meta"))
    return model.eval()


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate memory on `device`, uninitialized, for the parameters on the meta device."""
    change_parameters(
        module, lambda part: torch.empty_like(part, device=device) if part.is_meta else part
    )


def change_parameters(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter by `change(tensor)`, in place; a shared parameter stays shared."""
    changed: dict[nn.Parameter, nn.Parameter] = {}
    for layer in module.modules():
        for name, old in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
            if old not in changed:
                detached = old.detach()
                new = change(detached)
                changed[old] = old if new is detached else nn.Parameter(new, old.requires_grad)
            setattr(layer, name, changed[old])
