"""What a prefill node refuses at once."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from prefill_bench import DECODE, OTHER_DECODE, SETTINGS, PrefillBench, hello, key, make_submit, of_kind, sent_to

from cluster.errors import TransferError
from cluster.wire import Cancel, Cancelled, Failed, Submit, Ticket
from kvtransfer.ticket import BlockHandle, TransferTicket, encode_ticket
from prefill_node.admission import check_submit, open_ticket


def with_ticket(submit: Submit, **changes: object) -> Submit:
    ticket: Ticket = msgspec.structs.replace(submit.ticket, **changes)
    return msgspec.structs.replace(submit, ticket=ticket)


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 31, 32])
def test_every_length_that_fits_is_taken(prompt_len: int) -> None:
    for first_missing in range(0, prompt_len // 4 * 4 + 1, 4):
        submit = make_submit(prompt_len, first_missing=first_missing)
        assert check_submit(submit, SETTINGS) is None
        transfer = open_ticket(submit)
        assert (transfer is None) == (first_missing == prompt_len)


@pytest.mark.parametrize(
    ("block_size", "first", "num_blocks"), [(3, 0, 4), (3, 6, 2), (3, 9, 1), (16, 0, 1), (1, 10, 0)]
)
def test_a_ticket_counts_in_blocks_of_the_decode_node(block_size: int, first: int, num_blocks: int) -> None:
    ticket = {"block_size": block_size, "first_missing_token": first, "num_blocks": num_blocks}
    assert check_submit(with_ticket(make_submit(10), **ticket), SETTINGS) is None


@pytest.mark.parametrize(
    ("submit", "code"),
    [
        (make_submit(0), "context_length_exceeded"),
        (make_submit(33), "context_length_exceeded"),  # nine blocks, the node has eight
        (make_submit(64), "context_length_exceeded"),  # no room for a single token
        (msgspec.structs.replace(make_submit(8), block_hashes=(b"x" * 16,)), "context_length_exceeded"),
        (msgspec.structs.replace(make_submit(7), block_hashes=(b"x" * 16,) * 2), "context_length_exceeded"),
        (with_ticket(make_submit(8), fingerprint="other"), "node_state"),
        (with_ticket(make_submit(8), first_missing_token=2), "node_state"),
        (with_ticket(make_submit(8), first_missing_token=4), "node_state"),
        (with_ticket(make_submit(8), first_missing_token=-4, num_blocks=3), "node_state"),
        (with_ticket(make_submit(8), first_missing_token=12, num_blocks=-1), "node_state"),
        (with_ticket(make_submit(8), num_blocks=1), "node_state"),
        (with_ticket(make_submit(8), num_blocks=3), "node_state"),
        (with_ticket(make_submit(8), block_size=3), "node_state"),
        (with_ticket(make_submit(8), block_size=8), "node_state"),
        (with_ticket(make_submit(8, first_missing=4), block_size=3), "node_state"),
    ],
)
def test_what_can_never_run_is_refused(submit: Submit, code: str) -> None:
    refusal = check_submit(submit, SETTINGS)
    assert refusal is not None
    assert refusal.code == code


def test_the_models_limit_counts_one_token_to_come() -> None:
    settings = replace(SETTINGS, max_model_len=12)
    assert check_submit(make_submit(11), settings) is None
    assert check_submit(make_submit(12), settings) is not None


def encoded(*block_ids: int, party: object = DECODE) -> bytes:
    handles = tuple(BlockHandle(block_id, 1) for block_id in block_ids)
    return encode_ticket(TransferTicket(5, hello(party), handles))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "transfer",
    [b"", b"\x01rubbish", encoded(0), encoded(0, 1, 2), encoded(0, 1, party=OTHER_DECODE)],
    ids=["empty", "rubbish", "too few", "too many", "another node"],
)
def test_a_bad_ticket_is_refused_and_both_sides_hear_it(bench: PrefillBench, transfer: bytes) -> None:
    submit = with_ticket(make_submit(8), transfer=transfer)
    with pytest.raises(TransferError):
        open_ticket(submit)
    out = bench.message(submit)
    assert of_kind(out, Failed)[0].code == "transfer_failed"
    assert sent_to(out, DECODE) == [Cancelled(key(), blocks_freed=0, blocks_sent=0)]


def test_a_ticket_serves_one_request_only(bench: PrefillBench) -> None:
    bench.submit(8, name="a", ticket_id=99)
    out = bench.submit(8, name="b", ticket_id=99)
    assert [(failed.key, failed.code) for failed in of_kind(out, Failed)] == [(key("b"), "transfer_failed")]
    assert bench.states() == {"a#1": "queued"}
    bench.message(Cancel(key("a")))


def test_a_second_submit_changes_nothing(bench: PrefillBench) -> None:
    bench.submit(8)
    assert bench.submit(8) == []
    bench.message(Cancel(key()))
