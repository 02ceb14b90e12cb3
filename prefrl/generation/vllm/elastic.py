"""A fleet whose servers come and go between two weight syncs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefrl.distributed import from_main, rank
from prefrl.errors import AbsentServerError, GenerationError, WeightSyncError
from prefrl.generation.vllm.fleet import FRESH, Fleet
from prefrl.generation.vllm.handshake import PROBE_SECONDS, Waiting, handshake, weight_version
from prefrl.generation.vllm.members import in_words
from prefrl.generation.vllm.pending import error_of, raise_shared
from prefrl.http import HttpError

if TYPE_CHECKING:
    from prefrl.generation.base import WeightSource
    from prefrl.generation.server import ServerInfo
    from prefrl.generation.vllm.members import Source

logger = logging.getLogger(__name__)

# If a server stops in the middle of a transfer, the others may miss the deadline with it: they get the weights again.
_SENDS = 2
_PAUSE_SECONDS = 0.5
# What completions depend on, besides the weights and what `Requirements` compares.
_SAME = ("dtype", "max_model_len")


@dataclass(frozen=True, slots=True)
class Members:
    """Which servers an elastic fleet has."""

    source: Source
    min_servers: int  # with fewer, the fleet waits, and the run ends after `vllm_server_timeout`


class ElasticFleet(Fleet):
    """Servers that are looked for whenever weights are due. Those that have the weights then get requests.

    A server that does not answer, does not fit or misses the deadline of a transfer is set aside until the next time.
    The main process decides for all.

    Args:
        members: Which servers there are.
        router: Base URL of a router in front of them, which gets all requests; None: they are sent to the servers.
        options: The other arguments of `Fleet`.
    """

    def __init__(self, members: Members, *, router: str | None, **options: Any) -> None:
        super().__init__([], **options)
        self._source, self._min_servers = members.source, members.min_servers
        self._router = router
        self._reasons: list[str] = []  # why servers that were found are not used
        self._set_aside: set[str] = set()  # reasons that were told

    @property
    def num_alive(self) -> int:
        """The number of servers that have the weights."""
        return len(self._urls)

    @property
    def addresses(self) -> Sequence[str]:
        """See `Fleet`."""
        if self._router is not None:
            return [self._router]
        first = rank() % max(len(self._urls), 1)  # among equally busy servers, each process prefers a different one
        return [*self._urls[first:], *self._urls[:first]]

    def engines(self, address: str) -> Sequence[str]:
        """See `Fleet`."""
        return [address] if self._router is None else self._urls

    def model_name(self, url: str) -> str:
        """See `Fleet`. A server may have left since its turn came, or the URL may be the router's."""
        info = self.infos.get(url) or next(iter(self.infos.values()))
        return self._weight_sync.model_name(info)

    def _align(self, weights: WeightSource, *, reconnect: bool) -> None:
        errors: list[Exception | None] = []
        weights.lead(lambda: errors.append(error_of(lambda: self._gather(weights))))
        raise_shared(errors[0] if errors else None)
        self.infos, self._urls = from_main((self.infos, self._urls))

    def _gather(self, weights: WeightSource) -> None:
        """Wait until enough servers have the weights."""
        started = time.monotonic()
        waiting = Waiting(str(self._source), self.server_timeout)
        self.is_sending = True
        try:
            while len(urls := self._send_to_all(weights)) < self._min_servers:
                seconds = time.monotonic() - started
                if seconds > self.server_timeout:
                    raise self._absence(len(urls))
                waiting.tell(seconds)
                time.sleep(_PAUSE_SECONDS)
                self.stats.wait_s += time.monotonic() - started - seconds
        finally:
            self.is_sending = False
        self._tell(urls)
        self._urls = urls

    def _send_to_all(self, weights: WeightSource) -> list[str]:
        """Send the weights to those that lack them; returns those that have them now."""
        failure: WeightSyncError | None = None
        lacking: dict[str, ServerInfo] = {}
        for _ in range(_SENDS):
            versions = self._look()
            lacking = {url: self.infos[url] for url, version in versions.items() if version != self.version}
            if not lacking:
                return list(versions)
            try:
                self._weight_sync.send(lacking, weights, version=self.version)
            except WeightSyncError as error:
                failure = error
            finally:
                self.stats.bytes_sent += self._weight_sync.bytes_sent
        versions = self._look()
        have = [url for url, version in versions.items() if version == self.version]
        if failure is None:
            self._reasons += [
                f"{url}: was sent the weights {self.version!r} and has {versions[url]!r}. Check whether another "
                "training run uses the same server."
                for url in lacking
                if versions.get(url, self.version) != self.version
            ]
        if failure is None or len(have) == len(versions):
            return have
        if len(have) < self._min_servers and FRESH not in versions.values():
            raise failure  # they live, and waiting would not help
        self._reasons.append(str(failure))
        return have

    def _look(self) -> dict[str, str]:
        """The versions of the weights of all servers that answer and fit. Forgets what the others were sent."""
        found = self._source.find()
        calls = {url: self._http.submit(self._look_at(url)) for url in found.urls}
        self._reasons = list(found.left_out)
        versions: dict[str, str] = {}
        for url, call in calls.items():
            try:
                info, version = call.result()
                self._check_same(url, info)
                self.infos[url], versions[url] = info, version
            except (HttpError, GenerationError) as error:
                self._reasons.append(str(error))
        self._note_restarts(versions)
        for url in self._with_our_weights - versions.keys():
            self._with_our_weights.discard(url)
            self._weight_sync.forget(url)
        self._with_our_weights |= {url for url, version in versions.items() if version == self.version}
        return versions

    async def _look_at(self, url: str) -> tuple[ServerInfo, str]:
        version = await weight_version(self._http, url)
        known = self.infos.get(url)
        if known is None or version == FRESH:  # it may have been started again, with another model
            known = await handshake(self._http, url, self._requirements, timeout=PROBE_SECONDS)
        return known, version

    def _check_same(self, url: str, info: ServerInfo) -> None:
        """Refuse a server whose completions could differ from those of the first one."""
        first = next(iter(self.infos.values()), info)
        for name in _SAME:
            found, expected = getattr(info, name), getattr(first, name)
            if found != expected:
                raise GenerationError(
                    f"{url}: has {name}={found!r}, but the servers before it have {expected!r}. Start all servers of "
                    "a run with the same options."
                )

    def _absence(self, num_servers: int) -> AbsentServerError:
        return AbsentServerError(
            f"{self._source}: {num_servers} servers have the weights, but min_servers={self._min_servers} are needed, "
            f"and no more came within {self.server_timeout:g} s (vllm_server_timeout). Start servers with "
            f"`{self._requirements.command(self._source.options)}`." + in_words(self._reasons)
        )

    def _tell(self, urls: Sequence[str]) -> None:
        """Log who came and who was set aside; what was told at the last sync is not told again."""
        came, gone = sorted({*urls} - {*self._urls}), sorted({*self._urls} - {*urls})
        if came:
            logger.info("%s: %d servers, new: %s", self._source, len(urls), ", ".join(came))
        if gone:
            logger.warning("%s: %d servers, gone: %s", self._source, len(urls), ", ".join(gone))
        new = [reason for reason in self._reasons if reason not in self._set_aside]
        if new:
            logger.warning("%s: servers that are not used:%s", self._source, in_words(new))
        self._set_aside = {*self._reasons}
