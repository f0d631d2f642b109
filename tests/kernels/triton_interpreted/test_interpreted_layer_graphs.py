"""Decode steps through the graphs of a model's layers. The recording itself needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.backend import BackendError
from kernels.decoder import DecoderLayer, DecoderStep, run_layers
from kernels.reference import rope_tables
from kernels.spans import Spans
from kernels.triton.backend import Triton
from kernels.triton.graphs import Recorded

HIDDEN, INNER, HEADS, KV_HEADS, DIM, BLOCK_SIZE = 24, 20, 4, 2, 16, 4
ANGLES = rope_tables(torch.linspace(0.1, 0.9, DIM // 2), 60)
CONTEXTS = (9, 1, 33)


class Recorder:
    """Repeats calls instead of recording them, and counts."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, call: Callable[[], Tensor]) -> Recorded:
        self.recorded += 1
        output = call()

        def replay() -> None:
            self.replayed += 1
            output.copy_(call())

        return Recorded(replay, output)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def ops(recorder: Recorder) -> Triton:
    return Triton(torch.device("cpu"), graph_batches=(1, 4), recorder=recorder)


@pytest.fixture
def layers(ops: Triton) -> list[DecoderLayer]:
    def pack(outputs: int, inputs: int, gate_up: bool = False) -> object:
        return ops.pack([torch.randn(outputs, inputs) / 4], (outputs, inputs), "float32", None, gate_up=gate_up)

    width = (HEADS + 2 * KV_HEADS) * DIM
    return [
        DecoderLayer(
            input_norm=torch.randn(HIDDEN),
            qkv=pack(width, HIDDEN),
            query_norm=None,
            key_norm=None,
            output=pack(HIDDEN, HEADS * DIM),
            post_norm=torch.randn(HIDDEN),
            gate_up=pack(2 * INNER, HIDDEN, gate_up=True),
            down=pack(HIDDEN, INNER),
            rope=True,
        )
        for _ in range(2)
    ]


@pytest.fixture
def pool() -> Tensor:
    return torch.randn(40, 2, 2, KV_HEADS, BLOCK_SIZE, DIM)


def step_of(ops: Triton, pool: Tensor, contexts: tuple[int, ...], rows: int = 1) -> DecoderStep:
    """``rows`` last positions of each context, in blocks of its own."""
    counts = np.array([-(-context // BLOCK_SIZE) for context in contexts])
    starts = np.concatenate(([0], np.cumsum(counts)))
    block_ids = np.random.default_rng(1).permutation(40)[: starts[-1]]
    num_rows, count = np.full(len(contexts), rows), rows * len(contexts)
    columns = (np.arange(len(contexts)) * rows, num_rows, np.array(contexts), starts, block_ids)
    positions = np.concatenate([np.arange(context - rows, context) for context in contexts])
    blocks = block_ids[np.repeat(starts[:-1], num_rows) + positions // BLOCK_SIZE]
    sizes = (HIDDEN, HIDDEN, (HEADS + 2 * KV_HEADS) * DIM, HEADS * DIM, INNER)
    x, hidden, qkv, attended, inner = (torch.randn(count, size) for size in sizes)
    return DecoderStep(
        x=x,
        hidden=hidden,
        qkv=qkv,
        attended=attended,
        inner=inner,
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(blocks * BLOCK_SIZE + positions % BLOCK_SIZE),
        angles=ANGLES,
        eps=1e-5,
        pool=pool,
        plan=ops.plan(Spans(*(column.astype(np.int32) for column in columns)), HEADS, KV_HEADS),
    )


def test_decode_steps_are_replayed_and_equal_the_layers(
    ops: Triton, layers: list[DecoderLayer], pool: Tensor, recorder: Recorder
) -> None:
    stack = ops.stack(layers)
    for replays, contexts in enumerate((CONTEXTS, CONTEXTS[:1], CONTEXTS[1:]), start=1):
        step, before = step_of(ops, pool, contexts), pool.clone()
        expected = replace(step, x=step.x.clone(), pool=before)
        run_layers(ops, layers, expected)
        ops.run(stack, step)
        assert torch.allclose(step.x, expected.x, atol=1e-5)
        assert torch.allclose(pool, before, atol=1e-5)
        assert (recorder.recorded, recorder.replayed) == (2, replays)


def test_what_is_not_recorded_runs_as_it_is(
    ops: Triton, layers: list[DecoderLayer], pool: Tensor, recorder: Recorder
) -> None:
    stack = ops.stack(layers)
    ops.run(stack, step_of(ops, pool, (9, 5), rows=2))
    assert recorder.recorded == 0, "a chunk records nothing"
    ops.run(stack, step_of(ops, pool, CONTEXTS))
    assert recorder.replayed == 1
    others = (
        step_of(ops, pool, (1, 2, 3, 4, 5)),  # more than the largest graph
        step_of(ops, pool, (65,)),  # longer than the angles
        step_of(ops, pool.clone(), CONTEXTS),  # another pool
        step_of(ops, pool, (9, 5), rows=2),
    )
    for step in others:
        expected = replace(step, x=step.x.clone(), pool=step.pool.clone())
        if int(step.positions.max()) < len(ANGLES[0]):
            run_layers(ops, layers, expected)
            ops.run(stack, step)
            assert torch.equal(step.x, expected.x)
        else:
            assert stack.graphs is not None
            assert not stack.graphs.run(step)
    assert recorder.replayed == 1


def test_kernels_without_a_recorder_and_a_gpu_have_no_graphs(layers: list[DecoderLayer], pool: Tensor) -> None:
    plain = Triton(torch.device("cpu"))
    stack = plain.stack(layers)
    plain.run(stack, step_of(plain, pool, CONTEXTS))
    assert stack.graphs is None


def test_weights_that_are_not_there_are_refused(ops: Triton) -> None:
    with pytest.raises(BackendError, match="float32 and bfloat16"):
        ops.row_dtype("int8")
    with pytest.raises(ValueError, match="do not fit"):
        ops.pack([torch.zeros(3, 4), torch.zeros(3, 4)], (5, 4), "float32", None, gate_up=False)
