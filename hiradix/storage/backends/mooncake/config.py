"""Keys of the `mooncake` backend. They are SGLang's where it has them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hiradix.errors import ConfigError
from hiradix.settings import MAX_COUNT, MAX_TIMEOUT_S, OPEN, OverHttp, Setting, Type, field_of, setting
from hiradix.storage.kit.options import CHECKSUM, flag, read_keys

PROTOCOLS = ("tcp", "rdma")
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")


@dataclass(frozen=True)
class MooncakeConfig:
    """Settings of the Mooncake backend: the master to join, and the memory that this process brings."""

    ALSO: ClassVar = (
        Setting("check_server", Type.BOOL, None, "SGLang's, without effect", over_http=OPEN),
        Setting("master_metrics_port", Type.INTEGER, None, "SGLang's, without effect", over_http=OPEN),
    )

    master_server_address: str = setting(
        "master_server_address",
        Type.ADDRESS,
        "",
        "host:port of `mooncake_master`",
        default_text="required",
        over_http=OPEN,
    )
    metadata_server: str = setting(
        "metadata_server",
        Type.ADDRESS,
        "P2PHANDSHAKE",
        "or the URL of a metadata server",
        over_http=OPEN,
    )
    local_hostname: str = setting(
        "local_hostname",
        Type.ADDRESS,
        "127.0.0.1",
        "the address under which other members reach this process",
        over_http=OPEN,
    )
    segment_bytes: int = setting(
        "global_segment_size",
        Type.SIZE,
        1 << 30,
        "memory this process lends to the store; its pages go when the process ends. 0: none",
        over_http=OverHttp(float(64 << 30)),
    )
    buffer_bytes: int = setting(
        "buffer_size",
        Type.SIZE,
        16 << 20,
        "registered memory of each call, for seals and for pages that are not in the host pool",
        over_http=OverHttp(float(1 << 30)),
    )
    protocol: str = setting(
        "protocol",
        Type.TEXT,
        "tcp",
        "`rdma` is refused where there is no device (the library would silently use TCP)",
        choices=PROTOCOLS,
        over_http=OPEN,
    )
    device_name: str = setting("device_name", Type.TEXT, "", "the RDMA device")
    tenant_id: str = setting("tenant_id", Type.TEXT, "default", "Mooncake's tenant", over_http=OPEN)
    replica_num: int = setting(
        "replica_num",
        Type.INTEGER,
        1,
        "copies of each page",
        minimum=1,
        maximum=MAX_COUNT,
        over_http=OPEN,
    )
    timeout_s: float = setting(
        "timeout_s",
        Type.SECONDS,
        2.0,
        "longest wait for the master; counts for the process, and not where `MC_RPC_TIMEOUT_MS` is set",
        minimum=0.001,
        maximum=MAX_TIMEOUT_S,
        over_http=OPEN,
    )
    key_prefix: str = setting(
        "key_prefix",
        Type.TEXT,
        "hiradix",
        "objects are `<key_prefix>-<fingerprint>-<page>`",
        over_http=OPEN,
    )
    zero_copy: bool = setting(
        "zero_copy",
        Type.BOOL,
        True,
        "calls run on the caller's thread and move the host pool's own pages",
        over_http=OPEN,
    )
    checksum: bool = field_of(CHECKSUM)

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> MooncakeConfig:
        """Reads and checks the keys; raises ConfigError naming the bad one."""
        config = read_keys(MooncakeConfig, values, "mooncake")
        if not config.master_server_address:
            raise ConfigError(f"{flag('master_server_address')} is required: host:port of mooncake_master")
        if _PREFIX.fullmatch(config.key_prefix) is None:
            raise ConfigError(f"{flag('key_prefix')} must be 1 to 64 of A-Z a-z 0-9 _ . -")
        return config
