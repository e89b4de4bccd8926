"""vLLM's hints of a request, its `kv_hints` (0.33 and newer): actions of ours are wishes, others are refused.

vLLM says how an envelope travels: `protocol_version`, `message_id`, and `actions` with `action_id`,
`action_type`, `action_version` and a `payload`. What an action means it leaves to whoever carries it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from hiradix.intents import Intent, Receipt, Selector, Verb
from hiradix.intents.http import MAX_OF_REQUEST, answers_of_request

PREFIX: Final = "hiradix."
VERSION: Final = "1"
TYPES: Final = tuple(PREFIX + verb.value for verb in Verb)


def answers_of_hints(
    envelope: Any, selector: Selector, submit: Callable[[Intent], Receipt]
) -> list[dict[str, Any]]:
    """Submit the actions of a request's envelope, about its prompt, and return their answers; None: no envelope.

    An action `hiradix.VERB` of version 1 is a wish, its payload the wish's other fields.
    """
    actions = [] if envelope is None else list(envelope.actions)
    answers = []
    for action in actions[:MAX_OF_REQUEST]:
        answers.append({"action_id": f"{action.action_id:.256}", **_answer(action, selector, submit)})
    if len(actions) > MAX_OF_REQUEST:
        answers.append(
            {"message": f"kv_hints: at most {MAX_OF_REQUEST} actions are taken", "field": "kv_hints"}
        )
    return answers


def _answer(action: Any, selector: Selector, submit: Callable[[Intent], Receipt]) -> dict[str, Any]:
    kind = action.action_type
    if kind not in TYPES:
        why = f"action_type: {kind!r:.64} is not known here; known: {', '.join(TYPES)}"
        return {"message": why, "field": "action_type"}
    if action.action_version != VERSION:
        why = f"action_version: {action.action_version!r:.64} of {kind} is not known here, but {VERSION!r}"
        return {"message": why, "field": "action_version"}
    wish = {**action.payload, "verb": kind.removeprefix(PREFIX)}
    [answer] = answers_of_request(wish, selector, submit)
    return answer
