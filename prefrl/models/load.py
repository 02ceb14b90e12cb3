"""Load models and tokenizers by name, path or instance."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from prefrl.distributed import is_main, shape_of
from prefrl.errors import CheckpointError, ConfigError, cause_of
from prefrl.models.adapters import TaskType, add_adapter, is_peft_model, prepare_quantized
from prefrl.models.classifier import add_classifier, check_has_body
from prefrl.models.kernels import freeze_parameters
from prefrl.models.modes import hub_or_cache, seeded
from prefrl.models.tokenizer_changes import TokenizerChanges, check_special_tokens
from prefrl.options.names import unpinned_code

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn
    from transformers import BitsAndBytesConfig

logger = logging.getLogger(__name__)

_VISION_CONFIGS = AutoModelForImageTextToText._model_mapping
# What from_pretrained needs to find the same repository again.
_REPOSITORY = (
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "revision",
    "token",
    "trust_remote_code",
)
# What means a place in one repository, and nothing in another one.
_PLACES = ("code_revision", "gguf_file", "revision", "subfolder", "variant")

# What transformers says if an auto class has no model for a config.
_UNKNOWN_CONFIG = "Unrecognized configuration class"


@dataclass(frozen=True)
class Kind:
    """A kind of model, in the terms of transformers and peft."""

    auto_class: Any
    task_type: TaskType
    arguments: Mapping[str, Any]  # defaults for from_pretrained
    if_shapes_differ: str  # error hint for weights whose shapes do not match


# float32, because small optimizer updates of bfloat16 weights are lost in rounding.
CAUSAL = Kind(
    AutoModelForCausalLM,
    "CAUSAL_LM",
    {"dtype": torch.float32},
    "The sizes in its config are not those of its weights.",
)
REWARD = Kind(
    AutoModelForSequenceClassification,
    "SEQ_CLS",
    {"dtype": torch.float32, "num_labels": 1},
    "A reward model has num_labels=1: use a classifier with one output, or a language model, from which a reward "
    "model is made.",
)


def load_model(
    model: str | os.PathLike[str] | nn.Module,
    *,
    model_init_kwargs: Mapping[str, Any] | None = None,
    peft_config: PeftConfig | None = None,
    freeze: Sequence[str] = (),
    seed: int | None = None,
    quantization_config: BitsAndBytesConfig | None = None,
) -> PreTrainedModel:
    """The causal language model or vision-language model to train.

    Weights are float32 unless `model_init_kwargs` has a `dtype`. In a quantized model, the weights that are not
    quantized are always float32.

    Args:
        model: Name on the Hub, path, or an instance, which is changed in place (adapter, `requires_grad`).
        model_init_kwargs: For `from_pretrained`; not changed.
        peft_config: A new adapter of this kind is put around the model; not changed.
        freeze: Regular expressions; parameters whose name contains a match are not trained.
        seed: For all new weights; torch's global random state is not changed. None: drawn from that state.
        quantization_config: Quantize the model when it is loaded; also allowed in `model_init_kwargs`.

    Returns:
        The model, a `peft.PeftModel` if there is an adapter.

    Raises:
        ConfigError: The model cannot be loaded, an argument has no effect, or nothing is left to train.
        ImportError: `peft_config` is given and peft is not installed, or bitsandbytes is missing.
    """
    loaded = _loaded(CAUSAL, model, model_init_kwargs, quantization_config, seed)
    return _trainable(CAUSAL, loaded, peft_config, freeze, seed)


def load_reward_model(
    model: str | os.PathLike[str] | nn.Module,
    *,
    model_init_kwargs: Mapping[str, Any] | None = None,
    peft_config: PeftConfig | None = None,
    freeze: Sequence[str] = (),
    seed: int | None = None,
    quantization_config: BitsAndBytesConfig | None = None,
) -> PreTrainedModel:
    """The reward model to train: a sequence classifier with one output. Its arguments are those of `load_model`.

    If `model` is a causal language model or a vision-language model, its body is kept and gets a new output layer.
    With an adapter, the output layer is trained in full.

    Raises:
        ConfigError: As for `load_model`, or the model is not a sequence classifier or has several outputs.
        ImportError: As for `load_model`.
    """
    loaded = _loaded(REWARD, model, model_init_kwargs, quantization_config, seed)
    _check_one_output(loaded)
    return _trainable(REWARD, loaded, peft_config, freeze, seed)


def load_processing_class(
    model: PreTrainedModel,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    *,
    model_init_kwargs: Mapping[str, Any] | None = None,
    changes: TokenizerChanges = TokenizerChanges(),  # noqa: B008 - it is frozen
) -> PreTrainedTokenizerBase | ProcessorMixin:
    """What turns rows into tokens: the model's processor if it reads images, otherwise its tokenizer.

    A vision-language model that is given a tokenizer trains on text alone.

    Args:
        model: The loaded model.
        processing_class: The tokenizer or processor, if there is one.
        model_init_kwargs: See `load_tokenizer`.
        changes: See `load_tokenizer`.

    Raises:
        ConfigError: See `load_tokenizer`, or a processor is given for a model of text.
    """
    if processing_class is not None and changes.name_or_path is not None:
        raise ConfigError(
            f"tokenizer_name_or_path={changes.name_or_path!r} has no effect because the trainer is given a "
            "processing_class. Remove one of them."
        )
    if processing_class is None and reads_images(model):
        name = changes.name_or_path or model.config.name_or_path
        if not name:
            raise ConfigError("processing_class=None: the model was not loaded from a repository. Pass its processor.")
        try:
            with hub_or_cache(name):
                processing_class = AutoProcessor.from_pretrained(name, **_of_tokenizer(model_init_kwargs, changes))
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"{_asked(changes)}: no processor can be loaded from {name!r}: {error}. Pass the model's "
                "processor, or its tokenizer to train on text alone."
            ) from cause_of(error)
    if not isinstance(processing_class, ProcessorMixin):
        return load_tokenizer(model, processing_class, model_init_kwargs=model_init_kwargs, changes=changes)
    if not reads_images(model):
        raise ConfigError(
            f"processing_class={type(processing_class).__name__}: the model is a {type(model).__name__}, which cannot "
            "read images. Pass its tokenizer, or use a vision-language model."
        )
    template = processing_class.tokenizer.chat_template
    tokenizer = load_tokenizer(model, processing_class.tokenizer, changes=changes)
    if tokenizer.chat_template != template:
        processing_class.chat_template = tokenizer.chat_template
    return processing_class


def reads_images(model: PreTrainedModel) -> bool:
    """Whether the model has a vision tower."""
    return getattr(model.config, "vision_config", None) is not None


def load_tokenizer(
    model: PreTrainedModel,
    processing_class: PreTrainedTokenizerBase | None = None,
    *,
    model_init_kwargs: Mapping[str, Any] | None = None,
    changes: TokenizerChanges = TokenizerChanges(),  # noqa: B008 - it is frozen
) -> PreTrainedTokenizerBase:
    """The model's tokenizer: the given one, or that of the model's repository.

    If the tokenizer has no padding token, it is set to the end-of-sequence token, even on the caller's tokenizer.
    prefrl does not need padding, but other code that uses the saved tokenizer does.

    Args:
        model: The loaded model.
        processing_class: The tokenizer, if there is one.
        model_init_kwargs: Those that the model was loaded with; revision, token and the like apply to the tokenizer.
        changes: What to change in the tokenizer, even in the caller's; the model gets embeddings of new tokens.

    Raises:
        ConfigError: No tokenizer can be found, it cannot be changed like this, it has neither a padding nor an
            end-of-sequence token, or the model has no embedding for one of these or the beginning-of-sequence token.
            Others that have none are a warning.
    """
    tokenizer = processing_class
    if tokenizer is None:
        tokenizer = _tokenizer_of(model, model_init_kwargs, changes)
    elif not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"processing_class={type(tokenizer).__name__}: must be a tokenizer of transformers or None")
    changes.apply(tokenizer, model)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                "the tokenizer has neither pad_token nor eos_token, so texts could not end. Set tokenizer.eos_token."
            )
        tokenizer.pad_token = tokenizer.eos_token
    if len(tokenizer) > (count := num_embeddings(model)):
        check_special_tokens(tokenizer, count)
        if is_main():
            others = tokenizer.convert_ids_to_tokens(list(range(count, min(count + 3, len(tokenizer)))))
            logger.warning(
                f"The tokenizer has {len(tokenizer)} tokens, but the model has embeddings for only {count}. Data "
                "with one of the other tokens is refused: "
                f"{', '.join(map(repr, others))}{', ...' if len(tokenizer) > count + 3 else ''}"
            )
    return tokenizer


def num_embeddings(model: PreTrainedModel) -> int:
    """How many token ids the model has embeddings for."""
    return int(shape_of(model.get_input_embeddings().weight)[0])


def load_renamed(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights of a checkpoint as `from_pretrained` does, which knows by what names they are saved.

    Checkpoints of vision-language models and of mixtures of experts have other names, and experts one by one.

    Raises:
        CheckpointError: The checkpoint lacks weights.
    """
    loaded, found = type(model).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if found["missing_keys"]:
        raise CheckpointError(f"{folder} lacks weights of the model: {', '.join(sorted(found['missing_keys'])[:5])}")
    model.load_state_dict(loaded.state_dict(), strict=False)


