"""What can be said of the compose files without an engine; `make test-compose` does the rest."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = (REPOSITORY / "compose" / "Dockerfile").read_text(encoding="utf-8")
COMPOSE_TEXT = (REPOSITORY / "compose" / "docker-compose.yml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
MODULES = {"router": "router", "prefill": "prefill_node", "decode": "decode_node"}


def test_services() -> None:
    assert set(SERVICES) == {"redis", "router", "prefill", "decode"}


def test_only_the_router_is_published_and_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"router": ["127.0.0.1:${BATON_PORT:-8000}:8000"]}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_is_confined_and_watched(name: str) -> None:
    service = SERVICES[name]
    assert service["init"] is True
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["healthcheck"]["test"]
    assert "container_name" not in service, "a fixed name forbids --scale"


def test_nodes_are_on_a_network_without_a_way_out() -> None:
    assert COMPOSE["networks"]["plane"] == {"internal": True}
    assert {name for name, service in SERVICES.items() if service["networks"] != ["plane"]} == {"router"}


def test_both_compose_versions_accept_the_top_level() -> None:
    assert "version" not in COMPOSE  # v2 warns
    assert "name" not in COMPOSE  # 1.29 refuses


@pytest.mark.parametrize("name", ["BATON_SECRET", "REDIS_PASSWORD", "BATON_MODEL_DIR"])
def test_secrets_and_model_have_no_default(name: str) -> None:
    uses = re.findall(r"(?<!\$)\$\{" + name + r"\b(..)", COMPOSE_TEXT)
    assert uses
    assert set(uses) == {":?"}


def test_no_secret_is_on_a_command_line() -> None:
    for service in SERVICES.values():
        command = " ".join(service["command"]).replace("$$", "")
        assert "${BATON_SECRET" not in command
        assert "${REDIS_PASSWORD" not in command


def test_settings_are_explained() -> None:
    example = (REPOSITORY / "compose" / ".env.example").read_text(encoding="utf-8")
    for name in ("BATON_SECRET", "REDIS_PASSWORD", "BATON_MODEL_DIR", "BATON_MODEL_NAME", "BATON_PORT"):
        assert re.search(rf"^{name}=", example, re.MULTILINE)
    filled = re.findall(r"^(?:BATON_SECRET|REDIS_PASSWORD)=(.+)$", example, re.MULTILINE)
    assert not filled, "an example secret would be used"


@pytest.mark.parametrize("service", sorted(MODULES))
def test_services_know_the_options_they_are_given(service: str) -> None:
    command = SERVICES[service]["command"]
    assert command[:3] == ["python", "-m", MODULES[service]]
    told = subprocess.run(
        [sys.executable, "-m", MODULES[service], "--help"], capture_output=True, text=True, timeout=120, cwd=REPOSITORY
    )
    assert told.returncode == 0, told.stderr
    unknown = [option for option in (part.split("=")[0] for part in command[3:]) if option not in told.stdout]
    assert not unknown


def test_dockerfile_has_both_targets_and_needs_no_buildkit() -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert {"router", "node"} <= set(stages)
    for buildkit_only in ("--mount", "# syntax", "<<EOF", "COPY --link", "COPY --chmod"):
        assert buildkit_only not in DOCKERFILE


def test_router_target_installs_no_torch() -> None:
    assert "torch" not in _requirements("router")
    assert "torch" in _requirements("node")


def test_build_context_holds_every_package_and_little_else() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    packages = set(project["tool"]["setuptools"]["packages"])
    assert "*" in lines
    assert kept == {package.split(".")[0] for package in packages} | {
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "compose/requirements.py",
    }


def _requirements(extra: str) -> list[str]:
    command = [sys.executable, "compose/requirements.py", extra]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY, check=True)
    return told.stdout.split("\n")
