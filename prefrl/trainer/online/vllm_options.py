"""Options for generation on vLLM servers, and for training on completions of another policy."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, cast
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le

from prefrl.errors import ConfigError
from prefrl.options.fields import check_no_effect, check_unset, opt
from prefrl.options.kwargs import KwargsValue, ParamsOf, kwargs
from prefrl.options.params import Params
from prefrl.options.types import Seconds
from prefrl.trainer.online.truncation_options import cuts_of

__all__ = ["CorrectionParams", "VLLMOptions", "VLLMParams"]

_REMEDY = "remove what guides decoding, and truncated_logprobs='softmax'"


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


@dataclass
class VLLMOptions:
    """Generation on servers that `prefrl vllm-serve` starts; the security model describes their key."""

    use_vllm: bool = opt(
        False, "Sample completions on a vLLM server instead of in the training process.", decides=False
    )
    vllm_server_base_url: list[str] | None = opt(
        None,
        "URLs of the servers, which share the requests; None: http://vllm_server_host:vllm_server_port.",
        decides=False,
    )
    vllm_server_host: str = opt("127.0.0.1", "Host of the server.", decides=False)
    vllm_server_port: Annotated[int, Ge(1), Le(65535)] = opt(8000, "Port of the server.", decides=False)
    vllm_server_timeout: Seconds = opt(
        120.0,
        "Seconds to wait for a server that is starting, unreachable or restarting.",
        decides=False,
    )
    vllm_guided_decoding_regex: str | None = opt(None, "Constrain completions to this regular expression.")
    vllm_kwargs: KwargsValue = kwargs(
        "Rarely changed settings of servers.", {True: VLLMParams}, switch="use_vllm", decides=False
    )
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
    vllm_importance_sampling_kwargs: KwargsValue = kwargs(
        "Bounds of the importance weights.",
        {True: CorrectionParams},
        switch="corrects_sampling",
        off="sampling is not corrected. Leave vllm_importance_sampling_correction None, without guided decoding and "
        "with truncated_logprobs='exact'.",
    )
    weight_sync: Literal["nccl", "gloo", "shm", "adapter"] | None = opt(
        None,
        "How weights are sent to the servers: nccl (GPUs), gloo (TCP), shm (files in a shared folder), adapter (only "
        "the LoRA weights, as files in a shared folder). None: adapter if only an adapter is trained and there is a "
        "shared folder, otherwise nccl on a GPU and gloo on a CPU.",
        decides=False,
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

    vllm_params = ParamsOf("vllm_kwargs", VLLMParams)
    correction_params = ParamsOf("vllm_importance_sampling_kwargs", CorrectionParams)

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
            return self.use_vllm and not self._unscored
        return self.vllm_importance_sampling_correction

    def validate_vllm(self) -> None:
        """Reject options that cannot be combined.

        Raises:
            ConfigError: Names the field, its value and what to do.
        """
        if not self.use_vllm:
            names = [field.name for field in fields(VLLMOptions) if field.name != "use_vllm"]
            check_unset(self, *names, because="use_vllm=False", remedy="Set use_vllm=True.")
            return
        self._validate_servers()
        self._validate_weight_sync()
        self._validate_correction()
        if len(self._guides) > 1:
            raise ConfigError(
                f"{' and '.join(self._guides)} are set: completions can follow only one of them. Remove the others."
            )
        if self.generation_mode != "async":
            because = f"generation_mode={self.generation_mode!r}"
            check_unset(self, "max_staleness", because=because, remedy="Set generation_mode='async'.")

    def _validate_servers(self) -> None:
        if self.vllm_server_base_url is not None:
            names = ("vllm_server_host", "vllm_server_port")
            check_unset(self, *names, because="vllm_server_base_url is set", remedy="Remove one of them.")
        elif not self.vllm_server_host:
            raise ConfigError(
                "vllm_server_host='': must be a host name or an address. Leave it out for this machine, or set "
                "vllm_server_base_url."
            )
        for url in self.server_urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"vllm_server_base_url={url!r}: must be like http://host:8000")
        if len(set(self.server_urls)) < len(self.server_urls):
            raise ConfigError(f"vllm_server_base_url={self.server_urls}: contains a server twice. Remove one.")

    def _validate_weight_sync(self) -> None:
        if self.weight_sync in ("nccl", "gloo"):
            check_no_effect(
                name="vllm_kwargs: sync_folder",
                value=self.vllm_params.sync_folder,
                unset=None,
                because=f"weight_sync={self.weight_sync!r} writes no files",
                remedy="Remove it, or set weight_sync='shm' or 'adapter'.",
            )
        if self.weight_sync in ("shm", "adapter") and self.shared_folder is None:
            raise ConfigError(
                f"weight_sync={self.weight_sync!r} with servers on other hosts ({', '.join(self.server_urls)}): set "
                "sync_folder of vllm_kwargs to a folder that they can also access, or use weight_sync='nccl'."
            )
        is_on_cpu = cast("Any", self).device.type == "cpu"
        if self.weight_sync == "nccl" and is_on_cpu:
            raise ConfigError("weight_sync='nccl' needs a GPU, and this run is on the CPU. Use 'gloo' or 'shm'.")

    @property
    def _guides(self) -> dict[str, Any]:
        """What constrains completions, by the name of its option."""
        guides = {
            "vllm_guided_decoding_regex": self.vllm_guided_decoding_regex,
            "guided_json": self.vllm_params.guided_json,
            "guided_grammar": self.vllm_params.guided_grammar,
        }
        return {name: guide for name, guide in guides.items() if guide is not None}

    @property
    def _unscored(self) -> list[str]:
        """The options that make the sampler's distribution differ from the one that the trainer scores."""
        options: Any = self  # a config also has SamplingOptions
        cuts = cuts_of(options) if options.scoring_truncation is None else {}
        return [f"{name}={value!r}" for name, value in (cuts | self._guides).items()]

    def _validate_correction(self) -> None:
        unscored = self._unscored
        if self.vllm_importance_sampling_correction and unscored:
            raise ConfigError(
                f"vllm_importance_sampling_correction=True with {', '.join(unscored)}: they change the sampler's "
                "distribution but not the one that the trainer scores, so the ratio would be biased. Leave the "
                f"correction None, or {_REMEDY}."
            )
        if not self.corrects_sampling:
            if self.generation_mode == "async":
                reason = ", ".join(unscored) or "vllm_importance_sampling_correction=False"
                raise ConfigError(
                    f"generation_mode='async' with {reason}: samples of older weights need the correction. Leave "
                    f"vllm_importance_sampling_correction None and {_REMEDY}, or use generation_mode='overlap'."
                )
            remedy = f"Leave vllm_importance_sampling_correction None, and {_REMEDY}."
            names = ("vllm_importance_sampling_mode",)
            check_unset(self, *names, because="sampling is not corrected", remedy=remedy)
            return
        bounds = (self.correction_params.clip_min, self.correction_params.clip_max)
        if self.vllm_importance_sampling_mode.endswith("_mask") and bounds == (None, None):
            raise ConfigError(
                f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r} without clip_min and clip_max "
                "in vllm_importance_sampling_kwargs: nothing would be masked. Set one of them."
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
