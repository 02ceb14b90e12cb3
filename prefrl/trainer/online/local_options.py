"""Options for generation in the training process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from prefrl.errors import ConfigError
from prefrl.options.fields import opt
from prefrl.options.rules import example, unset, when

__all__ = ["LOCAL_RULES", "LocalOptions"]


@dataclass
class LocalOptions:
    """Generation in the training process."""

    changeable: ClassVar[tuple[str, ...]] = ("ds3_gather_for_generation", "cache_implementation")

    ds3_gather_for_generation: bool = opt(
        True,
        "For partitioned models (ZeRO-3, FSDP2): keep all weights gathered on each process during generation. "
        "False: gather them layer by layer for every token, which is slow but needs little memory.",
    )
    cache_implementation: Literal["dynamic", "offloaded"] | None = opt(
        None,
        "Where the KV cache is kept: on the device (dynamic, the default), or in host memory except for the layer "
        "that is being computed (offloaded).",
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
        lambda o: o.use_vllm,
        "use_vllm=True: a server samples. Remove it.",
        example("grpo", use_vllm=True),
    ),
    when(
        lambda o: o.cache_implementation == "offloaded" and o.device.type == "cpu",
        "cache_implementation='offloaded' has no effect on the CPU, where the cache is in host memory anyway. Remove "
        "it.",
        example("grpo", cache_implementation="offloaded"),
    ),
)
