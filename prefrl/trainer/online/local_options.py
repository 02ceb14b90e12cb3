"""Options for generation in the training process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from prefrl.errors import ConfigError
from prefrl.options.fields import check_no_effect, opt

__all__ = ["LocalOptions"]


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

    def validate_local(self, *, use_vllm: bool) -> None:
        """Reject options that have no effect, and a device that cannot sample.

        Raises:
            ConfigError: Names the field, its value and what to do.
        """
        if use_vllm:
            because = "use_vllm=True: a server samples"
            for name, unset in (("ds3_gather_for_generation", True), ("cache_implementation", None)):
                value = getattr(self, name)
                check_no_effect(name=name, value=value, unset=unset, because=because, remedy="Remove it.")
        elif cast("Any", self).device.type == "mps":
            raise ConfigError(
                "use_vllm=False on MPS: tokens are sampled with numbers in float64, which MPS does not have. Set "
                "use_cpu=True."
            )
        if self.cache_implementation == "offloaded" and cast("Any", self).device.type == "cpu":
            raise ConfigError(
                "cache_implementation='offloaded' has no effect on the CPU, where the cache is in host memory anyway. "
                "Remove it."
            )
