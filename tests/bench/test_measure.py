from __future__ import annotations

import json

import pytest

from bench.measure import Machine, Report, parser
from cli.main import main


def test_rows_are_one_json_array(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(as_json=True)
    report.add("decode_b1_ctx256", 12.0, "ms", 10.0, 7)
    report.add("stream_bandwidth", 30.0, "GB/s", runs=5)
    report.finish()
    assert json.loads(capsys.readouterr().out) == [
        {"name": "decode_b1_ctx256", "value": 12.0, "unit": "ms", "limit": 10.0, "ratio": 1.2, "runs": 7},
        {"name": "stream_bandwidth", "value": 30.0, "unit": "GB/s", "limit": None, "ratio": None, "runs": 5},
    ]


def test_a_floor_is_the_greater_of_reading_and_computing_plus_the_cache() -> None:
    machine = Machine(lambda: None, flops_per_s=100.0)
    machine.bytes_per_s = 10.0
    assert machine.floor_ms(weight_bytes=20, flops=100, kv_bytes=0) == 2000
    assert machine.floor_ms(weight_bytes=20, flops=300, kv_bytes=10) == 4000


def test_work_is_watched_with_reads_between() -> None:
    order: list[str] = []
    machine = Machine(lambda: order.append("read"), 1.0)
    assert len(machine.watch(lambda: order.append("work"), 2)) == 2
    assert order == ["work", "read", "work", "read", "work"]
    assert machine.bytes_per_s > 0


def test_the_command_names_what_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "kernels,engine,transfer" in capsys.readouterr().out
    assert parser("engine", "").parse_args(["--json", "--runs", "9"]).runs == 9
