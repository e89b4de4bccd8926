"""The ranks of a tensor parallel engine as processes: rank 0 leads, the others do what it does.

    rank 0   LeadingEngine: every call that changes something is told to the others, then done
    others   follow(): do each call they are told of, until rank 0 closes

So all ranks make the same engine calls in the same order, and with them the same collective calls.
"""

from __future__ import annotations

import logging
import multiprocessing
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hiradix.apps.engine.api import EngineConfig, Output, PromptWish, SamplingParams, Scope
from hiradix.apps.engine.engine import Engine
from hiradix.config import RANK_TIMEOUT_S, ExtraConfig, HiCacheConfig
from hiradix.errors import CacheError, ConfigError
from hiradix.intents.http import IntentBody, IntentReply
from hiradix.intents.limits import IntentLimits
from hiradix.transfer.process_group import Membership, ProcessGroup, RankLost

logger = logging.getLogger(__name__)

JOIN_S = 10.0


class LeadingEngine(Engine):
    """Rank 0's engine. Owns the group and the other ranks' processes; `close` ends them."""

    def __init__(self, config: EngineConfig, group: ProcessGroup, others: Sequence[BaseProcess] = ()):
        self._group = group
        self._others = tuple(others)
        group.share(_plain(config))
        super().__init__(config, group=group)

    def _tell(self, call: str, *arguments: Any) -> None:
        self._group.share([call, *arguments])

    def add_request(
        self, rid: str, prompt_ids: Sequence[int], params: SamplingParams, scope: Scope | None = None
    ) -> None:
        self._tell("add_request", rid, list(prompt_ids), asdict(params), asdict(scope or Scope()))
        super().add_request(rid, prompt_ids, params, scope)

    def abort(self, rid: str) -> bool:
        self._tell("abort", rid)
        return super().abort(rid)

    def step(self) -> list[Output]:
        self._tell("step")
        return super().step()

    def flush(self) -> bool:
        self._tell("flush")
        return super().flush()

    def attach_storage(
        self, name: str, extra_config_json: str | None = None,
        prefetch_policy: str | None = None, write_policy: str | None = None,
    ) -> tuple[bool, str]:  # fmt: skip
        self._tell("attach_storage", name, extra_config_json, prefetch_policy, write_policy)
        return super().attach_storage(name, extra_config_json, prefetch_policy, write_policy)

    def detach_storage(self) -> tuple[bool, str]:
        self._tell("detach_storage")
        return super().detach_storage()

    def clear_storage(self) -> bool:
        self._tell("clear_storage")
        return super().clear_storage()

    def hint(self, prompt_ids: Sequence[int], scope: Scope) -> int:
        self._tell("hint", list(prompt_ids), asdict(scope))
        return super().hint(prompt_ids, scope)

    def answer_intent(self, method: str, path: str, body: IntentBody, asked_by: str) -> IntentReply:
        self._tell("answer_intent", method, path, body, asked_by)
        return super().answer_intent(method, path, body, asked_by)

    def drain(self, timeout_s: float) -> bool:
        self._tell("drain", timeout_s)
        return super().drain(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        try:
            self._tell("close")
        except RankLost as lost:
            logger.warning("closing without the other ranks: %s", lost)
        super().close(timeout_s)
        self._group.close()
        _end(self._others)


def follow(engine: Engine, group: ProcessGroup) -> None:
    """Do what rank 0 does until it closes; raises RankLost when it, or another rank, is gone."""
    calls: dict[str, Callable[..., object]] = {
        "add_request": lambda rid, ids, params, scope: engine.add_request(
            rid, ids, _params(params), _scope(scope)
        ),
        "abort": engine.abort, "step": engine.step, "flush": engine.flush,
        "attach_storage": engine.attach_storage, "detach_storage": engine.detach_storage,
        "clear_storage": engine.clear_storage, "drain": engine.drain,
        "answer_intent": engine.answer_intent,
        "hint": lambda ids, scope: engine.hint(ids, _scope(scope)),
    }  # fmt: skip
    while True:
        name, *arguments = group.share(None)
        if name == "close":
            return
        try:
            calls[name](*arguments)
        except RankLost:
            raise
        except CacheError as refused:  # rank 0's caller has been told the same
            logger.debug("%s refused: %s", name, refused)


def _params(fields: dict[str, Any]) -> SamplingParams:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    lists["logit_bias"] = tuple((token, bias) for token, bias in lists.get("logit_bias", ()))
    return SamplingParams(**{**fields, **lists})


def _scope(fields: dict[str, Any]) -> Scope:
    return Scope(**{**fields, "wishes": tuple(PromptWish(**wish) for wish in fields["wishes"])})


def _plain(value: Any) -> Any:
    """A configuration as JSON has it."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return {name: _plain(one) for name, one in value.items()} if isinstance(value, Mapping) else value


def _config_of(plain: dict[str, Any]) -> EngineConfig:
    """The configuration that `_plain` made `plain` of."""
    cache = dict(plain["cache"])
    extra = ExtraConfig(**cache.pop("hicache_storage_backend_extra_config"))
    config = HiCacheConfig(**cache, hicache_storage_backend_extra_config=extra)
    return EngineConfig(**{**plain, "cache": config, "intents": IntentLimits(**plain["intents"])})


def _run_follower(member: Membership) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is for rank 0, which tells this one
    try:
        group = ProcessGroup(member)
        engine = Engine(_config_of(group.share(None)), group=group)
    except CacheError as error:  # the other ranks hear of it, too
        logger.error("rank %d of %d cannot start: %s", member.rank, member.size, error)
        raise SystemExit(1) from error
    try:
        follow(engine, group)
    except RankLost as lost:
        logger.error("%s", lost)
        raise SystemExit(1) from lost
    finally:
        group.close()
        engine.close()


def build_engine(config: EngineConfig, tp_size: int = 1, timeout_s: float = RANK_TIMEOUT_S) -> Engine:
    """The engine of `config`, over `tp_size` processes of this machine, of which this one is rank 0.

    The other ranks are children of this process and end with it. A rank that dies, or does not answer for
    `timeout_s`, makes the engine's next call raise RankLost. ConfigError when the model cannot be cut so.
    """
    if tp_size == 1:
        return Engine(config)
    from hiradix.apps.engine.model import load_config
    from hiradix.apps.engine.tensor_parallel import check_divisible

    if tp_size < 1:
        raise ConfigError(f"tp_size={tp_size}: must be at least 1")
    if config.device != "cpu":
        raise ConfigError(f"tp_size={tp_size}: the reference engine cuts models on the CPU only")
    check_divisible(load_config(config.model_path), tp_size)
    folder = tempfile.mkdtemp(prefix="hiradix-ranks-")
    address = f"file://{Path(folder) / 'meet'}"
    members = [Membership(rank, tp_size, address, timeout_s) for rank in range(tp_size)]
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=_run_follower, args=(member,), daemon=True) for member in members[1:]]
    try:
        for process in others:
            process.start()
        return LeadingEngine(config, ProcessGroup(members[0]), others)
    except BaseException:
        _end(others, timeout_s=0.0)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end(others: Sequence[BaseProcess], timeout_s: float = JOIN_S) -> None:
    """Wait for the other ranks to end by themselves, then end them."""
    for process in others:
        if process.pid is not None:
            process.join(timeout_s)
            if process.is_alive():
                process.kill()
                process.join(timeout_s)
