"""Sending only the adapter, once the servers have the base weights."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefrl.errors import ConfigError
from prefrl.generation.weights.files import FileSync
from prefrl.http import Refused

if TYPE_CHECKING:
    from prefrl.generation.base import WeightSource
    from prefrl.generation.weights.files import PrivateFolder
    from prefrl.generation.weights.transfer import Server, Transfer

__all__ = ["ADAPTER", "AdapterSync"]

logger = logging.getLogger(__name__)

# The model name in requests if the policy is an adapter.
ADAPTER = "prefrl-policy"


class AdapterSync:
    """A `Transport` that sends an adapter as files, and the base weights in the same way.

    Args:
        folder: Where to write the files.
    """

    adapter_name: str | None = ADAPTER

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._base = FileSync(folder)

    def send(self, transfer: Transfer, servers: Sequence[Server], weights: WeightSource) -> None:
        """Write the adapter's files. They are kept for as long as a server may read them."""
        for server in servers:
            if server.info.max_lora_rank is None:
                message = "the server takes no adapters. Start it with --max_lora_rank, or send all weights"
                server.fail("loading the adapter", ConfigError(message))
        self._send_base(transfer, [server for server in servers if not server.has_base], weights)
        folder = self._folder.make("adapter-")
        weights.save_adapter(folder)
        transfer.bytes_sent += sum(file.stat().st_size for file in folder.glob("*.safetensors"))

        async def load(server: Server) -> None:
            adapter = {"lora_name": ADAPTER, "lora_path": str(folder), "load_inplace": True}
            try:
                await transfer.post(server, "/v1/load_lora_adapter", adapter)
            except Refused as error:
                if error.status != 200:  # on success the answer is text, not JSON
                    raise
            server.adapter = folder

        transfer.for_each(servers, "loading the adapter", load)
        self._remove_unused(transfer)

    def _send_base(self, transfer: Transfer, servers: Sequence[Server], weights: WeightSource) -> None:
        if not servers:
            return
        if weights.is_quantized:
            logger.warning("The policy is quantized: servers apply its adapter to the base weights that they loaded.")
        else:
            self._base.send(transfer, servers, weights.base())
        for server in servers:
            server.has_base = server.error is None

    def _remove_unused(self, transfer: Transfer) -> None:
        """Keep only folders that a server may still read: it drops its copy when its base weights change."""
        used = {server.adapter for server in transfer.known}
        for folder in self._folder.path.glob("adapter-*"):
            if folder not in used:
                shutil.rmtree(folder, ignore_errors=True)
