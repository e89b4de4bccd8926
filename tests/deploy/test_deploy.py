"""What is in deploy/ goes with this hiradix: metrics, settings, probes; and the tools that read it accept it.

`promtool` and `systemd-analyze` are asked where they are installed.
"""

from __future__ import annotations

import configparser
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from hiradix.apps.server import auth, metrics
from hiradix.apps.server.flags import resolve_serve
from tests.project.repo import ROOT

DEPLOY = ROOT / "deploy"
OTHERS = {"up"}
NAME = re.compile(r"\b(?:sglang|hiradix):[a-z0-9_]+|\bup\b")


def text(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def accepts(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and not done.stderr.strip(), done.stdout + done.stderr


def expressions() -> Iterator[str]:
    for group in yaml.safe_load(text("alerts.yml"))["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in json.loads(text("grafana.json"))["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def exposed() -> set[str]:
    """Names that our server has: those that the product's table names, in the forms they are exposed in."""
    named = set(re.findall(r'"((?:sglang|hiradix):\w+)"', inspect.getsource(metrics)))
    endings = ("", "_total", "_bucket", "_sum", "_count")
    return {name.removesuffix("_total") + ending for name in named for ending in endings}


def test_alerts_and_dashboard_ask_for_figures_there_are() -> None:
    asked = {name for one in expressions() for name in NAME.findall(one)}
    assert asked - exposed() - OTHERS == set() and len(asked) > 20


def test_promtool_accepts_the_rules_and_what_fires() -> None:
    accepts(tool("promtool"), "check", "rules", str(DEPLOY / "alerts.yml"))
    accepts(tool("promtool"), "test", "rules", str(DEPLOY / "alerts_test.yml"))


def test_promtool_accepts_the_dashboards_expressions(tmp_path: Path) -> None:
    rules = [
        {"record": f"r{number}", "expr": one.replace("$__rate_interval", "1m").replace("$instance", "a")}
        for number, one in enumerate(expressions())
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    accepts(tool("promtool"), "check", "rules", str(tmp_path / "rules.yml"))


def test_the_dashboard_is_whole() -> None:
    board = json.loads(text("grafana.json"))
    ids = [panel["id"] for panel in board["panels"]]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(ids)) == len(ids) and len(set(places)) == len(places)
    names = {one["name"] for one in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(board["panels"])))
    assert used == names


# -- what starts the server ---------------------------------------------------------------


def settings_problems(
    environment: Mapping[str, str], arguments: list[str], folder: Path, file: str = ""
) -> Any:
    if file:
        (folder / "serve.toml").write_text(file)
        arguments = [*arguments, "--config", str(folder / "serve.toml")]
    return resolve_serve(arguments, environment).problems


def test_the_unit_says_settings_there_are(tmp_path: Path) -> None:
    lines = [line for line in text("hiradix.service").splitlines() if not line.startswith("#")]
    pairs = [
        line.removeprefix("Environment=").split("=", 1) for line in lines if line.startswith("Environment=")
    ]
    (start,) = [line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")]
    command = shlex.split(start)
    assert command[1:3] == ["serve", "--config"]
    assert settings_problems(dict(pairs), [], tmp_path) == ()
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    stop_s = resolve_serve([], {})["shutdown_timeout"]
    assert float(values["TimeoutStopSec"]) > stop_s and values["RestartPreventExitStatus"] == "2"


def test_a_file_of_settings_says_all_of_the_units(tmp_path: Path) -> None:
    """A variable of the unit's would overrule /etc/hiradix/serve.toml."""
    unit = text("hiradix.service")
    assert "HIRADIX_" not in unit
    assert settings_problems({}, [], tmp_path, text("service.toml")) == ()
    found = resolve_serve(["--config", str(tmp_path / "serve.toml")], {})
    assert found["file_storage_path"] == "/var/cache/hiradix" and "\nCacheDirectory=hiradix\n" in unit
    key = found["admin_api_key_file"].removeprefix("/run/credentials/hiradix.service/")
    assert f"\nLoadCredential={key}:" in unit


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "hiradix.service"
    unit.write_text(text("hiradix.service").replace("/srv/hiradix/bin/hiradix", sys.executable))
    accepts(tool("systemd-analyze"), "verify", str(unit))


def test_the_image_says_settings_there_are(tmp_path: Path) -> None:
    file = text("Dockerfile").replace("\\\n", " ")
    (said,) = [line for line in file.splitlines() if line.startswith("ENV ")]
    pairs = dict(part.split("=", 1) for part in said.split()[1:])
    pairs.pop("PATH")
    copied = re.search(r"^COPY deploy/(\S+) (\S+)$", file, re.MULTILINE)
    assert copied is not None and pairs.pop("HIRADIX_CONFIG") == copied[2]
    assert settings_problems(pairs, [], tmp_path, text(copied[1])) == ()
    port = resolve_serve([], pairs)["port"]
    assert f"EXPOSE {port}" in file and f"127.0.0.1:{port}/health" in file
    assert re.search(r"^USER (?!root)", file, re.MULTILINE) and '["hiradix", "serve"]' in file
    extras = re.search(r"'\.\[([a-z0-9,-]+)\]'", file)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extras is not None and set(extras[1].split(",")) <= set(project["optional-dependencies"])


def test_a_file_of_settings_overrules_what_the_image_says(tmp_path: Path) -> None:
    """Variables go before files: what the image says by them, a ConfigMap says in vain."""
    (said,) = [
        line for line in text("Dockerfile").replace("\\\n", " ").splitlines() if line.startswith("ENV ")
    ]
    pairs = dict(part.split("=", 1) for part in said.split()[1:])
    own = tmp_path / "serve.toml"
    own.write_text('model_path = "/m"\nhicache_storage_backend = "redis"\nlog_format = "text"\n')
    pairs["HIRADIX_CONFIG"] = str(own)
    found = resolve_serve([], pairs)
    asked = {name: found[name] for name in ("model_path", "hicache_storage_backend", "log_format")}
    assert asked == {"model_path": "/m", "hicache_storage_backend": "redis", "log_format": "text"}
    assert found["file_storage_path"] is None and found["host"] == "0.0.0.0"


def test_the_manifests_fit_each_other_and_the_server(tmp_path: Path) -> None:
    found = {one["kind"]: one for one in yaml.safe_load_all(text("kubernetes.yaml"))}
    pod = found["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {one["name"]: one.get("value", "of-a-secret") for one in container["env"]}
    config = found["ConfigMap"]["data"]["serve.toml"]
    del environment["HIRADIX_CONFIG"]
    assert settings_problems(environment, [], tmp_path, config) == ()
    settings = resolve_serve(["--config", str(tmp_path / "serve.toml")], environment)
    assert (
        container["ports"][0]["containerPort"]
        == settings["port"]
        == found["Service"]["spec"]["ports"][0]["port"]
    )
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in auth.PROBES
    assert pod["terminationGracePeriodSeconds"] > settings["shutdown_timeout"]
    assert pod["enableServiceLinks"] is False
    mounts = {one["name"] for one in container["volumeMounts"]}
    claims = {one["metadata"]["name"] for one in found["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    assert mounts == {one["name"] for one in pod["volumes"]} | claims
    assert found["Service"]["spec"]["selector"] == found["StatefulSet"]["spec"]["selector"]["matchLabels"]
    assert (
        settings["hicache_size"] * 1e9
        < int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    )


def test_the_configuration_of_the_unit_is_an_ini_file() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text("hiradix.service"))
    assert parser.sections() == ["Unit", "Service", "Install"]
