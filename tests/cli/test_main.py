"""The command line: help for everything, and words instead of tracebacks."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cli import startup, up
from cli.embedded_redis import free_port
from cli.main import build_parser, main
from cluster.config import ConfigError


@pytest.mark.parametrize("command", [[], ["up"], ["chat"], ["model"], ["model", "pull"]], ids=" ".join)
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {' '.join(['baton', *command])} ")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in ("up", "chat", "model", "examples:"))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["up", "--wings", "2"], "unrecognized arguments: --wings 2"),
        (["up", "--prefill", "two"], "invalid int value: 'two'"),
        (["model"], "ACTION"),
        (["model", "pull"], "name"),
    ],
)
def test_what_nobody_understands(command: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert words in text
    assert "usage: baton" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prefill", "0"], "at least one"),
        (["--decode", "-1"], "at least one"),
        (["--port", "70000"], "--port"),
        (["--port", "-5"], "--port"),
        (["--model", "no-such-model", "--port", "0"], "no-such-model"),
    ],
)
def test_up_refuses_before_it_starts_anything(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", *options]) == 2
    assert words in capsys.readouterr().err


def test_up_refuses_a_port_that_is_taken() -> None:
    """Whoever listens there would be taken for our router."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        args = build_parser().parse_args(["up", "--port", str(port)])
        with pytest.raises(ConfigError, match="another --port"):
            up.run(args)


def test_up_says_that_redis_cannot_be_reached(
    demo_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "REDIS_TIMEOUT_S", 0.05)
    options = ["--redis", "redis://:hunter2@127.0.0.1:1/0", "--log-dir", str(tmp_path), "--port", "0"]
    assert main(["up", "--model", str(demo_model_dir), *options]) == 2
    text = capsys.readouterr().err
    assert "Redis cannot be reached" in text
    assert "hunter2" not in text
    assert list(tmp_path.iterdir()) == []


def test_up_shows_why_its_redis_ended(
    demo_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The port may be taken between choosing and binding it."""
    own_port = str(free_port())
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr("cli.embedded_redis.free_port", lambda: other.getsockname()[1])
        assert main(["up", "--model", str(demo_model_dir), "--log-dir", str(tmp_path), "--port", own_port]) == 2
    text = capsys.readouterr().err
    assert "redis ended while starting" in text
    assert "Address already in use" in text


def test_the_command_starts_without_anything_heavy() -> None:
    program = (
        "import sys, cli.main;"
        "print([n for n in ('torch', 'transformers', 'zmq', 'fastapi', 'router', 'engine') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_state_file_is_private_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("an old one that everybody may read")
    path.chmod(0o644)
    state = up.State("http://h", "redis://:hunter2@h", "/logs", {"router": 1})
    up._write_private(path, state)
    assert path.stat().st_mode & 0o777 == 0o600
    assert msgspec.json.decode(path.read_bytes(), type=up.State) == state
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="state file"):
        up._write_private(tmp_path / "no" / "such" / "folder", state)
