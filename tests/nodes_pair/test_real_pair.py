"""Real memory, real transports: damage is never decoded from, and what nobody holds is never read."""

from __future__ import annotations

import asyncio
import threading
from itertools import count
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from real_pair import BLOCK_SIZE, SEED, RealPair, real_pair

from cluster.prefix_hash import block_hashes
from cluster.wire import Failed, RefusedPeer
from engine.node_http import NodeView

SCHEMES = ["tcp", "ucx", "ucx-mapped"]
PROMPTS = [[(i * i + k) % 20 for i in range(9 + 3 * k)] for k in range(6)]
POISONS = [float("nan"), 3e4]


async def answers(pair: RealPair) -> list[list[int] | Failed]:
    return await asyncio.gather(*(pair.ask(prompt, 12) for prompt in PROMPTS))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("digest", ["sampled", "full"])
async def test_a_flipped_byte_fails_the_request(scheme, digest, tmp_path: Path, monkeypatch):
    async with real_pair(tmp_path, scheme, digest) as pair:
        right = await pair.ask(PROMPTS[3], 6)
        assert isinstance(right, list)
        prompt = PROMPTS[4]
        names = block_hashes(SEED, prompt, BLOCK_SIZE)
        decode, digester = pair.decode, pair.decode.plane._context.digester
        fits = digester.fits
        bytes_of = decode.cache.as_bytes()

        def damaged(block_id, identity, digest) -> bool:
            if identity.index == 2:
                bytes_of[block_id][77] ^= 4
            return fits(block_id, identity, digest)

        with monkeypatch.context() as patch:
            patch.setattr(digester, "fits", damaged)
            failed = await pair.ask(prompt, 6)
        assert isinstance(failed, Failed)
        assert "does not hold what was sent" in failed.message
        await pair.at_rest()
        assert decode.pool.match(names) == []
        assert decode.plane.stats().digest_failures == 1
        assert decode.state.counters()["intakes_failed_total"] == 1
        again = await pair.ask(prompt, 6)
        assert isinstance(again, list)
        assert await pair.ask(PROMPTS[3], 6) == right


@pytest.mark.parametrize("marker", POISONS)
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_poison_in_free_and_quarantined_blocks_reaches_no_answer(scheme, marker, tmp_path: Path, monkeypatch):
    async with real_pair(tmp_path, scheme) as clean:
        right = await answers(clean)
        assert all(isinstance(answer, list) for answer in right)
    async with real_pair(tmp_path, scheme) as pair:
        nodes = (pair.prefill, pair.decode)
        for node in nodes:
            _poison_before_every_event(node, marker, monkeypatch)
        digester = pair.decode.plane._context.digester
        fits, number = digester.fits, count(1)
        with monkeypatch.context() as patch:
            # Some transfers fail, so that there are quarantined blocks at all.
            patch.setattr(digester, "fits", lambda *block: next(number) % 7 != 0 and fits(*block))
            shaken = await answers(pair)
        assert any(isinstance(found, Failed) for found in shaken)
        assert all(isinstance(found, Failed) or found == good for found, good in zip(shaken, right, strict=True))
        assert await answers(pair) == right


