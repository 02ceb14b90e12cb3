"""Options for generation on vLLM servers, and for training on completions of another policy."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from prefrl.options.rules import example, unset, when

__all__ = [
    "NO_SERVER_RULES",
    "SERVER_RULES",
]


def _guides(o: Any) -> dict[str, Any]:
    """What constrains completions, by the name of its option."""
    guides = {
        "vllm_guided_decoding_regex": o.vllm_guided_decoding_regex,
        "guided_json": o.vllm_params.guided_json,
        "guided_grammar": o.vllm_params.guided_grammar,
    }
    return {name: guide for name, guide in guides.items() if guide is not None}


def unscored(o: Any) -> str:
    """The options that make the sampler's distribution differ from the one that the trainer scores, as text."""
    cuts = cuts_of(o) if not o.scores_truncated else {}
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
        lambda o: unscored(o) if o.vllm_importance_sampling_correction else None,
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
        reason=lambda o: unscored(o) or "vllm_importance_sampling_correction=False",
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


_NEUTRAL = {"top_p": (1.0,), "top_k": (None, 0), "min_p": (None, 0), "repetition_penalty": (1.0,)}


def cuts_of(options: Any) -> dict[str, Any]:
    """The sampling options that make the sampler's distribution differ from the softmax at the temperature."""
    values = {name: getattr(options, name) for name in _NEUTRAL}
    return {name: value for name, value in values.items() if value not in _NEUTRAL[name]}


TRUNCATION_RULES = (
    when(
        lambda o: o.truncated_logprobs != "exact" and not cuts_of(o),
        "truncated_logprobs={truncated_logprobs!r} has no effect because sampling is not truncated. Remove it, or set "
        "top_k, top_p, min_p or repetition_penalty.",
        example("grpo", truncated_logprobs="softmax"),
    ),
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
