"""Keys of the `mooncake` backend. They are SGLang's where it has them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hiradix.errors import ConfigError
from hiradix.storage.kit.options import MAX_TIMEOUT_S, Options, flag

PROTOCOLS = ("tcp", "rdma")
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")


@dataclass(frozen=True)
class MooncakeConfig:
    """Which master to join, and what this process brings.

    segment_bytes: memory that this process lends to the store; its pages go when it ends. 0: it lends none.
    timeout_s: longest wait for the master's answer. buffer_bytes: registered memory of each call, for seals
    and for pages outside the host pool. zero_copy: calls run on the caller's thread with the caller's pages.
    """

    master_server_address: str
    metadata_server: str = "P2PHANDSHAKE"
    local_hostname: str = "127.0.0.1"
    segment_bytes: int = 1 << 30
    buffer_bytes: int = 16 << 20
    protocol: str = "tcp"
    device_name: str = ""
    tenant_id: str = "default"
    replica_num: int = 1
    timeout_s: float = 2.0
    key_prefix: str = "hiradix"
    zero_copy: bool = True
    checksum: bool = True

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> MooncakeConfig:
        """Reads and checks the keys; raises ConfigError naming the bad one."""
        options, default = Options(values), MooncakeConfig("")
        options.accept("check_server", "master_metrics_port")
        config = MooncakeConfig(
            master_server_address=options.text("master_server_address", ""),
            metadata_server=options.text("metadata_server", default.metadata_server),
            local_hostname=options.text("local_hostname", default.local_hostname),
            segment_bytes=options.size("global_segment_size", default.segment_bytes),
            buffer_bytes=options.size("buffer_size", default.buffer_bytes),
            protocol=options.choice("protocol", default.protocol, PROTOCOLS),
            device_name=options.text("device_name", default.device_name),
            tenant_id=options.text("tenant_id", default.tenant_id),
            replica_num=options.integer("replica_num", default.replica_num, 1),
            timeout_s=options.seconds("timeout_s", default.timeout_s, 0.001, MAX_TIMEOUT_S),
            key_prefix=options.text("key_prefix", default.key_prefix),
            zero_copy=options.boolean("zero_copy", default.zero_copy),
            checksum=options.boolean("checksum", default.checksum),
        )
        options.finish("mooncake")
        if not config.master_server_address:
            raise ConfigError(f"{flag('master_server_address')} is required: host:port of mooncake_master")
        if _PREFIX.fullmatch(config.key_prefix) is None:
            raise ConfigError(f"{flag('key_prefix')} must be 1 to 64 of A-Z a-z 0-9 _ . -")
        return config
