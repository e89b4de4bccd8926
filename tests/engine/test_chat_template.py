"""Chat templates: as transformers renders them, and what one does that never ends is the request's error."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import transformers

from hiradix.apps.engine import RequestError, child_process
from hiradix.apps.engine.api import ChatPrompt
from hiradix.apps.engine.chat_template import ChatTemplate, TemplateError
from hiradix.apps.engine.tokenizer import Tokenizer
from tests.engine.checkpoints import write_tokenizer

HELLO = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "system", "content": "short \u20ac \U0001f600 <&>\n"},
    {"role": "user", "content": ' "quoted" \t'},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "half \ud83d and control \x00\x7f"},
]
FOR = "{% for m in messages %}"
END = "{% endfor %}"
LONG = "{% for i in range(99999) %}{% for j in range(99999) %}"


def rendered(template: str, messages: Any = HELLO, **limits: Any) -> str:
    chat = ChatTemplate(template, {"bos_token": "<s>", "add_generation_prompt": True}, **limits)
    try:
        return chat.render(messages)
    finally:
        chat.close()


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}" + FOR + "{{ m['role'] }}: {{ m.content | trim }}{{ eos_token }}\n" + END,
        FOR + "\n  {% if loop.first %}\n  first\n    {% endif %}\n{{- m.content }}\n  " + END + "\n",
        FOR + "{{ m | tojson }}{{ m | tojson(indent=2) }}{{ m.content | tojson(ensure_ascii=True) }}" + END,
        FOR + "{% if m.role == 'system' %}{% continue %}{% endif %}{{ loop.index0 }}{% break %}" + END,
        FOR + "{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}{{ x }}" + END,
        "{% set ns = namespace(n=0) %}" + FOR + "{% set ns.n = ns.n + 1 %}" + END + "{{ ns.n }}{{ tools }}",
        "{{ add_generation_prompt }}{{ tools is none }}{{ unknown is defined }}{{ messages | length }}",
        "{{ messages | map(attribute='role') | join(',') }}{{ messages[-1].content[:4] }}{{ 'a' * 5 }}",
        "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
        "{{ strftime_now('%Y') }}{{ '%05d' % 7 }}{{ 'x{}'.format(1) }}{{ documents }}",
        "{{ messages | selectattr('role', 'eq', 'user') | list }}",
    ],
)  # fmt: skip
def test_a_text_is_what_transformers_makes_of_it(template: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.chat_template = template
    theirs.save_pretrained(tmp_path)
    expected = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    ours = Tokenizer.find(str(tmp_path))
    assert ours is not None and ours._template is not None
    assert ours._template.render(TALK, {"add_generation_prompt": True}) == expected
    ours._template.close()


def nested(name: str) -> str:
    """A list of lists, 60 of each in the next: little memory, and 60 ** 11 numbers to look at."""
    levels = "".join(f"{{% set {name}{n} = [{','.join([f'{name}{n - 1}'] * 60)}] %}}" for n in range(1, 12))
    return f"{{% set {name}0 = [1] %}}{levels}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}", "{{ 1 % 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}", "{{ messages[0].x.y }}", "{{ range(10 ** 12) | list }}",
        "{{ 2 ** 10 ** 5 | string }}{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{% if %}", "{{ x",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% include 'x' %}", "{{ messages.append(1) }}",
    ],
)  # fmt: skip
def test_a_template_that_fails_refuses_the_messages(template: str) -> None:
    with pytest.raises(TemplateError, match="^refused them: "):
        rendered(template)


@pytest.mark.parametrize(
    "template",
    [
        LONG + "{% endfor %}{% endfor %}",
        LONG + "{{ loop.index }}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 7 | round(10 ** 9, 'ceil') }}",
        nested("a") + nested("b") + "{{ a11 == b11 }}",
    ],
    ids=["loops", "loops that write", "macros", "power", "filter", "comparison"],
)
def test_a_template_that_never_ends_is_ended_in_one_call_of_c_too(template: str) -> None:
    with pytest.raises(TemplateError, match="^ran for too long: not done within 0.5 s"):
        rendered(template, seconds=0.5)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 'a' ~ 'b' * 10 ** 10 }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ range(99999) | join('a' * 10 ** 6) }}",
        "{{ ('a' * 10 ** 5).replace('a', 'b' * 10 ** 6) }}",
        "{{ ('a' * 10 ** 5) | replace('a', 'b' * 10 ** 6) }}",
        "{{ '%10000000000d' % 7 }}",
        "{{ '%*d' % (10 ** 10, 7) }}",
        "{{ '{:10000000000d}'.format(7) }}",
        "{{ 'x' | center(10 ** 10) }}",
        "{{ ('a\n' * 10 ** 5) | indent(10 ** 6) }}",
        "{{ 'x'.ljust(10 ** 10) }}",
        "{{ messages | tojson(indent=10 ** 10) }}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}" + "{{ " + "d(" * 60 + "'a'" + ")" * 60 + " }}",
        "{% set x = 'a' * 10 ** 6 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
        nested("a") + "{{ a11 }}",
    ],
)  # fmt: skip
def test_a_template_that_takes_all_memory_has_a_limit(template: str) -> None:
    """Or takes too long for that, whichever comes first."""
    with pytest.raises(TemplateError, match="more than 256 MiB|too long|OverflowError|ValueError|characters"):
        rendered(template, seconds=5.0, memory_bytes=256 << 20, most_chars=1 << 20)


def test_a_text_has_a_length() -> None:
    with pytest.raises(TemplateError, match="refused them: a text of 1001 characters, at most 1000"):
        rendered("{{ 'a' * 1001 }}", most_chars=1000)
    assert rendered("{{ 'a' * 1000 }}", most_chars=1000) == "a" * 1000


def test_the_next_conversation_is_rendered_all_the_same() -> None:
    template = "{% if messages[0].content == 'x' %}{{ 9 ** (9 ** 9 * messages | length) }}{% endif %}ok"
    chat = ChatTemplate(template, {}, seconds=0.5)
    for _ in range(2):
        assert chat.render(HELLO) == "ok"
        with pytest.raises(TemplateError, match="too long"):
            chat.render([{"role": "user", "content": "x"}])
    chat.close()
    assert chat.render(HELLO) == "ok", "a process of its own again"
    chat.close()


def test_a_process_that_was_killed_is_started_again() -> None:
    chat = ChatTemplate("ok", {})
    assert chat.render(HELLO) == "ok" and chat._child._process is not None
    os.kill(chat._child._process.pid, signal.SIGTERM)
    chat._child._process.wait(60)
    assert chat.render(HELLO) == "ok"
    chat.close()


def test_one_that_is_being_killed_costs_no_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has ended, and that cannot be seen yet."""
    chat = ChatTemplate("ok", {})
    assert chat.render(HELLO) == "ok" and chat._child._process is not None
    chat._child._process.kill()
    chat._child._process.wait(60)
    monkeypatch.setattr(chat._child._process, "poll", lambda: None)
    assert chat.render(HELLO) == "ok"
    chat.close()


