"""Every flag of `hiradix serve` as data: the parser, `docs/flags.md` and the tests read this table only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hiradix.config import IO_BACKENDS, MEM_LAYOUTS, PREFETCH_POLICIES, RANK_TIMEOUT_S, WRITE_POLICIES

Status = Literal["implemented", "accepted", "refused"]
Section = Literal["Server", "Other upstream flags"]


@dataclass(frozen=True)
class Flag:
    """One command-line flag. `kind` None is a switch; one that `repeats` is a list.

    `accepted` takes the flag and `note` says why nothing changes; `refused` stops the start with `note` as
    the reason. `default_text` is what the table shows where the default is computed.
    """

    name: str
    note: str
    kind: Callable[[str], object] | None = None
    default: object = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    status: Status = "implemented"
    required: bool = False
    default_text: str = ""
    metavar: str = ""
    repeats: bool = False

    @property
    def dest(self) -> str:
        """The attribute argparse stores the value in."""
        return self.name.removeprefix("--").replace("-", "_")


_SERVER: tuple[Flag, ...] = (
    Flag(
        "--model-path",
        "Local directory of a transformers checkpoint (config, weights, tokenizer).",
        str,
        aliases=("--model",),
        required=True,
        metavar="DIR",
    ),
    Flag(
        "--served-model-name",
        "Name that requests use, and part of every storage key's fingerprint.",
        str,
        default_text="the model path",
        metavar="NAME",
    ),
    Flag(
        "--host",
        "Address to listen on; the default is reachable from this machine only.",
        str,
        "127.0.0.1",
        metavar="ADDRESS",
    ),
    Flag("--port", "TCP port; 0 takes a free one and the start-up line names it.", int, 30000),
    Flag(
        "--api-key",
        "Bearer key that every request needs, but /health, /ready and /metrics.",
        str,
        metavar="KEY",
    ),
    Flag(
        "--admin-api-key",
        "Bearer key for the admin endpoints; without it runtime attach, detach and clearing storage are off.",
        str,
        metavar="KEY",
    ),
    Flag("--api-key-file", "File with the api key; or the variable HIRADIX_API_KEY.", str, metavar="FILE"),
    Flag(
        "--admin-api-key-file",
        "File with the admin key; or the variable HIRADIX_ADMIN_API_KEY.",
        str,
        metavar="FILE",
    ),
    Flag(
        "--api-keys",
        "File of keys, each with a tenant: lines of both, or a JSON object of tenants by key. Tenants "
        "share no page; SIGHUP reads it again.",
        str,
        metavar="FILE",
    ),
    Flag("--require-cache-salt", "Requests without cache_salt are refused, but those of a tenant's key."),
    Flag(
        "--attachable",
        "Prepared configuration that PUT /hicache/storage-backend attaches by its NAME: a JSON object, or "
        "@path to a .json, .toml or .yaml file, with `backend` and that backend's keys. May be repeated.",
        str,
        metavar="NAME=JSON|@FILE",
        repeats=True,
    ),
    Flag(
        "--attach-allow",
        "What else may be attached over HTTP: backend=NAME[,path=FOLDER][,host=HOST[:PORT]][,file=FILE]"
        "[,url=s3://BUCKET/PREFIX]; see docs/http-api.md. May be repeated.",
        str,
        metavar="RULE",
        repeats=True,
    ),
    Flag("--log-level", "Verbosity of the log.", str, "info", ("debug", "info", "warning", "error")),
    Flag(
        "--keep-alive-timeout",
        "Seconds that a connection without a request is kept after an answer.",
        float,
        75.0,
        metavar="SECONDS",
    ),
    Flag(
        "--allowed-hosts",
        "Names, with commas between, by which requests without a key may call it, beside loopback ones. "
        "On a loopback address no others are taken, else any unless this is given; * is any.",
        str,
        metavar="NAMES",
    ),
    Flag(
        "--allowed-origins",
        "Origins, with commas between, of web pages that may send requests: http://HOST:PORT.",
        str,
        metavar="ORIGINS",
    ),
    Flag(
        "--shutdown-timeout",
        "Seconds from SIGTERM or SIGINT to the end of the process: running requests may finish in the first "
        "half, backups have what is left.",
        float,
        9.0,
        metavar="SECONDS",
    ),
    Flag(
        "--record-trace",
        "New file for the shape of the traffic, for `hiradix replay` and `hiradix size`: times, lengths and "
        "salted hashes of blocks, no content; at most 256 MiB of text, compressed as FILE.gz or FILE.zst. "
        "Beside an earlier recording, numbered.",
        str,
        metavar="FILE",
    ),
    Flag("--enable-metrics", "GET /metrics is always on.", status="accepted"),
    Flag("--extra-metric-labels", "JSON object of labels added to every metric.", str, metavar="JSON"),
    Flag(
        "--enable-cache-report", "Usage details with cached tokens per tier are always on.", status="accepted"
    ),
)

_ENGINE: tuple[Flag, ...] = (
    Flag("--device", "Torch device of the model and the device pool.", str, "cpu", metavar="DEVICE"),
    Flag("--dtype", "Type of weights and KV pages.", str, "float32", ("float32", "bfloat16", "float16")),
    Flag(
        "--context-length", "Most tokens of a prompt and its answer. Chooses a long rope's factors.", int,
        default_text="the model's",
    ),
    Flag("--max-total-tokens", "Size of the device pool in tokens.", int, 16384),
    Flag("--max-running-requests", "Most requests in one batch.", int, 16),
    Flag("--max-queued-requests", "Most requests that wait; further ones get 503.", int, 512),
    Flag(
        "--chunked-prefill-size",
        "Most tokens one prefill pass computes; -1 prefills whole prompts.",
        int,
        512,
    ),
    Flag(
        "--swa-full-tokens-ratio",
        "A pool of its own for layers with a sliding window: its tokens per token of the device pool.",
        float,
        default_text="one pool",
    ),
    Flag(
        "--max-mamba-cache-size",
        "Recurrent states on the device, of running requests and cached ones, in models that keep such.",
        int,
        default_text="4 per running request",
    ),
    Flag("--num-threads", "CPU threads of the model.", int, default_text="1"),
    Flag(
        "--tp-size",
        "Processes over which the model's heads are cut (tensor parallel, on the CPU); see docs/ranks.md.",
        int,
        1,
        aliases=("--tensor-parallel-size", "--tp"),
    ),
    Flag(
        "--dist-timeout",
        "Longest wait of one rank for another; after that, or when a rank dies, the server ends.",
        float,
        RANK_TIMEOUT_S,
        metavar="SECONDS",
    ),
    Flag("--random-seed", "Seed of sampled requests that bring none.", int, 0),
    Flag(
        "--check-invariants",
        "Assert the tree's invariants and page conservation after every step (slow; for tests).",
    ),
)

_CACHE: tuple[Flag, ...] = (
    Flag(
        "--enable-hierarchical-cache",
        "Turn the host tier on (and with a storage backend, the storage tier).",
        aliases=("--enable-hicache",),
    ),
    Flag("--disable-radix-cache", "No prefix reuse at all; excludes the hierarchical cache."),
    Flag("--page-size", "Tokens per page.", int, default_text="64 with the hierarchical cache, else 1"),
    Flag(
        "--hicache-ratio",
        "Host pool tokens per device pool token.",
        float,
        default_text="2.0, shrunk to what fits the host memory fraction",
    ),
    Flag(
        "--hicache-size",
        "Host pool size in GB of 1e9 bytes; above 0 it overrides the ratio.",
        float,
        0,
        metavar="GB",
    ),
    Flag(
        "--hicache-host-memory-fraction",
        "Share of free host memory the pool may take when neither ratio nor size is given, in (0, 1].",
        float,
        0.8,
    ),
    Flag(
        "--hicache-write-policy",
        "When pages are copied to the host: on first insert, on "
        "second hit (selective), or when evicted (write_back).",
        str,
        "write_through",
        WRITE_POLICIES,
    ),
    Flag(
        "--hicache-io-backend",
        "How pages are copied: one Triton kernel, direct copies, or the faster one by a measurement at "
        "start. On CPU all are torch copies. kernel_ascend is refused.",
        str,
        "kernel",
        IO_BACKENDS,
    ),
    Flag(
        "--hicache-mem-layout",
        "Layout of the host pool. page_first_kv_split and page_head are refused.",
        str,
        "page_first",
        MEM_LAYOUTS,
    ),
    Flag(
        "--hicache-host-memory-mode",
        "Use of host memory. buffer_only is refused.",
        str,
        "cache",
        ("cache", "buffer_only"),
    ),
    Flag(
        "--hicache-storage-backend",
        "Storage tier by registered name, such as disk; needs the hierarchical cache.",
        str,
        metavar="NAME",
    ),
    Flag(
        "--hicache-storage-required",
        "End the start, with exit status 2, when storage does not answer; without it the server starts and "
        "joins storage later. Wrong values end it either way. Extra-config key hicache_storage_required.",
    ),
    Flag(
        "--hicache-storage-prefetch-policy",
        "How long a request waits for pages from storage.",
        str,
        "timeout",
        PREFETCH_POLICIES,
    ),
    Flag(
        "--hicache-storage-identity",
        "Pages in storage go by this label; whether the same weights computed them is not looked at.",
        str,
        metavar="LABEL",
    ),
    Flag(
        "--hicache-no-regret",
        "Do not load or fetch what is predicted to take longer than computing it again.",
        str,
        "on",
        ("on", "off"),
    ),
    Flag(
        "--hicache-storage-backend-extra-config",
        "JSON object, or @path to a .json, .toml "
        "or .yaml file, with prefetch settings and the backend's keys.",
        str,
        metavar="JSON|@FILE",
    ),
    Flag(
        "--file-storage-path",
        "Directory of the file or disk backend (extra-config key file_storage_path, disk_storage_path).",
        str,
        metavar="DIR",
    ),
    Flag(
        "--radix-eviction-policy",
        "Order in which pages are evicted; two with a comma between: device, host.",
        str,
        "ghd",
        metavar="NAME",
    ),
    Flag(
        "--radix-eviction-policy-config",
        "JSON object of the eviction policy's parameters.",
        str,
        metavar="JSON",
    ),
    Flag(
        "--kv-events-config",
        "Publish which blocks are in which tier over ZeroMQ: a JSON object with SGLang's keys; "
        "see docs/kv-events.md.",
        str,
        metavar="JSON|@FILE",
    ),
    Flag("--disable-hicache-numa-detect", "The process is never bound to a NUMA node.", status="accepted"),
)


def _refused(name: str, note: str, value: bool = False) -> Flag:
    return Flag(name, note, str if value else None, status="refused")


_REFUSED: tuple[Flag, ...] = (
    _refused("--hicache-storage-prefetch-retry-poll-interval", "storage is asked once per request", True),
    _refused("--hicache-storage-prefetch-retry-max-attempts", "storage is asked once per request", True),
    _refused(
        "--radix-cache-backend", "the cache of this server is hiradix's own; plugins are SGLang's", True
    ),
    _refused("--enable-session-radix-cache", "sessions reuse prefixes through the one radix tree"),
    _refused("--enable-unified-memory", "device and host pools are separate"),
    _refused("--enable-page-major-kv-layout", "the device pool is laid out by layer"),
    _refused("--enable-hisparse", "sparse attention offload is not supported"),
    _refused("--hisparse-config", "sparse attention offload is not supported", True),
    _refused("--enable-lmcache", "it replaces this cache; use SGLang's own server for it"),
    _refused("--lmcache-config-file", "it replaces this cache; use SGLang's own server for it", True),
    _refused("--enable-flexkv", "it replaces this cache; use SGLang's own server for it"),
    _refused("--flexkv-config-file", "it replaces this cache; use SGLang's own server for it", True),
    _refused("--enable-unified-cache-external-linker", "storage is reached through the host tier"),
    _refused("--unified-cache-external-linker-backend", "storage is reached through the host tier", True),
    _refused("--unified-cache-external-linker-config", "storage is reached through the host tier", True),
    _refused("--enable-linker-mla-dedup", "storage is reached through the host tier"),
    _refused(
        "--disaggregation-decode-enable-offload-kvcache", "this server does not split prefill and decode"
    ),
    _refused("--disaggregation-decode-enable-radix-cache", "this server does not split prefill and decode"),
    _refused("--load-publish-endpoint", "load is read from /metrics", True),
)

SECTIONS: dict[str, tuple[Flag, ...]] = {
    "Server": _SERVER,
    "Engine": _ENGINE,
    "Cache": _CACHE,
    "Refused": _REFUSED,
}
FLAGS: tuple[Flag, ...] = tuple(flag for flags in SECTIONS.values() for flag in flags)


def flags_markdown() -> str:
    """The tables of `docs/flags.md`, one per section, in the order of the table above."""
    lines: list[str] = []
    header = ["| flag | values | default | status | meaning |", "|---|---|---|---|---|"]
    for section, flags in SECTIONS.items():
        lines += [f"## {section}", "", *header, *(_row(flag) for flag in flags), ""]
    return "\n".join(lines)


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in (flag.name, *flag.aliases))
    kind = {None: "switch", int: "integer", float: "number", str: "text"}[flag.kind]  # type: ignore[index]
    values = ", ".join(f"`{choice}`" for choice in flag.choices) or kind
    values += ", repeated" if flag.repeats else ""
    default = flag.default_text or ("required" if flag.required else "off" if flag.kind is None else "none")
    if flag.default is not None:
        default = f"`{flag.default}`"
    if flag.status == "refused":
        default = ""
    return f"| {names} | {values} | {default} | {flag.status} | {flag.note} |".replace("|@", "\\|@")
