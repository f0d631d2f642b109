"""After Commit only the link is waited for: a pause of 30 s ends the handoff, however long its deadline is."""

from __future__ import annotations

from prefill_bench import DECODE, PrefillBench, of_kind, sent_to

from cluster.wire import Acknowledged, Cancelled, Commit, Failed, Ping
from engine.instructions import CancelPush, Instruction


def wait(bench: PrefillBench, seconds: int) -> list[Instruction]:
    """What happens meanwhile, except that Commit is said again."""
    out: list[Instruction] = []
    for _ in range(seconds):
        bench.message(Ping(0))
        out += [each for each in bench.tick(1.0) if not of_kind([each], Commit)]
    return out


def test_commit_is_said_again_until_it_is_answered(bench: PrefillBench) -> None:
    bench.submit(8)
    (first,) = of_kind(bench.step(), Commit)
    assert bench.tick(0.9) == []
    assert sent_to(bench.tick(0.2), DECODE) == [first]
    assert bench.tick(0.9) == []
    assert sent_to(bench.tick(0.2), DECODE) == [first]
    bench.message(Acknowledged(first.key), DECODE)
    assert bench.tick(5.0) == []
    bench.sent("r", 0, 1)


def test_a_transfer_that_stands_still_is_given_up(bench: PrefillBench) -> None:
    bench.submit(8, deadline_s=300.0)
    bench.step()
    assert bench.states() == {"r#1": "sending"}
    assert wait(bench, 29) == []
    bench.sent("r", 0)
    assert wait(bench, 29) == [], "a slow link is no silent one"
    out = wait(bench, 3)
    assert len(of_kind(out, CancelPush)) == 1
    assert of_kind(out, Failed) == [], "the decode node speaks for it now"
    out = bench.push_ended("r", 1)
    assert [message.blocks_sent for message in sent_to(out, DECODE) if isinstance(message, Cancelled)] == [1]


def test_a_prompt_may_stand_in_the_queue_and_be_computed_slowly(bench: PrefillBench) -> None:
    bench.submit(32, name="a", deadline_s=300.0)
    bench.submit(8, name="b", deadline_s=300.0)
    plan = bench.plan()
    assert wait(bench, 200) == []
    assert bench.states() == {"a#1": "prefilling", "b#1": "queued"}
    bench.finish(plan)
    assert {failed.key.request_id for failed in of_kind(wait(bench, 101), Failed)} == {"a", "b"}
    bench.push_ended("a", 2)
