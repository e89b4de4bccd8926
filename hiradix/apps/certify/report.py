"""A run as a table for people, a record for programs, and requests to send again."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hiradix.apps.certify.client import Reply
from hiradix.apps.certify.examiner import Examiner
from hiradix.apps.certify.judge import Likeness
from hiradix.apps.certify.record import Arm, Finding, State

EVIDENCE = {
    "usage": "the answers' usage",
    "metrics": "the server's metrics",
    "time": "the time to the first token",
    "": "nothing",
}
COLD = {
    "salt": "a cache_salt of its own",
    "flush": "a flush before it",
    "first": "being sent for the first time",
}
RIGHT, WRONG, UNDECIDED = 0, 1, 2
MOST_SHOWN = 5


def unmet(arms: Mapping[str, Arm], required: Sequence[str]) -> list[str]:
    """Reasons why the run is no success although nothing is wrong, a phrase each."""
    out = [f"{arm.name}: {arm.reason}" for arm in arms.values() if arm.state is State.FAILED]
    for name in ("device", *required):
        arm = arms[name]
        if arm.state not in (State.RIGHT, State.WRONG, State.FAILED):
            out.append(f"{name}: {arm.state.value}, {arm.reason}")
    return list(dict.fromkeys(out))


def status(examiner: Examiner, arms: Mapping[str, Arm], required: Sequence[str]) -> int:
    """The exit status: 1 for anything wrong, 2 where too little could be judged."""
    if any(arm.findings for arm in arms.values()):
        return WRONG
    return UNDECIDED if examiner.judge.is_blind or unmet(arms, required) else RIGHT


def table(arms: Mapping[str, Arm]) -> str:
    """A line per arm."""
    lines = ["arm asked hits cached equal ties wrong moved verdict why".split()]
    for arm in arms.values():
        tokens = " ".join(f"{tier} {number}" for tier, number in arm.tokens.items() if number) or "-"
        ties = arm.kinds[Likeness.TIE] + arm.kinds[Likeness.TEXT]
        numbers = (arm.asked, arm.hits, tokens, arm.kinds[Likeness.EQUAL], ties, len(arm.findings))
        moved = f"{arm.moved:.1e}" if arm.asked else "-"
        lines.append([arm.name, *map(str, numbers), moved, arm.state.value, arm.reason])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
    return "\n".join(
        "  ".join(
            [cell.ljust(width) for cell, width in zip(line, widths, strict=False)] + [line[-1]]
        ).rstrip()
        for line in lines
    )


def heading(examiner: Examiner) -> str:
    """The lines of the report that say how answers were judged."""
    able, judge = examiner.server.able, examiner.judge
    asked, copied = examiner.copied
    by = (
        f"log probabilities: a token that is ahead by over {judge.most_tie:.2g} must win, "
        f"none may move by over {judge.most_drift:.2g} (noise {judge.noise.logprob:.2g} x {judge.factor:g})"
        if able.num_top
        else "repeated answers: the server tells no log probabilities"
    )
    return "\n".join(
        [
            f"server     {examiner.server.url}, {able.kind or 'unknown'}, {able.api}, "
            f"model {examiner.server.model}",
            f"run        {examiner.settings.run}, prompts of about {examiner.settings.prompt_tokens} tokens, "
            f"{copied} of {asked} facts copied",
            f"hits by    {EVIDENCE[examiner.evidence]}",
            f"cold by    {COLD[examiner.reference_by]}",
            f"judged by  {by}",
        ]
    )


def verdict(examiner: Examiner, arms: Mapping[str, Arm], required: Sequence[str]) -> str:
    """The last line."""
    match status(examiner, arms, required):
        case 1:
            faults = sorted({f.fault.value for arm in arms.values() for f in arm.findings})
            return f"WRONG: {', '.join(faults)}"
        case 2:
            noisy = ["cold answers differ too much among themselves"] if examiner.judge.is_blind else []
            return f"NOT JUDGED: {'; '.join([*noisy, *unmet(arms, required)])}"
    proven = [arm.name for arm in arms.values() if arm.state is State.RIGHT]
    open_ones = [arm.name for arm in arms.values() if arm.state is not State.RIGHT]
    rest = f"; not shown: {', '.join(open_ones)}" if open_ones else ""
    return f"RIGHT: {', '.join(proven)}{rest}"


def record(examiner: Examiner, arms: Mapping[str, Arm], required: Sequence[str]) -> dict[str, Any]:
    """The run as JSON."""
    judge, able = examiner.judge, examiner.server.able
    return {
        "url": examiner.server.url,
        "model": examiner.server.model,
        "server": able.kind,
        "api": able.api,
        "run": examiner.settings.run,
        "prompt_tokens": examiner.settings.prompt_tokens,
        "hits_by": examiner.evidence,
        "cold_by": examiner.reference_by,
        "noise": {
            "logprob": judge.noise.logprob,
            "num_tokens": judge.noise.num_tokens,
            "num_answers": judge.noise.num_answers,
            "num_other_texts": judge.noise.num_texts,
        },
        "factor": judge.factor,
        "most_tie": judge.most_tie,
        "most_drift": judge.most_drift,
        "facts_asked": examiner.copied[0],
        "facts_copied": examiner.copied[1],
        "arms": [_arm(arm) for arm in arms.values()],
        "findings": [_finding(finding) for arm in arms.values() for finding in arm.findings],
        "verdict": verdict(examiner, arms, required),
        "status": status(examiner, arms, required),
    }


def _arm(arm: Arm) -> dict[str, Any]:
    kinds = {kind.value: arm.kinds[kind] for kind in Likeness}
    return {
        "name": arm.name, "what": arm.what, "state": arm.state.value, "reason": arm.reason, "asked": arm.asked,
        "hits": arm.hits, "cached_tokens": dict(arm.tokens), "answers": kinds, "moved": _number(arm.moved),
        "without_cold_answer": arm.without, "refused": arm.refused, "failed": arm.failures,
    }  # fmt: skip


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "arm": finding.arm, "fault": finding.fault.value, "prompt": finding.prompt, "what": finding.sentence,
        "steps": list(finding.steps), "got": _reply(finding.got),
        "reference": None if finding.reference is None else _reply(finding.reference),
    }  # fmt: skip


def _number(value: float) -> float | str:
    """JSON has no infinities and no NaN: they are told by name."""
    return value if math.isfinite(value) else str(value)


def _reply(reply: Reply) -> dict[str, Any]:
    tokens = [
        {"token": t.name, "logprob": _number(t.logprob), "top": {k: _number(v) for k, v in t.top.items()}}
        for t in reply.tokens
    ]
    return {
        "url": reply.path, "body": dict(reply.body), "text": reply.text, "tokens": tokens,
        "prompt_tokens": reply.prompt_tokens, "cached": reply.cached,
    }  # fmt: skip


def reproduction(findings: Sequence[Finding], folder: Path, has_key: bool) -> str:
    """Write the requests of the first findings into `folder`; lines that say how to send them again."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i, finding in enumerate(findings[:MOST_SHOWN], 1):
        lines.append(f"\n{i}. {finding.arm}: {finding.fault.value}: {finding.sentence}")
        lines += [f"   before: {step}" for step in finding.steps[:-1]]
        pairs = [("got", finding.got), ("reference", finding.reference)]
        for name, reply in pairs:
            if reply is None:
                continue
            file = folder / f"{i}-{name}.json"
            file.write_text(json.dumps(reply.body, indent=1) + "\n", encoding="utf-8")
            lines.append(f"   {name}: {reply.text[:60]!r}\n     {_curl(reply.path, file, has_key)}")
        if finding.reference is not None and "cache_salt" in finding.reference.body:
            lines.append(
                "   the reference is cold under a cache_salt that was never used: give it another one"
            )
    if len(findings) > MOST_SHOWN:
        lines.append(f"\nand {len(findings) - MOST_SHOWN} more, which --json has")
    return "\n".join(lines)


def _curl(url: str, file: Path, has_key: bool) -> str:
    key = """ -H "Authorization: Bearer $API_KEY\"""" if has_key else ""
    return f"curl -s {shlex.quote(url)} -H 'Content-Type: application/json'{key} -d @{shlex.quote(str(file))}"
