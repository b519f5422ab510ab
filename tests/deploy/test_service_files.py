"""The files for Compose and Prometheus name commands, flags and figures that there are."""

import re
from importlib import import_module
from typing import Any

import pytest
import typer
import yaml

from coordinator.cli.app import command_line
from proto.errors import ConfigurationError
from proto.installation import ROOT


def read(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / name).read_text())
    return config


SERVICES = read("compose.yaml")["services"]
OURS = sorted(name for name, one in SERVICES.items() if one["image"] == "slipstream")


def parsed(words: list[str]) -> dict[str, Any]:
    """What a command makes of its arguments; it is not run."""
    name, *arguments = words
    group: Any = typer.main.get_command(command_line((), ""))
    found: dict[str, Any] = group.commands[name].make_context(name, arguments).params
    return found


@pytest.mark.parametrize("name", OURS)
def test_a_container_starts_what_the_command_line_knows(name: str) -> None:
    found = parsed(SERVICES[name]["command"])
    assert found["port"] == 8000
    assert str(found["api_key_file"]) == "/run/secrets/api-keys"
    with pytest.raises((typer.Exit, typer.TyperException, ConfigurationError)):
        parsed([*SERVICES[name]["command"], "--nonsense"])


def test_there_are_two_servers_and_a_router_that_leads_to_them() -> None:
    assert OURS == ["router", "server-1", "server-2"]
    urls = parsed(SERVICES["router"]["command"])["urls"]
    assert list(urls) == ["http://server-1:8000", "http://server-2:8000"]
    for name in OURS:
        assert SERVICES[name]["healthcheck"]["test"][-1] == "http://127.0.0.1:8000/health"


def test_what_is_mounted_is_beside_the_file() -> None:
    config = read("compose.yaml")
    for one in config["configs"].values():
        assert (ROOT / "deploy" / one["file"]).exists()


def test_alarms_are_of_figures_that_a_server_has() -> None:
    source = (ROOT / "coordinator/http/figures.py").read_text()
    rules = [rule for group in read("alarms.yaml")["groups"] for rule in group["rules"]]
    names = [
        name for rule in rules for name in re.findall(r"(?:slipstream|vllm):\w+", rule["expr"])
    ]
    assert len(names) == len(rules) == 3
    for name in names:
        assert f'"{name.removesuffix("_total")}"' in source


def test_prometheus_reads_the_servers_and_the_router() -> None:
    jobs = read("prometheus.yaml")["scrape_configs"]
    hosts = [target for job in jobs for one in job["static_configs"] for target in one["targets"]]
    assert sorted(hosts) == [f"{name}:8000" for name in OURS]
    assert read("prometheus.yaml")["rule_files"] == ["alarms.yaml"]


def test_the_ray_service_says_what_serve_knows() -> None:
    """Its arguments are flags of `serve`, in the values that they take; Ray's version is ours."""
    service = read("ray-service.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(import_module(module), name))
    words = [word for key, one in application["args"].items() for word in (f"--{key}", str(one))]
    found = parsed(["serve", "--ray-serve", *words])
    assert found["replicas"] == 2
    assert found["max_replicas"] == 4
    lock = (ROOT / "requirements" / "lock.txt").read_text()
    assert f"ray=={service['spec']['rayClusterConfig']['rayVersion']}\n" in lock
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == application["args"]["replica-gpus"]
    assert group["maxReplicas"] == application["args"]["max-replicas"]