async def test_metrics_tell_of_damage_and_of_blocks_of_nobody(tmp_path: Path, monkeypatch):
    async with real_pair(tmp_path, "tcp") as pair:
        decode = pair.decode
        view = NodeView("decode", "D", decode.state, decode.pool, decode.plane, lambda: 0.0)
        monkeypatch.setattr(decode.plane._context.digester, "take", lambda *_block: 1)
        assert isinstance(await pair.ask(PROMPTS[0], 3), Failed)
        await pair.at_rest()
        lost = decode.pool.allocate(2, "a request that was forgotten")
        metrics = {sample.name: sample.value for sample in view.samples()}
        assert metrics["kv_digest_failures_total"] >= 1
        assert metrics["kv_blocks_orphaned"] == 2
        assert sorted(msgspec.json.decode(view.debug_kv())["orphaned"]) == sorted(lost)
        decode.pool.release(lost, "a request that was forgotten")
        assert {sample.name: sample.value for sample in view.samples()}["kv_blocks_orphaned"] == 0
        sent = NodeView("prefill", "P", pair.prefill.state, pair.prefill.pool, pair.prefill.plane, lambda: 0.0)
        assert {sample.name: sample.value for sample in sent.samples()}["kv_digest_seconds_total"] > 0


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_the_forward_thread_does_not_wait_for_the_network(scheme, tmp_path: Path, monkeypatch):
    """The receiving transport stands still; the prefill node computes on, and so does the decode node."""
    async with real_pair(tmp_path, scheme) as pair:
        running = asyncio.create_task(pair.ask(PROMPTS[1], 30))
        while not any(row["state"] == "running" for row in pair.decode.state.report()):  # noqa: ASYNC110
            await asyncio.sleep(0)
        digester = pair.decode.plane._context.digester
        fits, stuck, go_on = digester.fits, threading.Event(), threading.Event()

        def wait(*block) -> bool:
            stuck.set()
            assert go_on.wait(30)
            return fits(*block)

        monkeypatch.setattr(digester, "fits", wait)
        try:
            waiting = asyncio.create_task(pair.ask(PROMPTS[5], 4))
            assert await asyncio.to_thread(stuck.wait, 30)
            assert isinstance(await pair.ask(PROMPTS[2], 1), list)
            assert isinstance(await running, list)
            assert not waiting.done()
        finally:
            go_on.set()
        assert isinstance(await waiting, list)


def _poison_before_every_event(node, marker: float, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, schedule = node.state.handle, node.state.schedule

    def handled(event, now):
        node.poison(marker)
        out = handle(event, now)
        node.poison(marker)
        return out

    def scheduled(now):
        node.poison(marker)
        return schedule(now)

    monkeypatch.setattr(node.state, "handle", handled)
    monkeypatch.setattr(node.state, "schedule", scheduled)


async def test_what_is_not_the_required_transport_fails_the_request_and_the_router_hears_why(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("UCX_TLS", "tcp")
    why = "the ucx connection with D came out on tcp, rdma is required"
    async with real_pair(tmp_path, "ucx", require="rdma") as pair:
        assert (await pair.ping(pair.prefill)).refused_peers == ()
        for _ in range(2):
            # Which of the two nodes is heard first is chance, and only one of them knows why.
            assert isinstance(await pair.ask(PROMPTS[0], 4), Failed)
            await pair.at_rest()
            assert f"KV blocks could not be sent: {why}" in caplog.text
        decode = pair.decode.party
        assert (await pair.ping(pair.prefill)).refused_peers == (RefusedPeer(decode.id, decode.epoch, why),)
        view = NodeView("prefill", "P", pair.prefill.state, pair.prefill.pool, pair.prefill.plane, lambda: 0.0)
        seen = msgspec.json.decode(view.debug_kv())
        assert seen["connections"] == []
        assert seen["refused_peers"] == [{"peer": "D", "peer_epoch": decode.epoch, "reason": why}]
        assert {s.name: s.value for s in view.samples()}["kv_peers_refused"] == 1


async def test_the_required_transport_serves_and_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    async with real_pair(tmp_path, "ucx", require="tcp") as pair:
        assert isinstance(await pair.ask(PROMPTS[0], 4), list)
        for node, role, direction, peer in (
            (pair.prefill, "prefill", "sending", pair.decode.party),
            (pair.decode, "decode", "receiving", pair.prefill.party),
        ):
            view = NodeView(role, role, node.state, node.pool, node.plane, lambda: 0.0)
            (connection,) = msgspec.json.decode(view.debug_kv())["connections"]
            assert connection == {
                "peer": peer.id,
                "peer_epoch": peer.epoch,
                "peer_role": "decode" if role == "prefill" else "prefill",
                "direction": direction,
                "scheme": "ucx",
                "transport": "tcp",
            }
            told = [s.labels for s in view.samples() if s.name == "kv_peer_transport_info"]
            assert told == [{"peer_role": connection["peer_role"], "scheme": "ucx", "transport": "tcp"}]
