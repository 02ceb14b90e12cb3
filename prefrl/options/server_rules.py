"""Rules about vLLM servers: how they are named and reached, and whether one shares the device of training."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from prefrl.options.fields import example, mapping_of, unset, when
from prefrl.options.generation_rules import guides_of, unscored

# How `vllm_server_base_url` and `admin_urls` begin if they say where servers are found, instead of listing them.
FOLDER, DNS = "dir:", "dns:"
_DNS_PLACE = re.compile(rf"{DNS}[\w.-]+:([0-9]{{1,5}})")
PLACES = (
    "must be like http://host:8000; or, alone in its list, a folder like dir:/shared/fleet or a DNS name like "
    "dns:name:8000"
)


def wrong_urls(urls: Sequence[str]) -> list[str]:
    """Those that are not like http://host:8000, without a path or user name."""
    return [url for url in urls if not _is_base_url(url)]


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_place = parts.scheme in ("http", "https") and parts.hostname and parts.path.strip("/") == ""
        is_place = is_place and not (parts.query or parts.fragment or parts.username) and parts.port != 0
        return bool(is_place and url.isprintable() and " " not in url)
    except ValueError:  # for example, the port is not a number
        return False


def wrong_servers(urls: Sequence[str]) -> list[str]:
    """Those that are neither URLs nor, alone in the list, a place where servers are found."""
    if len(urls) == 1 and urls[0].startswith(FOLDER):
        return [url for url in urls if url == FOLDER]
    if len(urls) == 1 and urls[0].startswith(DNS):
        match = _DNS_PLACE.fullmatch(urls[0])
        return [] if match and 0 < int(match[1]) < 2**16 else [*urls]
    return wrong_urls(urls)


def are_local(urls: Sequence[str]) -> bool:
    """Whether all of them are reached through the loopback interface."""
    return all(_is_loopback(urlsplit(url).hostname or "") for url in urls)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _carrier(o: Any) -> Any:
    """What sends the weights, or what has changed of them; None: the default."""
    return o.vllm_params.delta_over if o.weight_sync == "delta" else o.weight_sync


def _writes_no_files(o: Any) -> bool:
    is_shared = o.vllm_mode == "colocate"  # then files are the default for changes
    return _carrier(o) in ("nccl", "gloo", "ipc") or (
        not is_shared and (o.weight_sync, _carrier(o)) == ("delta", None)
    )


def _lacks_gpu(o: Any) -> str | None:
    carrier: str | None = _carrier(o)
    return carrier if carrier in ("nccl", "ipc") and str(o.device.type) == "cpu" else None


def _masks_nothing(o: Any) -> bool:
    if not o.corrects_sampling or not o.vllm_importance_sampling_mode.endswith("_mask"):
        return False
    return (o.correction_params.clip_min, o.correction_params.clip_max) == (None, None)


