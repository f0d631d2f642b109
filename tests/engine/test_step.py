from __future__ import annotations

import subprocess
import sys

import pytest

from cluster.request import RequestId, RequestKey, SamplingParams
from engine.step import FailedSequence, SequenceChunk, StepPlan

KEY = RequestKey(RequestId("r"), 0)


def chunk(num_tokens: int, start: int, position: int) -> SequenceChunk:
    return SequenceChunk(KEY, list(range(num_tokens)), start, [0, 1], SamplingParams(max_tokens=1), position)


def test_num_tokens_counts_all_chunks() -> None:
    assert StepPlan((chunk(3, 0, 3), chunk(1, 7, 8))).num_tokens == 4
    assert StepPlan(()).num_tokens == 0


@pytest.mark.parametrize(("num_tokens", "start", "position"), [(0, 0, 0), (2, -1, 1), (2, 0, 3), (2, 5, 2)])
def test_a_chunk_ends_where_its_tokens_end(num_tokens: int, start: int, position: int) -> None:
    with pytest.raises(ValueError, match="r#0"):
        chunk(num_tokens, start, position)


def test_failures_unpack() -> None:
    key, message = FailedSequence(KEY, "why")
    assert (key, message) == (KEY, "why")


def test_pure_modules_import_no_torch() -> None:
    code = (
        "import sys, cluster.model_store, engine.step, engine.model_config, engine.demo_model;"
        "sys.exit(bool({'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
