"""What a real pair shows of its transfers: every family moves, every ending is counted, blocks have a deadline."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("torch")

from real_pair import RealNode, RealPair, real_pair

from cluster.request import SamplingParams
from cluster.telemetry import render_metrics
from cluster.wire import Failed
from engine.node_http import NodeView

PROMPT = [i * i % 20 for i in range(40)]


def view(role: str, node: RealNode) -> NodeView:
    return NodeView(role, role, node.state, node.pool, node.plane, time.monotonic)


def metrics(role: str, node: RealNode) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(render_metrics(view(role, node).samples)().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def both(pair: RealPair) -> dict[str, dict[str, float]]:
    return {"send": metrics("prefill", pair.prefill), "receive": metrics("decode", pair.decode)}


@pytest.mark.parametrize("scheme", ["tcp", "ucx"])
async def test_every_family_moves(scheme: str, tmp_path: Path) -> None:
    async with real_pair(tmp_path, scheme) as pair:
        before = both(pair)
        answers = await asyncio.gather(*(pair.ask([k, *PROMPT], 4) for k in range(5)))
        assert all(isinstance(answer, list) for answer in answers)
        await pair.at_rest()
        after = both(pair)
        changed = before["send"].keys() ^ after["send"].keys()
        assert all("transport_info" in name for name in changed), "series come and go"
        for direction, node in (("send", pair.prefill), ("receive", pair.decode)):
            now = after[direction]
            assert now[f"baton_kv_transfers_total{{direction={direction},outcome=done}}"] == 5
            assert now[f"baton_kv_transfer_seconds_count{{direction={direction}}}"] == 5
            assert now[f"baton_kv_transfer_seconds_bucket{{direction={direction},le=+Inf}}"] == 5
            assert now[f"baton_kv_transfer_seconds_sum{{direction={direction}}}"] > 0
            assert now["baton_kv_moving_seconds_total{}"] > 0
            assert 0 <= now["baton_kv_overlap_ratio{}"] <= 1
            assert now["baton_kv_blocks{state=free}"] == node.pool.num_blocks
            assert now["baton_kv_blocks_orphaned{}"] == 0
        sent = after["send"]["baton_kv_bytes_sent_total{}"]
        assert sent == after["receive"]["baton_kv_bytes_received_total{}"] > 0
        # Chunks of nine tokens: blocks of one travel while the next is computed.
        assert after["send"]["baton_kv_hidden_seconds_total{}"] > 0
        assert after["send"]["baton_kv_overlap_ratio{}"] > 0


async def test_every_ending_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with real_pair(tmp_path, "tcp") as pair:
        with monkeypatch.context() as patch:
            patch.setattr(pair.decode.plane._context.digester, "fits", lambda *_block: False)
            assert isinstance(await pair.ask(PROMPT, 4), Failed)
            await pair.at_rest()
        # A request that ends at token 0 is reserved, and given back without a block.
        assert isinstance(await pair.ask(PROMPT[:11], 1), list)
        await pair.at_rest()
        after = both(pair)
        assert after["receive"]["baton_kv_transfers_total{direction=receive,outcome=failed}"] == 1
        assert after["receive"]["baton_kv_transfers_total{direction=receive,outcome=cancelled}"] == 1
        ended = [
            after["send"][f"baton_kv_transfers_total{{direction=send,outcome={how}}}"] for how in ("cancelled", "done")
        ]
        assert ended == [1, 0]


async def test_every_block_that_is_held_has_an_age_and_a_deadline(tmp_path: Path) -> None:
    async with real_pair(tmp_path, "tcp") as pair:
        asking = asyncio.create_task(pair.ask(PROMPT, 20))
        while not (rows := msgspec.json.decode(view("decode", pair.decode).debug_kv())["blocks"]):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)
        for row in rows:
            assert row["owners"] == ["r0#1"]
            assert row["state"] == "owned"
            assert row["generation"] >= 1
            assert row["age_s"] >= 0
            assert 0 < row["deadline_in_s"] <= 30
        lost = pair.decode.pool.allocate(1, "nobody")
        row = next(
            r for r in msgspec.json.decode(view("decode", pair.decode).debug_kv())["blocks"] if r["block_id"] in lost
        )
        assert (row["age_s"], row["deadline_in_s"]) == (None, None)
        pair.decode.pool.release(lost, "nobody")
        assert isinstance(await asking, list)


async def test_blocks_of_choices_have_them_too(tmp_path: Path) -> None:
    async with real_pair(tmp_path, "tcp") as pair:
        sampling = SamplingParams(max_tokens=20, num_choices=2, temperature=1.0, seed=1)
        asking = asyncio.create_task(pair.ask_choices(PROMPT[:17], sampling))
        owners: set[str] = set()
        while not {"r0#1/0", "r0#1/1"} <= owners:
            await asyncio.sleep(0)
            rows = msgspec.json.decode(view("decode", pair.decode).debug_kv())["blocks"]
            owners = {owner for row in rows for owner in row["owners"]}
        assert any(len(row["owners"]) == 2 for row in rows)
        for row in rows:
            assert row["age_s"] >= 0
            assert 0 < row["deadline_in_s"] <= 30
        assert not isinstance(await asking, Failed)