_REMEDY = "remove what guides decoding, and truncated_logprobs='softmax'"
# Without use_vllm.
NO_SERVER_RULES = (
    when(
        lambda o: [name for name in ("guided_json", "guided_grammar") if name in mapping_of(o, "vllm_kwargs")],
        "vllm_kwargs: {found[0]} has no effect because use_vllm=False. Set use_vllm=True.",
        example("grpo", vllm_kwargs={"guided_grammar": "a"}),
    ),
    *unset(
        {"vllm_guided_decoding_regex": "a", "generation_mode": "overlap"},
        lambda o: True,
        "use_vllm=False. Set use_vllm=True.",
        example("grpo"),
    ),
    *unset(
        {
            "vllm_server_base_url": ["http://a:1"],
            "vllm_server_host": "a",
            "vllm_server_port": 1,
            "vllm_server_timeout": 1.0,
            "vllm_importance_sampling_mode": "token_mask",
            "weight_sync": "gloo",
            "max_staleness": 2,
        },
        lambda o: True,
        "use_vllm=False. Set use_vllm=True.",
        example("grpo"),
        hint=True,
        same={"vllm_server_host": "0.0.0.0", "vllm_server_timeout": 240.0},
    ),
)
# With use_vllm.
SERVER_RULES = (
    *unset(
        {"vllm_server_host": "a", "vllm_server_port": 1},
        lambda o: o.vllm_server_base_url is not None,
        "vllm_server_base_url is set. Remove one of them.",
        example("grpo", use_vllm=True, vllm_server_base_url=["http://a:1"]),
        hint=True,
    ),
    when(
        lambda o: o.vllm_server_base_url is None and not o.vllm_server_host,
        "vllm_server_host='': must be a host name or an address. Leave it out for this machine, or set "
        "vllm_server_base_url.",
        example("grpo", use_vllm=True, vllm_server_host=""),
    ),
    when(
        lambda o: o.vllm_server_base_url == [],
        "vllm_server_base_url=[]: must have at least one URL. Leave it out for vllm_server_host and vllm_server_port.",
        example("grpo", use_vllm=True, vllm_server_base_url=[]),
    ),
    when(
        lambda o: o.vllm_params.admin_urls == [],
        "vllm_kwargs: admin_urls=[]: must have at least one URL. Without a router, leave it out.",
        example("grpo", use_vllm=True, vllm_kwargs={"admin_urls": []}),
    ),
    when(
        lambda o: wrong_servers(o.server_urls),
        f"vllm_server_base_url={{found[0]!r}}: {PLACES}.",
        example("grpo", use_vllm=True, vllm_server_base_url=["ftp://host"]),
    ),
    when(
        lambda o: o.vllm_params.admin_urls and wrong_servers(o.engine_urls),
        f"vllm_kwargs: admin_urls={{found[0]!r}}: {PLACES}.",
        example("grpo", use_vllm=True, vllm_kwargs={"admin_urls": ["dns:engines"]}),
    ),
    when(
        lambda o: o.vllm_params.admin_urls and (len(o.server_urls) > 1 or wrong_urls(o.server_urls)),
        "vllm_server_base_url={server_urls} with admin_urls in vllm_kwargs: must be the URL of the router that gets "
        "the requests. Without a router, remove admin_urls.",
        example("grpo", use_vllm=True, vllm_server_base_url=["dir:/a"], vllm_kwargs={"admin_urls": ["http://b:1"]}),
    ),
    when(
        lambda o: not wrong_urls(o.engine_urls) and (o.min_servers or 0) > len(o.engine_urls),
        "vllm_kwargs: min_servers={vllm_params.min_servers}: must be at most {number}, the number of servers "
        "({hosts}). For servers that come and go, set vllm_server_base_url to dir:/shared/fleet or dns:name:8000.",
        example("grpo", use_vllm=True, vllm_kwargs={"min_servers": 2}),
        number=lambda o: len(o.engine_urls),
        hosts=lambda o: ", ".join(o.engine_urls),
    ),
    when(
        lambda o: len(set(o.server_urls)) < len(o.server_urls),
        "vllm_server_base_url={server_urls}: contains a server twice. Remove one.",
        example("grpo", use_vllm=True, vllm_server_base_url=["http://a:1", "http://a:1/"]),
    ),
    when(
        lambda o: o.engine_urls if len(set(o.engine_urls)) < len(o.engine_urls) else None,
        "vllm_kwargs: admin_urls={found}: contains a server twice. Remove one.",
        example("grpo", use_vllm=True, vllm_kwargs={"admin_urls": ["http://a:1", "http://a:1/"]}),
    ),
    when(
        lambda o: _writes_no_files(o) and o.vllm_params.sync_folder is not None,
        "vllm_kwargs: sync_folder={vllm_params.sync_folder!r} has no effect because weight_sync={weight_sync!r} "
        "writes no files. Remove it, or set weight_sync='shm' or 'adapter', or with 'delta' delta_over='shm' or "
        "'store'.",
        example("grpo", use_vllm=True, weight_sync="gloo", vllm_kwargs={"sync_folder": "/x"}),
        hint=True,
    ),
    when(
        lambda o: _carrier(o) in ("shm", "adapter", "store") and o.shared_folder is None,
        "weight_sync={weight_sync!r} writes files, and there are servers on other hosts ({hosts}): set sync_folder of "
        "vllm_kwargs to a folder that they can also access, or use 'nccl' or 'gloo'.",
        example("grpo", use_vllm=True, weight_sync="shm", vllm_server_host="node5"),
        hosts=lambda o: ", ".join(o.engine_urls),
    ),
    when(
        lambda o: o.vllm_params.sync_folder == "",
        "vllm_kwargs: sync_folder='': must be a folder, or with delta_over='store' also a URL of fsspec. Leave it out "
        "for the default.",
        example("grpo", use_vllm=True, weight_sync="shm", vllm_kwargs={"sync_folder": ""}),
    ),
    when(
        lambda o: _carrier(o) != "store" and "://" in (o.vllm_params.sync_folder or ""),
        "vllm_kwargs: sync_folder={vllm_params.sync_folder!r} is a URL, and weight_sync={weight_sync!r} with "
        "delta_over={vllm_params.delta_over!r} needs a folder. Name one, or set weight_sync='delta' and "
        "delta_over='store'.",
        example("grpo", use_vllm=True, weight_sync="shm", vllm_kwargs={"sync_folder": "s3://bucket/run"}),
    ),
    when(
        lambda o: o.weight_sync != "delta" and o.vllm_params.delta_over is not None,
        "vllm_kwargs: delta_over={vllm_params.delta_over!r} has no effect because weight_sync is {weight_sync!r}. "
        "Remove it, or set weight_sync='delta'.",
        example("grpo", use_vllm=True, weight_sync="gloo", vllm_kwargs={"delta_over": "gloo"}),
        hint=True,
    ),
    when(
        _lacks_gpu,
        "weight_sync or delta_over is {found!r}, which needs a GPU, and this run is on the CPU. Use 'gloo' or 'shm'.",
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
        lambda o: o.generation_mode == "async" and not (o.corrects_sampling or o.takes_old_samples),
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
        hint=True,
    ),
    when(
        _masks_nothing,
        "vllm_importance_sampling_mode={vllm_importance_sampling_mode!r} without clip_min and clip_max in "
        "vllm_importance_sampling_kwargs: nothing would be masked. Set one of them.",
        example("grpo", use_vllm=True, vllm_importance_sampling_kwargs={"clip_max": None}),
    ),
    when(
        lambda o: " and ".join(guides_of(o)) if len(guides_of(o)) > 1 else None,
        "{found} are set: completions can follow only one of them. Remove the others.",
        example("grpo", use_vllm=True, vllm_guided_decoding_regex="a", vllm_kwargs={"guided_grammar": "b"}),
    ),
    *unset(
        {"max_staleness": 2},
        lambda o: o.generation_mode != "async",
        "generation_mode={generation_mode!r}. Set generation_mode='async'.",
        example("grpo", use_vllm=True),
        hint=True,
    ),
)
_OF_TRL = (0.3, 0.55)  # TRL's defaults of the share


