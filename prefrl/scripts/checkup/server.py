"""Asks the vLLM servers of a run whether they are there and serve its model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from prefrl.generation.server import INFO_PATH, KEY_VARIABLE, ServerInfo, key_of_user
from prefrl.generation.vllm.handshake import PROBE_SECONDS, Requirements
from prefrl.http import Http, Overdue, Refused, Unreachable

if TYPE_CHECKING:
    from prefrl.scripts.checkup.findings import Section
    from prefrl.scripts.checkup.subject import Subject

__all__ = ["check_servers"]


def check_servers(section: Section, subject: Subject) -> None:
    """Note which servers answer. One that does not may still start: a run waits for it.

    Raises:
        GenerationError: A server serves another model, or was not started by prefrl.
    """
    config = subject.config
    key = key_of_user(os.environ) if config.servers_are_local else os.environ.get(KEY_VARIABLE)
    http = Http(key=key)
    adapters = config.weight_sync == "adapter"
    requirements = Requirements.of(subject.model, subject.tokenizer, has_adapters=adapters)
    for url in config.server_urls:
        try:
            answer = http.request("GET", url + INFO_PATH, timeout=PROBE_SECONDS)
        except (Unreachable, Overdue):
            section.warn(
                f"{url} does not answer. A run waits for {config.vllm_server_timeout:g} s (vllm_server_timeout). "
                f"Start it with `{requirements.start_command(url)}`."
            )
            continue
        except Refused as error:
            raise requirements.error(url, f"refused the request: {error}") from error
        info = ServerInfo.from_json(url, answer)
        requirements.check(url, info)
        section.ok(f"{url} serves {info.model} with vLLM {info.vllm}, up to {info.max_model_len:,} tokens")
