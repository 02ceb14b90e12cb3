"""Options for generation in the training process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from prefrl.errors import ConfigError
from prefrl.options.fields import opt
from prefrl.options.rules import example, unset, when

__all__ = ["LOCAL_RULES", "LocalOptions"]


@dataclass
class LocalOptions:
    """Generation in the training process."""

    ds3_gather_for_generation: bool = opt(
        True,
        "For partitioned models (ZeRO-3, FSDP2): keep all weights gathered on each process during generation. "
        "False: gather them layer by layer for every token, which is slow but needs little memory.",
        decides=False,
    )
    cache_implementation: Literal["dynamic", "offloaded"] | None = opt(
        None,
        "Where the KV cache is kept: on the device (dynamic, the default), or in host memory except for the layer "
        "that is being computed (offloaded).",
        decides=False,
    )

    def check_sampler(self, *, use_vllm: bool) -> None:
        """Reject a device that cannot sample.

        Raises:
            ConfigError: Says what to do.
        """
        if not use_vllm and cast("Any", self).device.type == "mps":
            raise ConfigError(
                "use_vllm=False on MPS: tokens are sampled with numbers in float64, which MPS does not have. Set "
                "use_cpu=True."
            )


LOCAL_RULES = (
    *unset(
        {"ds3_gather_for_generation": False, "cache_implementation": "dynamic"},
        if_=lambda o: o.use_vllm,
        because="use_vllm=True: a server samples",
        remedy="Remove it.",
        example=example("grpo", use_vllm=True),
    ),
    when(
        lambda o: o.cache_implementation == "offloaded" and o.device.type == "cpu",
        "cache_implementation='offloaded' has no effect on the CPU, where the cache is in host memory anyway. Remove "
        "it.",
        example("grpo", cache_implementation="offloaded"),
    ),
)