def arguments_for_other(
    name: str | os.PathLike[str], policy: PreTrainedModel, model_init_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The policy's arguments for `from_pretrained` as they hold for another model: a reference or a critic.

    Args:
        name: Name or path of the other model. In the policy's own repository it is of the policy's revision; in
            another one, revision, subfolder and the like mean nothing.
        policy: The loaded policy.
        model_init_kwargs: What the policy is loaded with. Only the policy is quantized.
    """
    places = () if os.fspath(name) == str(policy.config.name_or_path) else _PLACES
    left_out = {"quantization_config", *places}
    return {key: value for key, value in (model_init_kwargs or {}).items() if key not in left_out}


def arguments_for_reward(model_init_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The policy's arguments for `from_pretrained` as they hold for a reward model, whose architecture is another."""
    shared = ("attn_implementation", "dtype", "trust_remote_code")
    return {key: value for key, value in (model_init_kwargs or {}).items() if key in shared}


def _loaded(
    kind: Kind,
    model: str | os.PathLike[str] | nn.Module,
    model_init_kwargs: Mapping[str, Any] | None,
    quantization_config: BitsAndBytesConfig | None,
    seed: int | None,
) -> PreTrainedModel:
    given = dict(model_init_kwargs or {})
    if quantization_config is not None:
        if "quantization_config" in given:
            raise ConfigError("quantization_config is given twice: remove it from model_init_kwargs")
        given["quantization_config"] = quantization_config
    if isinstance(model, (str, os.PathLike)):
        warning = unpinned_code(model, given.get("revision")) if given.get("trust_remote_code") else None
        if warning is not None and is_main():
            logger.warning(warning)
        loaded = _from_pretrained(kind, model, given, seed)
        _check_no_encoder(loaded, loaded.config.architectures or ())
        return loaded
    if not (is_peft_model(model) or isinstance(model, PreTrainedModel)):
        raise ConfigError(f"model={model!r}: must be a name, a path, a PreTrainedModel or a PeftModel")
    if given.keys() - {"trust_remote_code"}:  # which also loads the tokenizer
        options = "quantization_config" if quantization_config is not None else f"model_init_kwargs={given}"
        raise ConfigError(
            f"{options} has no effect, because the model is already loaded. Remove it, or pass the model by name."
        )
    _check_no_encoder(model)
    return model


def _check_no_encoder(model: PreTrainedModel, saved_as: Sequence[str] = ()) -> None:
    """Refuse an encoder with a decoder, also one of which `from_pretrained` kept only the decoder.

    Args:
        model: The model.
        saved_as: The classes whose weights its folder holds.
    """
    with_encoder = set(saved_as) & set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values())
    if model.config.get_text_config().is_encoder_decoder or with_encoder:
        inner = model.get_base_model() if is_peft_model(model) else model
        raise _encoder_error(next(iter(with_encoder), type(inner).__name__))


