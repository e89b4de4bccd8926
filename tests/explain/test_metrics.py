"""What /metrics, which is open, says of why tokens were computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from hiradix.apps.engine.api import Output, Usage
from hiradix.apps.server.metrics import RequestMetrics
from hiradix.explain import Explanation, Reason, Span, TokenSource


def test_metrics_do_not_say_that_another_tenant_has_sent_the_same() -> None:
    spans = (
        Span(0, 64, TokenSource.COMPUTED, Reason.OTHER_NAMESPACE),
        Span(64, 65, TokenSource.COMPUTED, Reason.BOUNDARY),
    )
    usage = Usage(65, 1, explanation=Explanation("r", spans))
    output = Output("r", (1,), usage, finish_reason="stop")
    metrics = RequestMetrics("model", {})

    async def serve() -> None:
        async def outputs() -> AsyncIterator[Output]:
            yield output

        async for _ in metrics.observed(outputs()):
            pass

    asyncio.run(serve())
    text = metrics.exposition(None).decode()
    lines = [line for line in text.splitlines() if line.startswith("hiradix:computed_tokens_total{")]
    assert "other_namespace" not in text
    counts = {line.partition('reason="')[2].partition('"')[0]: float(line.split()[-1]) for line in lines}
    assert counts == {"never_seen": 64.0, "boundary": 1.0}
