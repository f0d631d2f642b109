"""Base images where no registry answers: a Debian from debootstrap, and one more with the wheels pip may use.

Wheels are fetched here, with whatever pip configuration this machine has, so that the containers need neither
network nor configuration: the builds run with no network at all.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from testing.engine import Engine, install
from testing.shell import REPOSITORY, run, say, succeeds, timed

PYTHON_IMAGE: Final = "python:3.11-slim"
REDIS_IMAGE: Final = "redis:7-alpine"
DEBIAN_IMAGE: Final = "baton-test-debian"
WHEELS_IMAGE: Final = "baton-test-wheels"

_SUITE: Final = "bookworm"
_PYTHON: Final = "3.11"  # of the suite
# pip reads version markers for the Python it runs on; redis wants this one below 3.11.3, and Debian has 3.11.2.
_ALSO: Final = "async-timeout\n"
_PACKAGES: Final = "python3,python3-venv,ca-certificates,redis-server,g++"
_UNUSED: Final = ("./var/cache/apt/*", "./var/lib/apt/lists/*", "./usr/share/doc/*", "./usr/share/man/*")
_PIP_CONFIG: Final = "[global]\\nno-index = true\\nfind-links = /wheels\\n"


@dataclass(frozen=True, slots=True)
class BaseImages:
    """Settings of the compose file that say what to build from."""

    settings: dict[str, str]


def base_images(engine: Engine, cache: Path) -> BaseImages:
    """The registry's images if they can be had, else ours. Raises :class:`testing.shell.StepError`."""
    if all(_available(engine, image) for image in (PYTHON_IMAGE, REDIS_IMAGE)):
        say("   using the registry's base images")
        return BaseImages(settings={})
    say("   no registry reachable: making a base image with debootstrap")
    root = _debian_archive(cache)
    wheels = _wheels(cache)
    with timed("import base image"):
        run(["docker", "import", str(root), DEBIAN_IMAGE], timeout_s=300, env=engine.env)
        with _build_context(wheels) as context:
            build = ["docker", "build", "--network", "none", "-t", WHEELS_IMAGE, str(context)]
            run(build, timeout_s=300, env=engine.env)
    return BaseImages(
        settings={
            "BATON_BASE_IMAGE": DEBIAN_IMAGE,
            "BATON_BUILD_IMAGE": WHEELS_IMAGE,
            "BATON_BUILD_NETWORK": "none",
            "BATON_TORCH_INDEX_URL": "",
            "REDIS_IMAGE": DEBIAN_IMAGE,
        }
    )


def fetch(cache: Path) -> None:
    """Get into ``cache`` what :func:`base_images` takes from networks, should it have to make them."""
    _debian_archive(cache)
    _wheels(cache)


def _available(engine: Engine, image: str) -> bool:
    if succeeds(["docker", "image", "inspect", image], timeout_s=20, env=engine.env):
        return True
    return succeeds(["docker", "pull", "-q", image], timeout_s=300, env=engine.env)


def _debian_archive(cache: Path) -> Path:
    """The root file system as an archive, made once and kept in ``cache``."""
    mirror = _mirror()
    name = hashlib.sha256(f"{_SUITE} {_PACKAGES} {_UNUSED} {mirror}".encode()).hexdigest()[:16]
    archive = cache / f"debian-{name}.tar.gz"
    if archive.is_file():
        return archive
    install([] if shutil.which("debootstrap") else ["debootstrap"])
    with tempfile.TemporaryDirectory(dir=cache, prefix="debian-") as folder, timed("debootstrap"):
        root = Path(folder, "root")
        packages = f"--include={_PACKAGES}"
        run(["debootstrap", "--variant=minbase", packages, _SUITE, str(root), *mirror], timeout_s=900)
        partial = Path(folder, "archive")
        unused = [f"--exclude={pattern}" for pattern in _UNUSED]
        tar = ["tar", "--use-compress-program=gzip -1", "--one-file-system", *unused, "-C", str(root), "-cf"]
        run([*tar, str(partial), "."], timeout_s=300)
        for old in cache.glob("debian-*.tar.gz"):
            old.unlink()
        partial.rename(archive)
    return archive


def _mirror() -> list[str]:
    """Where this machine's apt gets the suite from; empty for debootstrap's own choice."""
    targets = ["apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT) $(REPO_URI)", "Created-By: Packages"]
    for line in run(targets, timeout_s=60).stdout.splitlines():
        if line.startswith(f"{_SUITE} main "):
            return [line.split()[2]]
    return []


def _wheels(cache: Path) -> Path:
    """A folder with every wheel both images install, for the pinned versions of today."""
    needed = run([sys.executable, "compose/requirements.py", "--build", "router", "node"], timeout_s=60).stdout + _ALSO
    constraints = REPOSITORY / "constraints.txt"
    name = hashlib.sha256(f"{_PYTHON}\n{needed}\n{constraints.read_text()}".encode()).hexdigest()[:16]
    folder = cache / f"wheels-{name}"
    if folder.is_dir():
        return folder
    for old in cache.glob("wheels-*"):
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory(dir=cache, prefix="partial-") as work, timed("download wheels"):
        requirements = Path(work, "requirements.txt")
        requirements.write_text(needed)
        wheels = Path(work, "wheels")
        download = ["-m", "pip", "download", "-q", "--python-version", _PYTHON, "--only-binary=:all:"]
        run(
            [sys.executable, *download, "-c", str(constraints), "-d", str(wheels), "-r", str(requirements)],
            timeout_s=900,
        )
        wheels.rename(folder)
    return folder


@contextmanager
def _build_context(wheels: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=wheels.parent, prefix="context-") as folder:
        context = Path(folder)
        (context / "Dockerfile").write_text(
            f"FROM {DEBIAN_IMAGE}\nCOPY wheels /wheels\nRUN printf '{_PIP_CONFIG}' > /etc/pip.conf\n"
        )
        (context / "wheels").mkdir()
        for wheel in wheels.iterdir():
            (context / "wheels" / wheel.name).hardlink_to(wheel)
        yield context
