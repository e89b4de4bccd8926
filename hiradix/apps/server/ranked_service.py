"""The reference engine on several ranks as the HTTP server's `Service`.

Storage is opened, released and cleared by every rank at the same step, on the engine's thread: requests wait
for it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

from hiradix.apps.engine.engine import Engine
from hiradix.apps.server.engine_service import ADMIN_TIMEOUT_S, NOT_CLEARED, EngineService
from hiradix.apps.server.service import NO_HOST_TIER, AdminResult, AttachRequest


class RankedService(EngineService):
    """Serves the reference engine that runs on several ranks. With `wait_s`, an operation waits so long for
    an idle engine."""

    async def attach(self, request: AttachRequest) -> AdminResult:
        """Attach storage or change policies, on all ranks or none; refused unless idle."""

        def attach(engine: Engine) -> tuple[bool, str]:
            return engine.attach_storage(
                request.backend, request.extra_config_text, request.prefetch_policy, request.write_policy
            )

        return await self._on_all_ranks(attach, request.wait_s)

    async def detach(self, wait_s: float | None = None) -> AdminResult:
        """Detach storage on all ranks; refused unless idle."""
        return await self._on_all_ranks(lambda engine: engine.detach_storage(), wait_s)

    async def clear_storage(self) -> AdminResult:
        """Delete the pages of all ranks in storage."""

        def clear(engine: Engine) -> tuple[bool, str]:
            done = engine.clear_storage()
            return done, "" if done else NOT_CLEARED

        return await self._on_all_ranks(clear, None)

    async def _on_all_ranks(
        self, do: Callable[[Engine], tuple[bool, str]], wait_s: float | None
    ) -> AdminResult:
        if not self._engine.config.cache.enable_hierarchical_cache:
            return AdminResult(False, NO_HOST_TIER)
        if wait_s is None:
            return AdminResult(*await self._thread.acall(do, ADMIN_TIMEOUT_S))
        try:
            return AdminResult(*await self._thread.acall(do, wait_s, when_idle=True))
        except TimeoutError:
            return AdminResult(False, f"The engine was not idle within {wait_s:g} s.")
