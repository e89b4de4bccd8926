"""Settings are said by flags, variables and a file, in this order: the same ones make the same server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hiradix import sources
from hiradix.adapters.sglang import settings as sglang_settings
from hiradix.adapters.vllm import settings as vllm_settings
from hiradix.apps.lmcache.toml_text import toml
from hiradix.apps.server.flag_table import TABLE
from hiradix.apps.server.flags import parse_serve_args, resolve_serve
from hiradix.config_files import read_config_file
from hiradix.errors import ConfigError
from hiradix.settings import MAX_COUNT, NUMBERS, OBJECTS, PREFIX, Setting, Type
from hiradix.sources import CONFIG, OTHER_VARIABLES, SettingSource, resolve
from tests.project.repo import ROOT

BY_NAME = {one.name: one for one in TABLE if one is not CONFIG}
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=12)
LABELS = st.dictionaries(st.from_regex(r"[a-z]{3}_[a-z]{1,8}", fullmatch=True), TEXT, max_size=3)
KEY = st.from_regex(r"[A-Za-z0-9]{8,20}", fullmatch=True)
STORES = st.dictionaries(
    st.from_regex(r"cold[a-z]{1,5}", fullmatch=True),
    st.fixed_dictionaries({"backend": st.just("file"), "file_storage_path": st.just("/cold")}),
    max_size=2,
)
SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "enable_hierarchical_cache": st.just(True),
    "disable_radix_cache": st.just(False),
    "host": st.just("127.0.0.1"),
    "allowed_hosts": st.sampled_from(["a.example", "a.example,b.example", "*"]),
    "allowed_origins": st.sampled_from(["http://a.example:1", "http://a.example,http://b.example:2"]),
    "attachable": STORES,
    "attach_allow": st.lists(
        st.sampled_from(["backend=disk,path=/a", "backend=redis,host=h:1"]), unique=True
    ),
    "extra_metric_labels": LABELS,
    "hicache_ratio": st.floats(0.1, 100),
    "hicache_host_memory_fraction": st.floats(0.1, 1),
    "swa_full_tokens_ratio": st.floats(0.1, 1),
    "dist_timeout": st.floats(0.1, 100),
    "hicache_storage_backend": st.sampled_from(["file", "disk"]),
    "hicache_storage_backend_extra_config": st.fixed_dictionaries(
        {"prefetch_threshold": st.integers(0, 9999), "max_size": st.sampled_from(["9GiB", 1 << 33])},
        optional={"deadline_s": st.floats(0.1, 9), "checksum": st.booleans()},
    ),
    "radix_eviction_policy": st.sampled_from(["lru", "lfu", "ghd"]),
    "radix_eviction_policy_config": st.just({}),
    "kv_events_config": st.fixed_dictionaries({"publisher": st.sampled_from(["null", "zmq"])}),
    "api_key": KEY,
    "admin_api_key": KEY,
}
HIDDEN = re.compile(r"k\dsecret")
PHASES = (Phase.explicit, Phase.generate)  # to shrink eighty values takes minutes
EXCLUDE_EACH_OTHER = [("api_key", "api_key_file"), ("admin_api_key", "admin_api_key_file")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("settings")
    (found / "config.json").write_text("{}")
    for name, text in {"key": "of-file", "admin": "of-admin-file", "tenants": "key-a alice\n"}.items():
        (found / name).write_text(text)
        (found / name).chmod(0o600)
    return found


def values_of(one: Setting, folder: Path) -> st.SearchStrategy[Any]:
    """Values that the setting takes, as a file has them."""
    paths = {"model_path": ".", "api_key_file": "key", "admin_api_key_file": "admin", "api_keys": "tenants"}
    if one.name in paths:
        return st.just(str(folder / paths[one.name]))
    if one.name in SPECIAL:
        return SPECIAL[one.name]
    if one.type is Type.BOOL:
        return st.booleans()
    if one.choices:
        return st.sampled_from([choice for choice in one.choices if choice not in one.refused])
    if one.type in (Type.INTEGER, Type.SIZE):
        return st.integers(int(one.minimum), int(one.maximum or MAX_COUNT))
    if one.type in NUMBERS:
        return st.floats(one.minimum, min(one.maximum or 1e6, 1e6))
    assert one.type in (Type.TEXT, Type.LABEL, Type.FILE, Type.FOLDER), f"{one.name}: how is one drawn?"
    return TEXT.map(lambda text: f"/{text}") if one.type in (Type.FILE, Type.FOLDER) else TEXT


@st.composite
def whole_configs(draw: st.DrawFn, folder: Path) -> dict[str, Any]:
    """A value for each setting there is, but for one of those that exclude each other."""
    left_out = {draw(st.sampled_from(pair)) for pair in EXCLUDE_EACH_OTHER}
    return {name: draw(values_of(one, folder)) for name, one in BY_NAME.items() if name not in left_out}


def as_text(one: Setting, value: Any) -> str:
    if one.type in OBJECTS:
        return json.dumps(value)
    if one.type is Type.LIST:
        return ";".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if one.type in (*NUMBERS, Type.SIZE) else value


def as_flags(values: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in values.items():
        one = BY_NAME[name]
        if one.type is Type.BOOL:
            found.append(one.flag if value else f"--no-{one.flag.removeprefix('--')}")
        elif one.type is Type.LIST:
            found += [f"{one.flag}={item}" for item in value]
        elif one.type is Type.STORES:
            found += [f"{one.flag}={key}={json.dumps(item)}" for key, item in value.items()]
        else:
            found.append(f"{one.flag}={as_text(one, value)}")
    return found


def as_variables(values: Mapping[str, Any]) -> dict[str, str]:
    texts = {BY_NAME[name].variable: as_text(BY_NAME[name], value) for name, value in values.items()}
    return {name: text for name, text in texts.items() if text}


WRITERS = {".toml": toml, ".yaml": partial(yaml.safe_dump, sort_keys=False), ".json": json.dumps}


def as_file(values: Mapping[str, Any], path: Path) -> list[str]:
    path.write_text(WRITERS[path.suffix](values), encoding="utf-8")  # type: ignore[operator]
    path.chmod(0o600)
    return ["--config", str(path)]


def test_each_setting_said_by_each_source_makes_the_same_server(folder: Path) -> None:
    @settings(max_examples=12, deadline=None, phases=PHASES, suppress_health_check=[HealthCheck.too_slow])
    @given(whole_configs(folder), st.sampled_from(sorted(WRITERS)))
    def agree(values: dict[str, Any], suffix: str) -> None:
        assert len(values) == len(BY_NAME) - len(EXCLUDE_EACH_OTHER)
        by_flags = parse_serve_args(as_flags(values), {})
        by_variables = parse_serve_args([], as_variables(values))
        by_file = parse_serve_args(as_file(values, folder / f"all{suffix}"), {})
        assert by_flags == by_variables == by_file

    agree()


def test_who_says_it_sooner_counts(folder: Path) -> None:
    """Of random settings, each said by random sources with values of its own; the model is a table."""
    orders = (SettingSource.FLAG, SettingSource.ENVIRONMENT, SettingSource.FILE)

    @settings(max_examples=12, deadline=None)
    @given(st.data())
    def agree(data: st.DataObject) -> None:
        said: dict[SettingSource, dict[str, Any]] = {source: {} for source in orders}
        names = data.draw(st.lists(st.sampled_from(sorted(BY_NAME)), unique=True, max_size=8))
        for name in names:
            for source in data.draw(st.sets(st.sampled_from(orders))):
                said[source][name] = data.draw(values_of(BY_NAME[name], folder))
        arguments = as_flags(said[SettingSource.FLAG]) + as_file(
            said[SettingSource.FILE], folder / "some.toml"
        )
        variables = as_variables(said[SettingSource.ENVIRONMENT])
        found = resolve_serve(arguments, variables)
        assert found.problems == ()
        for name, one in BY_NAME.items():
            told = [
                source
                for source in orders
                if name in said[source]
                # What has no items cannot be said by flags that are repeated, nor by an empty variable.
                and not (
                    source is SettingSource.FLAG
                    and one.type in (Type.LIST, Type.STORES)
                    and not said[source][name]
                )
                and not (source is SettingSource.ENVIRONMENT and one.variable not in variables)
            ]
            assert found.source(name) == (told[0] if told else SettingSource.DEFAULT), name
            if told:
                value = said[told[0]][name]
                assert found[name] == one.check(name, value)
                assert len(found.overruled.get(name, ())) == len(told) - 1

    agree()


def test_a_value_has_the_place_it_is_from(folder: Path) -> None:
    path = folder / "places.yaml"
    path.write_text("# a comment\nport: 1\n\nhost: 127.0.0.1\nhicache-no-regret: on\n")
    found = resolve_serve(["--config", str(path), "--log-level", "debug"], {"HIRADIX_PORT": "2"})
    places = {name: given.place for name, given in found.given.items()}
    assert places == {
        "config": "--config", "port": "HIRADIX_PORT", "log_level": "--log-level", "host": f"{path}:4",
        "hicache_no_regret": f"{path}:5",
    }  # fmt: skip
    assert [given.place for given in found.overruled["port"]] == [f"{path}:2"]
    assert (found["port"], found["hicache_no_regret"]) == (2, "on")


def test_a_file_can_be_named_by_a_variable_and_the_flag_counts(folder: Path) -> None:
    for name, port in (("one", 1), ("two", 2)):
        (folder / f"{name}.toml").write_text(f"port = {port}")
    environment = {"HIRADIX_CONFIG": str(folder / "one.toml")}
    assert resolve_serve([], environment)["port"] == 1
    assert resolve_serve(["--config", str(folder / "two.toml")], environment)["port"] == 2


def test_a_path_said_sooner_counts_before_the_backends_own_key(folder: Path) -> None:
    path = folder / "paths.toml"
    path.write_text(
        f'model_path = "{folder}"\nenable_hierarchical_cache = true\nhicache_storage_backend = "disk"\n'
        '[hicache_storage_backend_extra_config]\ndisk_storage_path = "/of-file"\n'
    )
    for more, expected in (([], "/of-file"), (["--file-storage-path", "/of-flag"], "/of-flag")):
        cache = parse_serve_args(["--config", str(path), *more], {}).engine.cache
        assert cache.hicache_storage_backend_extra_config.backend["disk_storage_path"] == expected


# -- mistakes -----------------------------------------------------------------------------

ON = 'enable_hierarchical_cache = true\nhicache_storage_backend = "disk"\n'
STORE = ON + "[hicache_storage_backend_extra_config]\n"
MISTAKES: list[tuple[list[str], dict[str, str], str, str]] = [
    # flags, variables, lines of the file behind model_path, the message ({} is the file)
    (["--prot=1"], {}, "", "--prot is no flag of hiradix serve; did you mean --port?"),
    (["--port=many"], {}, "", "--port must be int, got 'many'"),
    (["--port"], {}, "", "--port: expected one argument"),
    (["--port=70000"], {}, "", "--port must be <= 65535, got 70000"),
    (["--log-level=loud"], {}, "",
     "--log-level: unknown value 'loud', expected one of debug, info, warning, error"),
    (["k1secret"], {}, "", "argument 3 belongs to no flag; the model's folder is given by --model-path"),
    (["--api-kye=k1secret"], {}, "", "--api-kye is no flag of hiradix serve; did you mean --api-key?"),
    (["--api-key="], {}, "", "--api-key: a key must be non-empty printable ASCII text without spaces around it"),
    (["--api-key=k1secret", "--api-key-file=f"], {}, "",
     "--api-key and --api-key-file exclude each other: give one"),
    (["--attachable={}"], {}, "", "--attachable: expected NAME=JSON or NAME=@FILE"),
    (["--enable-hisparse"], {}, "",
     "--enable-hisparse is not supported: sparse attention offload is not supported"),
    ([], {"HIRADIX_PROT": "1"}, "", "HIRADIX_PROT is no variable of hiradix; did you mean HIRADIX_PORT?"),
    ([], {"HIRADIX_PORT": "many"}, "", "HIRADIX_PORT must be int, got 'many'"),
    ([], {"HIRADIX_PORT": ""}, "", "HIRADIX_PORT is empty: unset it, or give a value"),
    ([], {"HIRADIX_API_KEY": ""}, "", "HIRADIX_API_KEY is empty: unset it, or give a value"),
    ([], {"HIRADIX_ENABLE_HIERARCHICAL_CACHE": "maybe"}, "",
     "HIRADIX_ENABLE_HIERARCHICAL_CACHE must be bool (true or false), got 'maybe'"),
    ([], {"HIRADIX_API_KEY": "k1 secrét"}, "",
     "HIRADIX_API_KEY: a key must be non-empty printable ASCII text without spaces around it"),
    ([], {"HIRADIX_HICACHE_STORAGE_BACKEND": "disk"}, "",
     "--hicache-storage-backend disk needs --enable-hierarchical-cache "
     "(--hicache-storage-backend is set by HIRADIX_HICACHE_STORAGE_BACKEND)"),
    ([], {"HIRADIX_KV_EVENTS_CONFIG": "{"}, "",
     "HIRADIX_KV_EVENTS_CONFIG: the text (1 characters) is not valid: Expecting property name enclosed in "
     "double quotes: line 1 column 2 (char 1)"),
    ([], {}, "prot = 1", "{}:2: 'prot' is no setting; did you mean port?"),
    ([], {}, 'port = "1"', "{}:2: port must be int, got str"),
    ([], {}, "enable_hierarchical_cache = 1", "{}:2: enable_hierarchical_cache must be bool, got int"),
    ([], {}, "api_key = 17171", "{}:2: api_key must be text, got '***'"),
    ([], {}, 'tp = 1\ntp_size = 1', "{}:3: tp_size is given twice, as tp, too"),
    ([], {}, "port = 1\nport = 2", "--config: {} is not valid: Cannot overwrite a value (at line 3, column 9)"),
    ([], {}, 'config = "other.toml"', "{}:2: config: a file names no other file"),
    ([], {}, "chunk_size = 256",
     "{}:2: chunk_size is LMCache's: it became page_size; what is stored and found is a page; 64 tokens are "
     "found more often than 256; inside vLLM it is `--block-size`; `hiradix config migrate FILE` prints the "
     "whole"),
    ([], {}, "enable_hisparse = true",
     "{}:2: enable_hisparse is not supported: sparse attention offload is not supported"),
    ([], {}, "enable_hierarchical_cache = true\ndisable_radix_cache = true",
     "The arguments enable-hierarchical-cache and disable-radix-cache are mutually exclusive and cannot be "
     "used at the same time. Please use only one of them."),
    ([], {}, STORE + "max_sise = 1",
     "--hicache-storage-backend-extra-config: max_sise is no key of storage backend disk; did you mean "
     "max_size? (--hicache-storage-backend-extra-config is set by {}:4)"),
    ([], {}, STORE + 'max_size = "9 apples"',
     '--hicache-storage-backend-extra-config: max_size: expected bytes or a size such as "64GiB", got '
     "'9 apples' (--hicache-storage-backend-extra-config is set by {}:4)"),
    ([], {}, ON.replace("disk", "tier"),
     "--hicache-storage-backend-extra-config: upper is required by storage backend tier"),
    ([], {}, ON.replace("disk", "redis") + '[hicache_storage_backend_extra_config]\npassword_env = "NO_SUCH"',
     "--hicache-storage-backend-extra-config: password_env: there is no variable 'NO_SUCH', or it is empty "
     "(--hicache-storage-backend-extra-config is set by {}:4)"),
    ([], {}, "[hicache_storage_backend_extra_config]\nprefetch_threshold = true",
     "--hicache-storage-backend-extra-config: prefetch_threshold must be int, got bool "
     "(--hicache-storage-backend-extra-config is set by {}:2)"),
    ([], {}, "prot = 1\nhosd = 1",
     "{}:2: 'prot' is no setting; did you mean port? (and 1 more: hiradix config check)"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "variables", "lines", "message"), MISTAKES)
def test_a_mistake_gets_its_message(
    flags: list[str], variables: dict[str, str], lines: str, message: str, folder: Path
) -> None:
    path = folder / "mistake.toml"
    path.write_text(f'model_path = "{folder}"\n{lines}\n')
    path.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        parse_serve_args(["--config", str(path), *flags], variables)
    assert str(caught.value) == message.replace("{}", str(path), 1) if lines else message
    assert not HIDDEN.search(str(caught.value))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "api_key: k1secret\n  port: 1"),
        ("a.yaml", "api_key: 'k1secret"),
        ("a.yaml", "api_key: !!python/object/apply:os.system ['k1secret']"),
        ("a.yaml", "api_key: *k1secret"),
        ("a.yaml", "api_key: k1secret\x07"),
        ("a.yaml", "api_key: k1secret\napi_key: k1secret"),
        ("a.json", '{"api_key": "k1secret", "api_key": "k1secret"}'),
        ("a.json", '{"api_key": "k1secret"'),
        ("a.json", '["k1secret"]'),
        ("a.toml", 'api_key = "k1secret'),
        ("a.toml", "api_key = k1secret"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_not_repeated(name: str, text: str, folder: Path) -> None:
    (folder / name).write_text(text)
    found = resolve_serve(["--config", str(folder / name)], {})
    (problem,) = found.problems
    assert problem.startswith("--config: ") and name in problem
    assert not HIDDEN.search(problem) and "\n" not in problem


def test_a_yaml_file_that_grows_without_end_is_refused(folder: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    (folder / "bomb.yaml").write_text("\n".join(lines))
    (problem,) = resolve_serve(["--config", str(folder / "bomb.yaml")], {}).problems
    assert "more than 100000 values" in problem


def test_of_many_unknown_names_the_first_ones_are_told_what_they_may_mean(folder: Path) -> None:
    path = folder / "many.json"
    path.write_text(json.dumps({f"hicache_size{number}": 1 for number in range(99)}, indent=1))
    problems = resolve_serve(["--config", str(path)], {}).problems
    assert [problem.endswith("; did you mean hicache_size?") for problem in problems] == [True] * 50 + [
        False
    ] * 49
    assert problems[98] == f"{path}:100: 'hicache_size98' is no setting"


def test_a_guest_compares_so_many_names_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_MAX_COMPARED", 4)
    wrong = {f"HIRADIX_A{number}": "x" for number in range(3)} | {"HIRADIX_ATTACH_ALOW": "x"}
    found = resolve(sglang_settings.OWN, {}, wrong, is_guest=True)
    assert len(found.notes) == 3 and "did you mean HIRADIX_ATTACH_ALLOW?" in found.problems[0]
    found = resolve(sglang_settings.OWN, {}, wrong | {"HIRADIX_A3": "x"}, is_guest=True)
    assert len(found.notes) == 5 and not found.problems


@pytest.mark.parametrize(("suffix", "text"), [
    (".json", '\n{"a": {"c": "b"},\n\n "b": [\n"\\\\", "c"],\n"\\u0063"\n: 1}'),
    (".toml", '\na = {c = "b"}\n\n"b" = [\n"c"]\n\'c\'  = 1\n[d.e]\n[[f]]\n'),
    (".yaml", '\na: {c: b}\n\n"b": [\nc]\n? c\n: 1\n'),
])  # fmt: skip
def test_a_key_has_the_line_on_which_it_begins(suffix: str, text: str, folder: Path) -> None:
    path = folder / f"lines{suffix}"
    path.write_text(text)
    lines = read_config_file(path).lines
    expected = {
        ".json": {"a": 2, "b": 4, "c": 6},
        ".toml": {"a": 2, "b": 4, "c": 6, "d": 7, "f": 8},
        ".yaml": {"a": 2, "b": 4, "c": 6},
    }
    assert lines == expected[suffix]


def test_secrets_come_from_a_file_or_a_variable_and_are_shown_nowhere(folder: Path) -> None:
    path = folder / "secret.toml"
    path.write_text(
        f'model_path = "{folder}"\nadmin_api_key = "k2secret"\n{ON.replace("disk", "tier")}'
        '[hicache_storage_backend_extra_config]\nupper = {backend = "disk"}\n'
        'lower = {backend = "redis", password = "k3secret"}\n'
    )
    found = parse_serve_args(["--config", str(path)], {"HIRADIX_API_KEY": "k1secret"})
    assert (found.api_key, found.admin_api_key) == ("k1secret", "k2secret")
    keys = found.engine.cache.hicache_storage_backend_extra_config.backend
    assert keys["lower"]["password"] == "k3secret"
    assert not HIDDEN.search(repr(found))
    (note,) = [note for note in found.notes if "may read" in note]
    assert "admin_api_key" in note
    resolved = resolve_serve(["--config", str(path)], {"HIRADIX_API_KEY": "k1secret"})
    assert not HIDDEN.search(repr(resolved))


# -- variables ----------------------------------------------------------------------------


def test_variables_of_kubernetes_are_not_ours() -> None:
    """It sets these in each container beside a Service called `hiradix`."""
    environment = {
        "HIRADIX_PORT": "tcp://10.0.0.1:30000", "HIRADIX_SERVICE_HOST": "10.0.0.1",
        "HIRADIX_SERVICE_PORT": "30000", "HIRADIX_SERVICE_PORT_HTTP": "30000",
        "HIRADIX_PORT_30000_TCP": "tcp://10.0.0.1:30000", "HIRADIX_PORT_30000_TCP_PROTO": "tcp",
        "HIRADIX_PORT_30000_TCP_PORT": "30000", "HIRADIX_PORT_30000_TCP_ADDR": "10.0.0.1",
        "HIRADIX_ENGINE_PORT": "tcp://10.0.0.2:1", "HIRADIX_ENGINE_SERVICE_HOST": "10.0.0.2",
    }  # fmt: skip
    found = resolve_serve([], environment | {"HIRADIX_TEST_SEED": "1"})  # and one of a test's
    assert (found.problems, dict(found.given)) == ((), {})


def test_each_variable_of_the_repository_is_known() -> None:
    """Those that the build, the tests and the benchmarks read stand in one list."""
    known = {one.variable for one in (*TABLE, *vllm_settings.own_settings())} | OTHER_VARIABLES
    paths = [ROOT / "Makefile", ROOT / "setup.py", *(ROOT / ".ci").iterdir()]
    paths += [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    with_slips = ("test_sources.py", "test_engine_settings.py")
    texts = [
        path.read_text(encoding="utf-8") for path in paths if path.is_file() and path.name not in with_slips
    ]
    names = {name for text in texts for name in re.findall(rf"\b{PREFIX}[A-Z_]*[A-Z]\b", text)}
    unknown = {name for name in names - known if not name.startswith(f"{PREFIX}TEST_")}
    assert sorted(unknown) == [], f"begin its name with {PREFIX}TEST_, or add it to OTHER_VARIABLES"
    assert sorted(OTHER_VARIABLES - names) == [], "no longer read"


@pytest.mark.parametrize("own", [sglang_settings.OWN, vllm_settings.table()], ids=["sglang", "vllm"])
def test_names_of_others_are_no_slips_of_an_engines_own(own: tuple[Setting, ...]) -> None:
    """So a file or an environment that several programs share is taken by each of them."""
    mine = {one.name for one in own}
    others = [one for one in (*TABLE, *vllm_settings.table()) if one.name not in mine and one is not CONFIG]
    assert resolve(own, {}, {one.variable: "x" for one in others}, is_guest=True).problems == ()


def test_a_slip_of_an_engines_own_name_is_an_error() -> None:
    found = resolve(sglang_settings.OWN, {}, {"HIRADIX_ATTACH_ALOW": "x"}, is_guest=True)
    assert found.problems == (
        "HIRADIX_ATTACH_ALOW is no variable of hiradix; did you mean HIRADIX_ATTACH_ALLOW?",
    )
    other = resolve(sglang_settings.OWN, {}, {"HIRADIX_PORT": "1"}, is_guest=True)
    assert (other.problems, other.notes) == (
        (),
        ("HIRADIX_PORT is no variable of hiradix that is read here",),
    )
