"""Settings that cannot work are refused in words before anything heavy is loaded."""

from __future__ import annotations

import pytest

from cluster.config import ENV_REQUIRE_TRANSPORT, ConfigError
from engine import node_config
from engine.node_config import NodeConfig, TransportKind, get_args, node_parser
from kvtransfer.digest import DIGEST_MODES
from kvtransfer.routes import TRANSPORT_KINDS
from kvtransfer.select import SCHEMES


def parse(*options: str) -> NodeConfig:
    common = ["--model", "m", "--redis", "redis://127.0.0.1:1/0"]
    return node_config.node_config(node_parser("prefill", "").parse_args([*common, *options]), "prefill")


def test_names_are_those_of_the_transfer() -> None:
    assert get_args(TransportKind) == TRANSPORT_KINDS
    assert get_args(node_config.KvDigest) == DIGEST_MODES
    assert set(node_config._TRANSPORTS) == set(SCHEMES) - {"inproc"}


def test_without_a_word_nothing_is_required_and_nixl_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_REQUIRE_TRANSPORT, raising=False)
    config = parse()
    assert (config.transports, config.require_transport) == (("ucx", "tcp"), None)


def test_a_demand_comes_from_the_option_or_else_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_REQUIRE_TRANSPORT, "tcp")
    assert parse().require_transport == "tcp"
    assert parse("--require-transport", "rdma").require_transport == "rdma"
    monkeypatch.setenv(ENV_REQUIRE_TRANSPORT, "pigeon")
    with pytest.raises(ConfigError, match="BATON_REQUIRE_TRANSPORT must be one of rdma"):
        parse()


@pytest.mark.parametrize(("transports", "words"), [("ucx,nixl", "not both"), ("pigeon", "takes a list"), ("", "list")])
def test_transports_that_cannot_be_offered(transports: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_REQUIRE_TRANSPORT, raising=False)
    with pytest.raises(ConfigError, match=words):
        parse("--transport", transports)
