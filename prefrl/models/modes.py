"""What a pass depends on besides weights and rows: modes, dropout, precision, random numbers; and the Hub."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import constants
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch off dropout and gradient checkpointing inside, and restore every module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def dropout_rates(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, attribute name) for every attribute that is a dropout rate above 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            names = ["p"]
        else:
            names = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        yield from ((module, name) for name in names if getattr(module, name) > 0)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout rate of the model to 0, including those of adapters."""
    for module, name in list(dropout_rates(model)):
        setattr(module, name, 0.0)


def checkpoint_activations(model: PreTrainedModel, arguments: dict[str, Any] | None = None) -> None:
    """Keep only the inputs of the layers for the backward pass, as HuggingFace's loop does for the policy.

    Args:
        model: Changed in place; its new mode acts while it trains.
        arguments: As in `activation_checkpointing_kwargs`.
    """
    of_checkpoint = dict(arguments or {})
    of_layers = {name: of_checkpoint.pop(name) for name in ("every_n_layers", "offload") if name in of_checkpoint}
    # The second name is that of transformers before 5.23.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(of_checkpoint or None, **of_layers)


def uncompiled() -> AbstractContextManager[Any]:
    """Context in which compiled modules run as they are written."""
    context: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return context


def coarsest_dtype(model: PreTrainedModel, output: Tensor) -> torch.dtype:
    """Of those that a pass which gave `output` computed in."""
    # ZeRO-3 would gather a `weight` that is asked for by name here, and would do so in each pass from then on.
    dtypes = [output.dtype, next(model.get_input_embeddings().parameters()).dtype]
    if torch.is_autocast_enabled(output.device.type):
        dtypes.append(torch.get_autocast_dtype(output.device.type))
    coarsest: torch.dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    return of_products(coarsest, output.device.type)


def of_products(dtype: torch.dtype, device: str) -> torch.dtype:
    """What matrix products of tensors of this dtype round their inputs to, on a type of device.

    TensorFloat-32 keeps 10 bits of a number, as float16 does.
    """
    is_tf32 = device == "cuda" and dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return torch.float16 if is_tf32 else dtype


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw random numbers from `seed` inside, and restore torch's global random states afterwards.

    Those of GPUs only if they are in use: to ask for their states would start CUDA, also in a run on the CPU.
    None: draw from the global states.
    """
    if seed is None:
        yield
        return
    generators = [torch.default_generator]
    for accelerator in (torch.cuda, torch.xpu):
        if accelerator.is_initialized():
            generators.extend(accelerator.default_generators)
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def hub_or_cache(name: str | os.PathLike[str]) -> Iterator[None]:
    """Context in which a model, a tokenizer or a dataset is loaded by its name or path.

    The libraries below ask the Hub six times for each file, for half a minute, before they look into the cache. If the
    Hub does not answer once, they are only let look there.

    Args:
        name: A folder, or a name on the Hub.

    Raises:
        FileNotFoundError: There is no such folder, and the Hub cannot be asked; says what to do.
    """
    if (path := Path(name)).exists():
        yield
        return
    from prefrl.http import unreachable_hub  # most models are folders

    folders = [other.name for other in path.parent.iterdir() if other.is_dir()] if path.parent.is_dir() else []
    similar = difflib.get_close_matches(path.name, folders, n=1, cutoff=0.75)
    guess = f" Did you mean {str(path.with_name(similar[0]))!r}?" if similar else ""
    if os.fspath(name).startswith((".", "/", "~")) or os.fspath(name).count("/") > 1:
        raise FileNotFoundError(f"there is no such folder.{guess or ' Check the path.'}")
    was_offline = constants.HF_HUB_OFFLINE
    reason = "HF_HUB_OFFLINE is set" if was_offline else unreachable_hub(constants.ENDPOINT)
    constants.HF_HUB_OFFLINE = was_offline or reason is not None
    try:
        yield
    except OSError as error:
        if reason is None:
            raise
        raise FileNotFoundError(
            f"there is no such folder, {constants.HF_HUB_CACHE} does not hold it either, and the Hub cannot be asked: "
            f"{reason}.{guess} Give the path of a folder with the files, or set HF_HOME to the folder of a cache that "
            "has it, or HF_ENDPOINT to a mirror of the Hub."
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = was_offline
