"""How LoRA adapters begin: peft's initializations, as options name them."""

from __future__ import annotations

import re
from typing import Any, Literal

from prefrl.errors import ConfigError
from prefrl.options.names import check_known
from prefrl.options.types import check_value

_Init = Literal["gaussian", "pissa", "olora", "orthogonal", "loftq", "true", "false"]
_NEEDS_DATA = (
    "it needs data, which a trainer does not give to peft. Initialize the adapter with peft, save it, and give its "
    "folder as model_name_or_path"
)
# Of peft, with the reason why they are refused.
_REFUSED = {
    "eva": _NEEDS_DATA,
    "corda": _NEEDS_DATA,
    "lora_ga": _NEEDS_DATA,
    "pissa_niter": "this decomposition of the weights is random, and peft would compute a different one when it loads "
    "the saved adapter. Use pissa, which is exact",
}
_LOFTQ: dict[str, Any] = {"loftq_bits": (4, 8), "loftq_iter": range(1, 1001)}


def checked_init(lora_init: Any, loftq_config: Any) -> str | None:
    """The option `lora_init` as text: peft's values are texts and booleans.

    Raises:
        ConfigError: It is none that can be used here, or `loftq_config` does not belong to it.
    """
    init = str(lora_init).lower() if isinstance(lora_init, bool) else lora_init
    if init is not None:
        kind = re.sub(r"_\d+$", "", str(init))
        if kind in _REFUSED:
            raise ConfigError(f"lora_init={init!r}: {_REFUSED[kind]}.")
        check_value("lora_init", init, _Init)
    if loftq_config is not None and init != "loftq":
        raise ConfigError(
            f"loftq_config={loftq_config!r} has no effect because lora_init={init!r}. Set lora_init=loftq."
        )
    for key, value in (loftq_config or {}).items():
        check_known("loftq_config", key, _LOFTQ, "key of LoftQ")
        if value not in _LOFTQ[key]:
            allowed = "4 or 8" if key == "loftq_bits" else "a number of iterations from 1 to 1000"
            raise ConfigError(f"loftq_config: {key}={value!r}: must be {allowed}")
    return None if init is None else str(init)


def init_arguments(lora_init: str | None, loftq_config: dict[str, int] | None) -> dict[str, Any]:
    """Arguments of `peft.LoraConfig` for the options that `checked_init` has checked."""
    if lora_init == "loftq":
        return {
            "init_lora_weights": lora_init,
            "loftq_config": {"loftq_bits": 4, "loftq_iter": 1, **(loftq_config or {})},
        }
    return {"init_lora_weights": {"true": True, "false": False}.get(str(lora_init), lora_init)}
