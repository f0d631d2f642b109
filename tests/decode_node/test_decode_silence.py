"""After Commit only the link is waited for: a pause of 30 s ends the request, however long its deadline is."""

from __future__ import annotations

from decode_bench import PREFILL, DecodeBench, of_kind, sent_to

from cluster.wire import Cancel, Failed, Ping
from engine.instructions import Instruction


def wait(bench: DecodeBench, seconds: int) -> list[Instruction]:
    out: list[Instruction] = []
    for _ in range(seconds):
        bench.message(Ping(0))
        out += bench.tick(1.0)
    return out


def test_blocks_that_stop_coming_after_commit_fail_the_request(bench: DecodeBench) -> None:
    bench.reserve(10, deadline_s=300.0)
    bench.arrived(1, 0)
    bench.commit(10)
    assert wait(bench, 29) == []
    bench.arrived(1, 2)
    assert wait(bench, 29) == [], "a slow link is no silent one"
    out = wait(bench, 3)
    assert [failed.code for failed in of_kind(out, Failed)] == ["timeout"]
    assert sent_to(out, PREFILL) == [Cancel(of_kind(out, Failed)[0].key)]
    bench.withdrawn()


def test_before_commit_the_prompt_may_stand_in_a_queue(bench: DecodeBench) -> None:
    bench.reserve(10, deadline_s=300.0)
    bench.arrived(1, 0)
    assert wait(bench, 299) == []
    assert len(of_kind(wait(bench, 3), Failed)) == 1
    bench.withdrawn()


def test_a_running_request_has_no_such_limit(bench: DecodeBench) -> None:
    bench.make_runnable(1, 10, max_tokens=3)
    assert of_kind(wait(bench, 100), Failed) == []
    bench.step()
    bench.step()
    assert bench.states() == {}