def _asks_for_nccl(o: Any) -> str | None:
    name = "delta_over" if o.weight_sync == "delta" else "weight_sync"
    return name if _carrier(o) == "nccl" else None


# With use_vllm and vllm_mode="colocate".
SHARED_DEVICE_RULES = (
    when(
        lambda o: o.knows_sizes and o.world_size > 1,
        "vllm_mode='colocate' with {world_size} training processes: one process and one server share a device. Set "
        "num_processes=1, or leave vllm_mode out; vllm='auto' then gives the server the last GPU.",
        example("grpo", processes=2, use_vllm=True, vllm_mode="colocate"),
    ),
    when(
        lambda o: len(o.server_urls) > 1 or not o.servers_are_local,
        "vllm_mode='colocate' with {urls}: one server of this machine shares the device of training. Remove what "
        "names the servers, or vllm_mode.",
        example("grpo", use_vllm=True, vllm_mode="colocate", vllm_server_host="node5"),
        urls=lambda o: ", ".join(o.server_urls),
    ),
    when(
        lambda o: o.generation_mode != "sync",
        "generation_mode={generation_mode!r} with vllm_mode='colocate', which vllm='auto' chooses where there is one "
        "GPU: it samples while the trainer works, but a device that is shared does one or the other. Use "
        "generation_mode='sync', or give the server a GPU of its own.",
        example("grpo", use_vllm=True, vllm_mode="colocate", generation_mode="async"),
    ),
    when(
        _asks_for_nccl,
        "{found}='nccl' with vllm_mode='colocate': NCCL does not connect two processes on one GPU. Leave {found} out; "
        "weights then go through shared memory.",
        example("grpo", use_vllm=True, vllm_mode="colocate", weight_sync="nccl"),
    ),
)
# Without one of them.
OWN_DEVICE_RULES = (
    when(
        lambda o: o.use_vllm and o.weight_sync == "ipc",
        "weight_sync='ipc' with vllm_mode={vllm_mode!r}: it sends through the memory of a GPU that trainer and server "
        "share. Set vllm_mode='colocate', or leave weight_sync out.",
        example("grpo", use_vllm=True, weight_sync="ipc"),
    ),
    when(
        lambda o: o.vllm_gpu_memory_utilization not in (None, *_OF_TRL),
        "vllm_gpu_memory_utilization={vllm_gpu_memory_utilization} has no effect because use_vllm={use_vllm} and "
        "vllm_mode={vllm_mode!r}. Set use_vllm=True and vllm_mode='colocate', or give --gpu_memory_utilization to "
        "prefrl vllm-serve.",
        example("grpo", use_vllm=True, vllm_gpu_memory_utilization=0.5),
        hint=True,
    ),
    *unset(
        {"vllm_enable_sleep_mode": True},
        lambda o: True,
        "use_vllm={use_vllm} and vllm_mode={vllm_mode!r}, and a server with GPUs of its own never sleeps. Leave it "
        "out.",
        example("grpo"),
        hint=True,
    ),
)