def test_conversations_of_several_threads_get_their_own_texts() -> None:
    chat, found = ChatTemplate(FOR + "{{ m.content }}" + END, {}), {}

    def render(number: int) -> None:
        found[number] = [chat.render([{"content": f"{number}" * 5000}]) for _ in range(20)]

    threads = [threading.Thread(target=render, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert found == {number: [f"{number}" * 5000] * 20 for number in range(4)}
    chat.close()


def test_a_long_conversation_passes() -> None:
    text = "\U0001f600" * 1_000_000
    assert rendered(FOR + "{{ m.content }}" + END, [{"content": text}]) == text


def test_no_process_outlives_its_template() -> None:
    chat = ChatTemplate("ok", {})
    assert chat.render(HELLO) == "ok" and chat._child._process is not None
    process = chat._child._process
    del chat
    gc.collect()
    assert process.returncode is not None


def test_a_process_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refused)
    with pytest.raises(TemplateError, match="cannot be run: no more processes"):
        rendered("ok")


def test_what_went_wrong_is_the_requests_error(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    (tmp_path / "chat_template.jinja").write_text("{{ 1 // 0 }}")
    config = json.loads(file.read_text())
    config.pop("chat_template", None)
    file.write_text(json.dumps(config))
    tokenizer = Tokenizer.find(str(tmp_path))
    assert tokenizer is not None and tokenizer.has_chat_template
    with pytest.raises(RequestError, match="^messages: the chat template refused them: ZeroDivisionError"):
        tokenizer.apply_chat(ChatPrompt(HELLO))


def test_it_is_served_beside_a_thousand_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard > 1200
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert rendered("ok") == "ok"
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_conversation_that_was_interrupted_leaves_no_text_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = ChatTemplate(FOR + "{{ m.content }}" + END, {})
    assert chat.render([{"content": "a"}]) == "a"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            chat.render([{"content": "b"}])
    assert chat.render([{"content": "c"}]) == "c"
    chat.close()


@pytest.mark.parametrize("content", ["", "x" * 1_000_000], ids=["short", "more than a pipe holds"])
def test_a_process_that_was_stopped_is_ended(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_PATIENCE_S", 0.1)
    chat = ChatTemplate("ok", {}, seconds=1)
    assert chat.render(HELLO) == "ok" and chat._child._process is not None
    os.kill(chat._child._process.pid, signal.SIGSTOP)
    with pytest.raises(TemplateError, match="^ran for too long: no answer within 1.1 s by the clock"):
        chat.render([{"content": content}])
    assert chat.render(HELLO) == "ok"
    chat.close()


def test_processes_that_are_killed_leave_no_files_open() -> None:
    chat = ChatTemplate("ok", {})
    chat.render(HELLO)
    num_files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert chat._child._process is not None
        chat._child._process.kill()
        chat._child._process.wait(60)
        assert chat.render(HELLO) == "ok"
    assert len(os.listdir("/proc/self/fd")) == num_files
    chat.close()


def test_a_process_that_is_killed_has_not_run_for_too_long() -> None:
    chat = ChatTemplate(LONG + END + END, {}, seconds=100)

    def kill() -> None:
        while (process := chat._child._process) is None:
            time.sleep(0.01)
        process.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(TemplateError, match="^ended its process with exit code -9"):
        chat.render(HELLO)
    thread.join()


def test_an_error_is_told_in_few_words() -> None:
    with pytest.raises(TemplateError) as caught:
        rendered("{{ raise_exception('no ' * 10 ** 6) }}")
    assert str(caught.value).startswith("refused them: no no ") and len(str(caught.value)) < 1100


def test_an_error_that_repeats_half_a_character_can_be_sent() -> None:
    with pytest.raises(TemplateError) as caught:
        rendered("{{ raise_exception(messages[0].content) }}", [{"content": "half \ud83d"}])
    assert str(caught.value) == "refused them: half \\ud83d"


def test_its_process_has_no_keys_and_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is for the server, which answers what it has begun."""
    monkeypatch.setenv("A_KEY", "sesam")
    chat = ChatTemplate("ok", {})
    chat.render(HELLO)
    assert chat._child._process is not None
    assert b"sesam" not in Path(f"/proc/{chat._child._process.pid}/environ").read_bytes()
    assert os.getpgid(chat._child._process.pid) != os.getpgid(0)
    chat.close()


def test_what_json_cannot_say_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for content in ({1}, b"x", deep):
        with pytest.raises(TemplateError, match="^takes what JSON can say: "):
            rendered("ok", [{"content": content}])