def _encoder_error(name: str) -> ConfigError:
    return ConfigError(
        f"model is a {name}, an encoder-decoder model, but prefrl trains models that read prompt and response as one "
        "sequence. Use a model for AutoModelForCausalLM."
    )


def check_dtype(arguments: Mapping[str, Any]) -> None:
    """Refuse a `dtype` for `from_pretrained` that torch does not have.

    Raises:
        ConfigError: See above.
    """
    for key in ("dtype", "torch_dtype"):
        given = arguments.get(key)
        if isinstance(given, str) and given != "auto" and not isinstance(getattr(torch, given, None), torch.dtype):
            raise ConfigError(
                f"model_init_kwargs: {key}={given!r}: is not a torch dtype. Set 'bfloat16', 'float16', 'float32' or "
                "'auto', which is the type of the files."
            )


def _from_pretrained(
    kind: Kind, name: str | os.PathLike[str], arguments: Mapping[str, Any], seed: int | None
) -> PreTrainedModel:
    check_dtype(arguments)
    try:
        with seeded(seed), hub_or_cache(name):
            auto_class = auto_class_of(kind, name, arguments)
            options = {**kind.arguments, **arguments}
            if kind is not REWARD:
                return auto_class.from_pretrained(name, **options)
            model, found = auto_class.from_pretrained(name, output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise load_error(kind, name, arguments, error) from cause_of(error)
    if reads_images(model):
        check_has_body(model, name, found["missing_keys"])
    return model


def load_error(
    kind: Kind, name: str | os.PathLike[str], arguments: Mapping[str, Any], error: Exception
) -> ConfigError:
    """What to tell about an error of transformers."""
    if _UNKNOWN_CONFIG in str(error):  # the rest of the message is a list of all classes that there are
        return _unknown_class(kind, name, arguments)
    hint = f" {kind.if_shapes_differ}" if "ignore_mismatched_sizes" in str(error) else ""
    hint = hint or " Run `pip install flash-attn`, or set attn_implementation='sdpa'." * (
        "FlashAttention2" in str(error)
    )
    hint = hint or " There is no folder with this name either." * (
        isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and not Path(name).exists()
    )
    return ConfigError(f"model={os.fspath(name)!r} cannot be loaded: {error}{hint}")


def auto_class_of(kind: Kind, name: str | os.PathLike[str], arguments: Mapping[str, Any]) -> Any:
    """The class that loads a model: for one that has a vision tower, a class that keeps the tower."""
    given = {**repository_arguments(arguments), **{key: arguments[key] for key in ("subfolder",) if key in arguments}}
    try:
        config = AutoConfig.from_pretrained(name, **given)
    except (OSError, ValueError):  # a folder with an adapter alone, or an error that loading the model reports
        return kind.auto_class
    if kind is REWARD:
        add_classifier(config)
        return kind.auto_class
    has_images = getattr(config, "vision_config", None) is not None
    return AutoModelForImageTextToText if has_images and type(config) in _VISION_CONFIGS else kind.auto_class


def _unknown_class(kind: Kind, name: str | os.PathLike[str], arguments: Mapping[str, Any]) -> ConfigError:
    config = AutoConfig.from_pretrained(name, **{key: arguments[key] for key in _REPOSITORY if key in arguments})
    if config.is_encoder_decoder:
        return _encoder_error(" or ".join(config.architectures or [config.model_type]))
    return ConfigError(
        f"model={os.fspath(name)!r} cannot be loaded: {kind.auto_class.__name__} knows no class for the model type "
        f"{config.model_type!r}"
    )


def _check_one_output(model: PreTrainedModel) -> None:
    inner = model.get_base_model() if is_peft_model(model) else model
    # transformers has no common base class for sequence classifiers, only this naming convention.
    if not type(inner).__name__.endswith("ForSequenceClassification"):
        raise ConfigError(
            f"model is a {type(inner).__name__}: a reward model is a sequence classifier with num_labels=1. Load it "
            "with AutoModelForSequenceClassification.from_pretrained(..., num_labels=1), or give its name."
        )
    if inner.config.num_labels != 1:
        raise ConfigError(
            f"num_labels={inner.config.num_labels}: a reward model has one output. Load it with num_labels=1, which "
            "is the default for a model that is given by name."
        )


def _trainable(
    kind: Kind, model: PreTrainedModel, peft_config: PeftConfig | None, freeze: Sequence[str], seed: int | None
) -> PreTrainedModel:
    if model._hf_peft_config_loaded:
        raise ConfigError(
            "the model has an adapter inside, so its own weights would be trained too. Load the adapter with "
            "peft.PeftModel.from_pretrained(base_model, adapter, is_trainable=True), and give the result as model; "
            "or merge it first, prefrl merge ADAPTER OUTPUT_DIR."
        )
    if getattr(model, "is_quantized", False):
        if peft_config is None and not is_peft_model(model):
            raise ConfigError(
                "the model is quantized and peft_config=None: quantized weights cannot be trained. Pass a peft_config "
                "(use_peft=True on the command line), or load the model without quantization_config."
            )
        prepare_quantized(model)
    if peft_config is not None:
        model = add_adapter(model, peft_config, task_type=kind.task_type, seed=seed)
    freeze_parameters(model, freeze)
    return model


def _tokenizer_of(
    model: PreTrainedModel, arguments: Mapping[str, Any] | None, changes: TokenizerChanges
) -> PreTrainedTokenizerBase:
    name = changes.name_or_path or model.config.name_or_path
    if not name:
        raise ConfigError("processing_class=None: the model was not loaded from a repository. Pass its tokenizer.")
    try:
        with hub_or_cache(name):
            tokenizer = AutoTokenizer.from_pretrained(name, **_of_tokenizer(arguments, changes))
    except (OSError, ValueError, ImportError) as error:
        text = f"{_asked(changes)}: no tokenizer can be loaded from {name!r}: {error}"
        raise ConfigError(text) from cause_of(error)
    # For some architectures AutoTokenizer returns an empty tokenizer if there are no tokenizer files.
    if len(tokenizer.get_added_vocab()) == len(tokenizer):
        raise ConfigError(
            f"{_asked(changes)}: no tokenizer can be loaded from {name!r}: it has no tokenizer files. Pass the "
            "model's tokenizer."
        )
    return tokenizer


def _of_tokenizer(arguments: Mapping[str, Any] | None, changes: TokenizerChanges) -> dict[str, Any]:
    """Arguments of `from_pretrained`: those of the model, whose revision is none of another repository."""
    found = repository_arguments(arguments)
    return found if changes.name_or_path is None else {key: v for key, v in found.items() if key != "revision"}


def _asked(changes: TokenizerChanges) -> str:
    name = changes.name_or_path
    return "processing_class=None" if name is None else f"tokenizer_name_or_path={name!r}"


def repository_arguments(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those that say where a repository is and which revision of it; they hold for its tokenizer, too."""
    return {key: value for key, value in (arguments or {}).items() if key in _REPOSITORY}
