"""What samples: the training process itself, or vLLM servers; how servers get weights, and what is logged of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from prefrl.errors import ConfigError
from prefrl.generation.local.generator import LocalGenerator, end_token_ids
from prefrl.generation.server import KEY_VARIABLE, key_of_user
from prefrl.generation.vllm.client import VLLMGenerator
from prefrl.generation.vllm.elastic import ElasticFleet, Members
from prefrl.generation.vllm.handshake import Requirements
from prefrl.generation.vllm.members import source_of
from prefrl.generation.vllm.requests import Guided
from prefrl.generation.vllm.sleep import Sleep
from prefrl.generation.weights.sync import WeightSync
from prefrl.http import Http
from prefrl.metrics import Max, Metric, Sum
from prefrl.models.adapters import is_peft_model
from prefrl.models.images import adapts_images, placeholder_ids
from prefrl.models.scoring import prepare_for_scoring
from prefrl.options.server_rules import FOLDER
from prefrl.rollout.summary import staleness
from prefrl.trainer.memory import GENERATION, explained

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prefrl.generation.base import Generator, WeightSource
    from prefrl.generation.weights.sync import Carrier, SyncMethod
    from prefrl.trainer.configs import OnlineConfig
    from prefrl.types import Rollout


def make_generator(
    args: OnlineConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    weights: WeightSource,
    max_rows: int,
    autocast: Callable[[], AbstractContextManager[object]],
) -> LocalGenerator | VLLMGenerator:
    """The generator that the options ask for.

    Args:
        args: Options.
        model: The policy; it may be a PeftModel.
        tokenizer: The policy's tokenizer.
        weights: The policy's weights, to send to servers.
        max_rows: Maximum number of completions that this process decodes together.
        autocast: Context manager of training's mixed precision.

    Raises:
        ConfigError: `weight_sync` does not fit the model.
    """
    replay = prepare_for_scoring(model).replay
    if replay is not None and replay.records:  # the trainer's own experts, not the sampler's
        replay = None
    if not args.use_vllm:
        return LocalGenerator(
            model,
            tokenizer=tokenizer,
            max_rows=max_rows,
            gathers=args.ds3_gather_for_generation,
            offloads_cache=args.cache_implementation == "offloaded",
            autocast=autocast,
            memory=partial(explained, args=args, options=GENERATION),
            replay=replay,
        )
    has_adapter = weights.has_adapter
    method = sync_method(args, has_adapter=has_adapter, reads_images=has_adapter and adapts_images(model))
    if weights.is_quantized and method != "adapter":
        raise ConfigError(
            f"weight_sync={method!r}: the model is quantized, and only its adapter can be sent. Set "
            "weight_sync='adapter', with sync_folder in vllm_kwargs if servers are on other hosts, and serve the "
            "same base model."
        )
    base: Any = model.get_base_model() if is_peft_model(model) else model
    key = server_key(args)
    http = Http(key=key)
    members = None
    if args.min_servers is not None:
        members = Members(source_of(args.engine_urls, key=key or ""), args.min_servers)
    shares_device = args.vllm_mode == "colocate"
    # Weights that no sync replaces have to outlast the sleep.
    level: Literal[1, 2] = 1 if method in ("adapter", "delta") else 2
    return VLLMGenerator(
        args.server_urls if members is None or args.vllm_params.admin_urls is not None else [],
        http=http,
        weight_sync=_weight_sync(args, http, method),
        requirements=Requirements.of(
            base,
            tokenizer,
            has_adapters=method == "adapter",
            shares_device=shares_device,
            has_routes=replay is not None and replay.is_required,
        ),
        stop_ids=end_token_ids(base, tokenizer),
        never=placeholder_ids(base),
        server_timeout=args.vllm_server_timeout,
        request_timeout=args.vllm_params.request_timeout,
        guided=_guided(args),
        members=members,
        sleep=Sleep(http, level=level, timeout=args.vllm_params.sync_timeout) if shares_device else None,
        replay=replay,
    )


def _weight_sync(args: OnlineConfig, http: Http, method: SyncMethod) -> WeightSync:
    over = args.vllm_params.delta_over or _carrier_of_changes(args) if method == "delta" else None
    needs_folder = (over or method) in ("shm", "adapter", "store")
    return WeightSync(
        http,
        method=method,
        folder=args.shared_folder if needs_folder else None,
        timeout=args.vllm_params.sync_timeout,
        over=over,
        shares_device=args.vllm_mode == "colocate",
    )


def server_key(args: OnlineConfig) -> str | None:
    """The key of the servers; None: the environment has none, and the servers are on other machines."""
    # The file's key is for servers of this machine; another machine has another file. In a folder, files are signed.
    has_own = args.servers_are_local or args.engine_urls[0].startswith(FOLDER)
    return key_of_user(os.environ) if has_own else os.environ.get(KEY_VARIABLE)


def sync_method(args: OnlineConfig, *, has_adapter: bool, reads_images: bool = False) -> SyncMethod:
    """The effective value of `weight_sync`.

    Args:
        args: Options.
        has_adapter: Whether there is an adapter and nothing else is trained.
        reads_images: Whether the adapter is also in layers that read images; vLLM drops these parts of an adapter.

    Raises:
        ConfigError: `weight_sync` is "adapter", but the adapter is not all that is trained, or there is none, or vLLM
            would drop a part of it.
    """
    if args.weight_sync == "adapter" and not has_adapter:
        raise ConfigError(
            "weight_sync='adapter': the model has no adapter, or more than the adapter is trained. Give peft_config "
            "(use_peft on the command line), or leave weight_sync None."
        )
    if args.weight_sync == "adapter" and reads_images:
        raise ConfigError(
            "weight_sync='adapter': the adapter is also in the vision tower, where vLLM ignores it. Restrict "
            "target_modules (lora_target_modules) to the language model, or leave weight_sync None: the adapter is "
            "then merged into the weights that are sent."
        )
    if args.weight_sync is not None:
        return args.weight_sync
    if has_adapter and not reads_images and args.shared_folder is not None:
        return "adapter"
    if args.vllm_mode == "colocate":
        return "shm"
    return _group_kind(args)


def _carrier_of_changes(args: OnlineConfig) -> Carrier:
    # NCCL does not connect two processes on one GPU.
    return "shm" if args.vllm_mode == "colocate" else _group_kind(args)


def _group_kind(args: OnlineConfig) -> Literal["nccl", "gloo"]:
    device: Any = args  # a config is also TrainingArguments
    return "nccl" if device.device.type == "cuda" else "gloo"


def server_metrics(rollouts: Sequence[Rollout], generator: Generator, *, step: int) -> dict[str, Metric]:
    """How old the weights were that sampled, and how servers did.

    Args:
        rollouts: The rollouts that are first learned from in this step.
        generator: It sampled them.
        step: The optimizer step.
    """
    metrics = staleness(rollouts, step=step)
    if isinstance(generator, VLLMGenerator):
        stats = generator.stats()
        metrics |= {
            "server/requests": Sum(stats.requests),
            "server/retries": Sum(stats.retries),
            "server/restarts": Sum(stats.restarts),
            "server/wait_s": Max(stats.wait_s),
            "weights/bytes_sent": Sum(stats.bytes_sent),
        }
        if isinstance(generator.fleet, ElasticFleet):
            metrics["server/alive"] = Max(generator.fleet.num_alive)
    return metrics


def _guided(args: OnlineConfig) -> Guided | None:
    regex, params = args.vllm_guided_decoding_regex, args.vllm_params
    if (regex, params.guided_json, params.guided_grammar) == (None, None, None):
        return None
    return Guided(regex=regex, json=params.guided_json, grammar=params.guided_grammar)
