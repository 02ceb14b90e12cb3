"""Options for generation on vLLM servers, and for training on completions of another policy."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le

from prefrl.options.fields import opt
from prefrl.options.kwargs import KwargsOption, KwargsValue
from prefrl.options.params import Params
from prefrl.options.rules import example, unset, when
from prefrl.options.types import Seconds
from prefrl.trainer.online.truncation_options import cuts_of

__all__ = ["CORRECTION", "NO_SERVER_RULES", "SERVER_RULES", "VLLM", "CorrectionParams", "VLLMOptions", "VLLMParams"]


@dataclass(frozen=True)
class VLLMParams(Params):
    """Settings of requests and weight syncs that are rarely changed."""

    request_timeout: Seconds = opt(
        600.0, "Time limit of a request for all completions of a prompt, in seconds; a late request is repeated once."
    )
    guided_json: dict[str, Any] | None = opt(None, "Constrain completions to JSON that follows this schema.")
    guided_grammar: str | None = opt(None, "Constrain completions to this grammar (EBNF).")
    sync_folder: str | None = opt(
        None, "Folder that trainer and servers share; None: /dev/shm if all servers are on this host."
    )
    sync_timeout: Seconds = opt(300.0, "Time limit of a weight sync, in seconds.")


@dataclass(frozen=True)
class CorrectionParams(Params):
    """Hyperparameters of every correction: `low` and `high` of `losses.policy.off_policy.importance_weights`."""

    clip_min: Annotated[float, Gt(0), Le(1)] | None = opt(None, "Lower bound of the importance ratio; None: no bound.")
    clip_max: Annotated[float, Ge(1)] | None = opt(3.0, "Upper bound of the importance ratio; None: no bound.")


VLLM: KwargsOption[VLLMParams] = KwargsOption(
    "vllm_kwargs", "Rarely changed settings of servers.", switch="use_vllm", choices={True: VLLMParams}
)
CORRECTION: KwargsOption[CorrectionParams] = KwargsOption(
    "vllm_importance_sampling_kwargs",
    "Bounds of the importance weights.",
    switch="corrects_sampling",
    choices={True: CorrectionParams},
    off="sampling is not corrected. Leave vllm_importance_sampling_correction None, without guided decoding and with "
    "truncated_logprobs='exact'.",
)


@dataclass
class VLLMOptions:
    """Generation on servers that `prefrl vllm-serve` starts; the security model describes their key."""

    changeable: ClassVar[tuple[str, ...]] = (
        "use_vllm",
        "vllm_server_base_url",
        "vllm_server_host",
        "vllm_server_port",
        "vllm_server_timeout",
        "vllm_kwargs",
        "weight_sync",
    )

    use_vllm: bool = opt(False, "Sample completions on a vLLM server instead of in the training process.")
    vllm_server_base_url: list[str] | None = opt(
        None, "URLs of the servers, which share the requests; None: http://vllm_server_host:vllm_server_port."
    )
    vllm_server_host: str = opt("127.0.0.1", "Host of the server.")
    vllm_server_port: Annotated[int, Ge(1), Le(65535)] = opt(8000, "Port of the server.")
    vllm_server_timeout: Seconds = opt(
        120.0, "Seconds to wait for a server that is starting, unreachable or restarting."
    )
    vllm_guided_decoding_regex: str | None = opt(None, "Constrain completions to this regular expression.")
    vllm_kwargs: KwargsValue = opt(None, VLLM.help)
    vllm_importance_sampling_correction: bool | None = opt(
        None,
        "Multiply losses by importance weights policy / sampler, because a server's log-probs differ from the "
        "trainer's and async samples come from older weights. None: on, unless guided decoding, or truncated "
        "sampling with truncated_logprobs='softmax', makes the trainer score a different distribution from the "
        "sampler's.",
    )
    vllm_importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_truncate", "geometric_mask"
    ] = opt(
        "sequence_mask",
        "Level of the importance weights: the ratio of each token (token), the product of a sequence's token ratios "
        "(sequence), or their geometric mean (geometric). Ratios out of bounds are set to the bound (truncate), or "
        "their tokens are excluded from the loss (mask).",
    )
    vllm_importance_sampling_kwargs: KwargsValue = opt(None, CORRECTION.help)
    weight_sync: Literal["nccl", "gloo", "shm", "adapter"] | None = opt(
        None,
        "How weights are sent to the servers: nccl (GPUs), gloo (TCP), shm (files in a shared folder), adapter (only "
        "the LoRA weights, as files in a shared folder). None: adapter if only an adapter is trained and there is a "
        "shared folder, otherwise nccl on a GPU and gloo on a CPU.",
    )
    generation_mode: Literal["sync", "overlap", "async"] = opt(
        "sync",
        "sync: generate, then train. overlap: train on finished groups while other groups of the same step are "
        "still being generated; the update is the same up to rounding. async: generate for later steps during "
        "training, at most max_staleness steps ahead.",
    )
    max_staleness: Annotated[int, Ge(1)] = opt(
        4, "async: maximum age, in optimizer steps, of sampling weights when their completions are first trained on."
    )

    @property
    def vllm_params(self) -> VLLMParams:
        """The settings of servers."""
        return VLLM.of(self)

    @property
    def correction_params(self) -> CorrectionParams:
        """The bounds of the importance weights."""
        return CORRECTION.of(self)

    @property
    def server_urls(self) -> list[str]:
        """Base URLs of the servers, without a trailing slash."""
        given = self.vllm_server_base_url or [f"http://{self.vllm_server_host}:{self.vllm_server_port}"]
        return [url.rstrip("/") for url in given]

    @property
    def servers_are_local(self) -> bool:
        """Whether all servers are reached through the loopback interface."""
        return all(_is_loopback(urlsplit(url).hostname or "") for url in self.server_urls)

    @property
    def shared_folder(self) -> str | None:
        """A folder that trainer and servers share; None if there is none."""
        return self.vllm_params.sync_folder or ("/dev/shm" if self.servers_are_local else None)

    @property
    def corrects_sampling(self) -> bool:
        """The effective value of `vllm_importance_sampling_correction`."""
        if self.vllm_importance_sampling_correction is None:
            return self.use_vllm and not _unscored(self)
        return self.vllm_importance_sampling_correction


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _guides(o: Any) -> dict[str, Any]:
    """What constrains completions, by the name of its option."""
    guides = {
        "vllm_guided_decoding_regex": o.vllm_guided_decoding_regex,
        "guided_json": o.vllm_params.guided_json,
        "guided_grammar": o.vllm_params.guided_grammar,
    }
    return {name: guide for name, guide in guides.items() if guide is not None}


def _unscored(o: Any) -> str:
    """The options that make the sampler's distribution differ from the one that the trainer scores, as text."""
    cuts = cuts_of(o) if o.scoring_truncation is None else {}
    return ", ".join(f"{name}={value!r}" for name, value in (cuts | _guides(o)).items())


