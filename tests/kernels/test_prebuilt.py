"""Kernels built ahead: the highest level this CPU has is taken, and only from the present source."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.cpu import prebuilt


def _put(folder: Path, level: str, digest: str) -> Path:
    path = folder / f"cpu-{level}-{digest}.so"
    path.write_bytes(b"")
    return path


def test_nothing_is_found_in_an_empty_installation(tmp_path: Path) -> None:
    assert prebuilt.find_prebuilt(tmp_path) is None


@pytest.mark.parametrize(
    ("features", "level"),
    [
        (prebuilt.LEVELS["x86-64-v4"] | prebuilt.LEVELS["x86-64-v3"], "x86-64-v4"),
        (prebuilt.LEVELS["x86-64-v3"], "x86-64-v3"),
        (frozenset({"sse4_2"}), None),
    ],
)
def test_the_highest_level_the_cpu_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: frozenset[str], level: str | None
) -> None:
    monkeypatch.setattr(prebuilt, "_cpu_features", lambda: features)
    made = {name: _put(tmp_path, name, prebuilt.source_digest()) for name in prebuilt.LEVELS}
    assert prebuilt.find_prebuilt(tmp_path) == (made[level] if level else None)


def test_a_library_of_another_source_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt, "_cpu_features", lambda: prebuilt.LEVELS["x86-64-v3"])
    _put(tmp_path, "x86-64-v3", "0123456789abcdef01234567")
    assert prebuilt.find_prebuilt(tmp_path) is None
