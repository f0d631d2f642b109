"""Settings that cannot work are refused in words; secrets never show."""

from __future__ import annotations

import argparse

import pytest

from cluster import config as settings
from cluster.config import ConfigError, add_cluster_arguments, cluster_config, is_loopback, url_host

SECRET = "0123456789abcdef"
REDIS = "redis://127.0.0.1:6379/0"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATON_REDIS_URL", "BATON_SECRET", "BATON_CACHE", "BATON_LOG_LEVEL", "BATON_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)


def build(*options: str) -> settings.ClusterConfig:
    parser = argparse.ArgumentParser()
    add_cluster_arguments(parser, "decode")
    return cluster_config(parser.parse_args(options), "decode")


def test_defaults() -> None:
    one, other = build("--redis", REDIS), build("--redis", REDIS)
    assert one.bind_host == one.advertise_host == "127.0.0.1"
    assert one.secret is None
    assert one.node_id.startswith("decode-")
    assert one.node_id != other.node_id
    assert one.epoch != other.epoch
    assert 0 <= one.epoch < 2**63


def test_the_environment_names_redis_and_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_REDIS_URL", REDIS)
    monkeypatch.setenv("BATON_SECRET", SECRET)
    built = build("--bind", "0.0.0.0")
    assert built.redis_url == REDIS
    assert built.secret == SECRET.encode()
    assert built.advertise_host == "127.0.0.1"  # the address that routes to Redis
    assert SECRET not in " ".join(vars(argparse.Namespace(bind="0.0.0.0")))


def test_localhost_is_bound_as_a_number() -> None:
    assert build("--redis", REDIS, "--bind", "localhost").bind_host == "127.0.0.1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "no Redis"),
        (("--redis", "http://127.0.0.1"), "redis://"),
        (("--redis", "127.0.0.1:6379"), "redis://"),
        (("--redis", "redis://:hunter2@h:port"), "host and port"),
        (("--redis", "redis://:hunter2@h:99999"), "host and port"),
        (("--redis", "redis://:hunter2@h:0"), "host and port"),
        (("--redis", REDIS, "--bind", "0.0.0.0"), "BATON_SECRET"),
        (("--redis", REDIS, "--bind", "::"), "BATON_SECRET"),
        (("--redis", REDIS, "--bind", "10.1.2.3"), "BATON_SECRET"),
        (("--redis", REDIS, "--bind", "my-host"), "BATON_SECRET"),
        (("--redis", REDIS, "--advertise-host", "10.1.2.3"), "BATON_SECRET"),
        (("--redis", REDIS, "--advertise-host", "a b"), "advertise-host"),
        (("--redis", REDIS, "--node-id", "a\nb"), "node-id"),
        (("--redis", REDIS, "--node-id", "x" * 129), "node-id"),
        (("--redis", REDIS, "--node-id", "a/b"), "node-id"),
    ],
)
def test_refusals(options: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        build(*options)
    assert "hunter2" not in str(caught.value)


def test_a_short_secret_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_SECRET", "hunter2")
    with pytest.raises(ConfigError, match="16") as caught:
        build("--redis", REDIS)
    assert "hunter2" not in str(caught.value)


def test_a_secret_is_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_SECRET", (b"\xff" * 16).decode(errors="surrogateescape"))
    assert settings.shared_secret() == b"\xff" * 16


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
    ],
)
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_url_host() -> None:
    assert (url_host("::1"), url_host("127.0.0.1"), url_host("name")) == ("[::1]", "127.0.0.1", "name")


def test_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.log_level() == "INFO"
    monkeypatch.setenv("BATON_LOG_LEVEL", "debug")
    assert settings.log_level() == "DEBUG"
    monkeypatch.setenv("BATON_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="BATON_LOG_LEVEL"):
        settings.log_level()


@pytest.mark.parametrize(("value", "expected"), [("", None), ("12", 12), ("x", None), ("-3", None), ("٣", None)])
def test_parent_pid(monkeypatch: pytest.MonkeyPatch, value: str, expected: int | None) -> None:
    monkeypatch.setenv("BATON_PARENT_PID", value)
    assert settings.parent_pid() == expected