def _wrong_url(o: Any) -> str | None:
    """A URL without http or https, or without a host."""
    parts = {url: urlsplit(url) for url in o.server_urls}
    wrong = (url for url, part in parts.items() if part.scheme not in ("http", "https") or not part.hostname)
    return next(wrong, None)


def _writes_no_files(o: Any) -> bool:
    return o.weight_sync in ("nccl", "gloo")


def _lacks_nccl(o: Any) -> bool:
    return o.weight_sync == "nccl" and str(o.device.type) == "cpu"


def _masks_nothing(o: Any) -> bool:
    if not o.corrects_sampling or not o.vllm_importance_sampling_mode.endswith("_mask"):
        return False
    return (o.correction_params.clip_min, o.correction_params.clip_max) == (None, None)


_REMEDY = "remove what guides decoding, and truncated_logprobs='softmax'"
# Without use_vllm.
NO_SERVER_RULES = unset(
    {
        "vllm_server_base_url": ["http://a:1"],
        "vllm_server_host": "a",
        "vllm_server_port": 1,
        "vllm_server_timeout": 1.0,
        "vllm_guided_decoding_regex": "a",
        "vllm_kwargs": {},
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_kwargs": {},
        "weight_sync": "gloo",
        "generation_mode": "overlap",
        "max_staleness": 2,
    },
    lambda o: not o.use_vllm,
    "use_vllm=False. Set use_vllm=True.",
    example("grpo"),
)
# With use_vllm.
SERVER_RULES = (
    *unset(
        {"vllm_server_host": "a", "vllm_server_port": 1},
        lambda o: o.vllm_server_base_url is not None,
        "vllm_server_base_url is set. Remove one of them.",
        example("grpo", use_vllm=True, vllm_server_base_url=["http://a:1"]),
    ),
    when(
        lambda o: o.vllm_server_base_url is None and not o.vllm_server_host,
        "vllm_server_host='': must be a host name or an address. Leave it out for this machine, or set "
        "vllm_server_base_url.",
        example("grpo", use_vllm=True, vllm_server_host=""),
    ),
    when(
        _wrong_url,
        "vllm_server_base_url={found!r}: must be like http://host:8000",
        example("grpo", use_vllm=True, vllm_server_base_url=["ftp://host"]),
    ),
    when(
        lambda o: len(set(o.server_urls)) < len(o.server_urls),
        "vllm_server_base_url={server_urls}: contains a server twice. Remove one.",
        example("grpo", use_vllm=True, vllm_server_base_url=["http://a:1", "http://a:1/"]),
    ),
    when(
        lambda o: _writes_no_files(o) and o.vllm_params.sync_folder is not None,
        "vllm_kwargs: sync_folder={vllm_params.sync_folder!r} has no effect because weight_sync={weight_sync!r} "
        "writes no files. Remove it, or set weight_sync='shm' or 'adapter'.",
        example("grpo", use_vllm=True, weight_sync="gloo", vllm_kwargs={"sync_folder": "/x"}),
    ),
    when(
        lambda o: o.weight_sync in ("shm", "adapter") and o.shared_folder is None,
        "weight_sync={weight_sync!r} with servers on other hosts ({hosts}): set sync_folder of vllm_kwargs to a "
        "folder that they can also access, or use weight_sync='nccl'.",
        example("grpo", use_vllm=True, weight_sync="shm", vllm_server_host="node5"),
        hosts=lambda o: ", ".join(o.server_urls),
    ),
    when(
        _lacks_nccl,
        "weight_sync='nccl' needs a GPU, and this run is on the CPU. Use 'gloo' or 'shm'.",
        example("grpo", use_vllm=True, weight_sync="nccl"),
    ),
    when(
        lambda o: _unscored(o) if o.vllm_importance_sampling_correction else None,
        "vllm_importance_sampling_correction=True with {found}: they change the sampler's distribution but not the "
        f"one that the trainer scores, so the ratio would be biased. Leave the correction None, or {_REMEDY}.",
        example(
            "grpo",
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            truncated_logprobs="softmax",
            top_k=50,
        ),
    ),
    when(
        lambda o: o.generation_mode == "async" and not o.corrects_sampling,
        "generation_mode='async' with {reason}: samples of older weights need the correction. Leave "
        f"vllm_importance_sampling_correction None and {_REMEDY}, or use generation_mode='overlap'.",
        example("grpo", use_vllm=True, generation_mode="async", vllm_importance_sampling_correction=False),
        reason=lambda o: _unscored(o) or "vllm_importance_sampling_correction=False",
    ),
    *unset(
        {"vllm_importance_sampling_mode": "token_mask"},
        lambda o: not o.corrects_sampling,
        f"sampling is not corrected. Leave vllm_importance_sampling_correction None, and {_REMEDY}.",
        example("grpo", use_vllm=True, vllm_importance_sampling_correction=False),
    ),
    when(
        _masks_nothing,
        "vllm_importance_sampling_mode={vllm_importance_sampling_mode!r} without clip_min and clip_max in "
        "vllm_importance_sampling_kwargs: nothing would be masked. Set one of them.",
        example("grpo", use_vllm=True, vllm_importance_sampling_kwargs={"clip_max": None}),
    ),
    when(
        lambda o: " and ".join(_guides(o)) if len(_guides(o)) > 1 else None,
        "{found} are set: completions can follow only one of them. Remove the others.",
        example(
            "grpo",
            use_vllm=True,
            vllm_guided_decoding_regex="a",
            vllm_kwargs={"guided_grammar": "b"},
        ),
    ),
    *unset(
        {"max_staleness": 2},
        lambda o: o.generation_mode != "async",
        "generation_mode={generation_mode!r}. Set generation_mode='async'.",
        example("grpo", use_vllm=True),
    ),
)
