from __future__ import annotations

from pathlib import Path

import pytest

from cluster.api_keys import ApiKey, KeyRing, digest_of, plain_key, read_keys
from cluster.config import ConfigError

ONE, OTHER = "sk-one-" + "1" * 32, "sk-other-" + "2" * 32


def entry(name: str, key: str, more: str = "") -> str:
    return f'[[key]]\nname = "{name}"\nsha256 = "{digest_of(key.encode()).hex()}"\n{more}\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    return path


def test_a_ring_knows_its_keys_and_no_others(tmp_path: Path) -> None:
    limits = 'requests_per_minute = 60\nmax_concurrent = 2\ncache_salt = "shared"'
    ring = KeyRing(read_keys(written(tmp_path, entry("a", ONE, limits) + entry("b", OTHER))))
    assert ring.find(ONE.encode()) == ApiKey("a", digest_of(ONE.encode()), 60, 2, "shared")
    found = ring.find(OTHER.encode())
    assert found is not None
    assert (found.requests_per_minute, found.max_concurrent, found.cache_salt) == (None, None, "b")
    for wrong in (b"", ONE.encode()[:-1], ONE.encode() + b"x", "schlüssel".encode("latin-1"), b"\xff" * 600, b"\0"):
        assert ring.find(wrong) is None


def test_a_key_is_not_found_by_its_beginning() -> None:
    long = "k" * 512
    ring = KeyRing([plain_key("long", long.encode())])
    assert ring.find(long.encode()) is not None
    assert ring.find(long.encode() + b"k") is None


def test_no_keys_is_false() -> None:
    assert not KeyRing(())
    assert KeyRing([plain_key("one", ONE.encode())])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold"),
        ("key = 1", "must hold"),
        ("other = 1\n" + entry("a", ONE), "must hold"),
        ("[[key", "not TOML"),
        (entry("a b", ONE), "name takes"),
        (entry("a", ONE, "max_concurent = 1"), "unknown max_concurent"),
        (entry("a", ONE, "max_concurrent = 0"), "max_concurrent must be"),
        (entry("a", ONE, "max_concurrent = true"), "max_concurrent must be"),
        (entry("a", ONE, "requests_per_minute = 1.5"), "requests_per_minute must be"),
        (entry("a", ONE, "cache_salt = 3"), "cache_salt must be"),
        ('[[key]]\nname = "a"\nsha256 = "abc"', "64 hexadecimal digits"),
        (entry("ok", ONE) + '[[key]]\nname = "a"', "number 2"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_keys(written(tmp_path, text))


def test_a_missing_file_is_a_setting_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "none.toml")


@pytest.mark.parametrize("second", [ApiKey("a", b"2" * 32), ApiKey("b", b"1" * 32)])
def test_two_holders_are_told_apart(second: ApiKey) -> None:
    with pytest.raises(ConfigError, match="same"):
        KeyRing([ApiKey("a", b"1" * 32), second])


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="16"):
        plain_key("short", b"secret")
