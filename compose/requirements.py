"""Print what an extra of the project installs, one requirement a line: ``requirements.py [--build] EXTRA...``.

With ``--build`` also what building the project itself needs.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(project_file: Path, extras: list[str], *, build: bool) -> list[str]:
    """Direct requirements of the project and of ``extras``, sorted."""
    document: dict[str, Any] = tomllib.loads(project_file.read_text(encoding="utf-8"))
    project = document["project"]
    found = set(project["dependencies"])
    for extra in extras:
        found.update(project["optional-dependencies"][extra])
    if build:
        found.update(document["build-system"]["requires"])
    return sorted(found)


def main() -> None:
    """Read the project file of the working directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="+")
    parser.add_argument("--build", action="store_true")
    options = parser.parse_args()
    for line in requirements(Path("pyproject.toml"), options.extras, build=options.build):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
