"""The sleep of a server that shares the trainer's device: it frees the memory of the one, and waking takes it back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from prefrl.errors import GenerationError
from prefrl.http import Refused

if TYPE_CHECKING:
    from prefrl.http import Http

# The weight version of a server whose weights are discarded, or about to be: it lacks every version.
ASLEEP = "asleep"
Tag = Literal["weights", "kv_cache"]


class Sleep:
    """Puts a server to sleep while the trainer works, and wakes it for a generation: weights, a sync, then its cache.

    Each request may be repeated: a server that is awake wakes up in vain, and one that sleeps goes on sleeping.

    Args:
        http: HTTP client, with the server's key.
        level: Of vLLM's sleep mode. 2 discards the weights, which a sync then has to replace as a whole. 1 keeps them
            in host memory. Both discard the key/value cache.
        timeout: Time limit of each request, in seconds.
    """

    def __init__(self, http: Http, *, level: Literal[1, 2], timeout: float) -> None:
        self._http = http
        self._level = level
        self._timeout = timeout

    def begin(self, url: str) -> None:
        """Put a server to sleep. It answers when the memory is free.

        Raises:
            GenerationError: It refuses to sleep.
            HttpError: It does not answer.
        """
        try:
            if self._level == 2:
                # Before they are discarded: a trainer that dies in between must not leave weights that look whole.
                self._post(url, "/update_weight_version", {"new_version": ASLEEP})
            self._post(url, f"/sleep?level={self._level}")
        except Refused as error:
            raise GenerationError(f"The vLLM server at {url} does not sleep: {error}") from error

    def wake(self, url: str, tag: Tag) -> None:
        """Take the memory back that the trainer does not use: for the weights, and then for the cache.

        Raises:
            GenerationError: The server does not wake up, most likely because the memory does not suffice.
            HttpError: It does not answer.
        """
        torch.cuda.empty_cache()  # what the trainer's allocator keeps of its last step, and of the sync
        try:
            answer = self._post(url, f"/wake_up?tags={tag}")
        except Refused as error:
            raise GenerationError(
                f"The vLLM server at {url} does not wake up: {error}. If its share of the memory is not free, set a "
                "smaller vllm_gpu_memory_utilization."
            ) from error
        if tag == "kv_cache" and (not isinstance(answer, dict) or answer.get("status") != "awake"):
            raise GenerationError(f"The vLLM server at {url} is not awake after it was woken: it answered {answer!r}")

    def _post(self, url: str, path: str, json: object = None) -> object:
        return self._http.request("POST", url + path, timeout=self._timeout, json=json)
