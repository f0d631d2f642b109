"""`baton bench engine`: steps of the demo model against the machine's limits, the sampler, start-up, Hugging Face."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.measure import Gemm, Machine, Report, measure_machine, median_ms, parser, prepare

if TYPE_CHECKING:
    from bench.model_steps import Steps, Work
    from engine.model_config import Dtype
    from engine.step import StepPlan
    from kernels.cpu.native import Native

DESCRIPTION = """Time of each kind of step of the demo model, the floor of that step on this machine (bytes over stream
bandwidth, operations over GEMM peak, both measured in the same run), and the ratio."""

DECODE = ((1, 256), (4, 256), (16, 256), (32, 256), (64, 256), (32, 1024))
PREFILL = (256, 1024)
NUM_TOKENS = 32 * 1024
START_LIMIT_S = 4.0


class EngineBench:
    """Everything measured on one machine with one set of weights at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        from cluster.config import cache_dir
        from cluster.model_store import resolve_model
        from kernels.cpu.build import build
        from kernels.cpu.native import Native

        self._args = args
        self._report = Report(as_json=args.json)
        self._directory = resolve_model(args.model).directory
        self._library = build(cache_dir() / "kernels")
        self._native = Native
        self._machine = self._measure_machine()

    def run(self) -> None:
        """All rows, cheapest set-up first."""
        self._start()
        steps = self._steps("float32", NUM_TOKENS)
        for batch, context in DECODE:
            self._decode(f"decode_b{batch}_ctx{context}", steps, batch, context)
        for length in PREFILL:
            self._prefill(f"prefill_{length}", steps, length)
        if self._wanted("sampler") or self._wanted("python_share"):
            self._around_the_kernels(steps)
        self._hugging_face(steps)
        self._narrow("bfloat16", "bf16", steps)
        self._narrow("int8", "int8", steps)
        self._report.finish()

    def _wanted(self, name: str) -> bool:
        return self._args.only in name or name in self._args.only

    def _ops(self) -> Native:
        return self._native(self._library, self._args.threads)

    def _steps(self, dtype: Dtype, num_tokens: int) -> Steps:
        from bench.model_steps import Steps

        return Steps(self._directory, self._ops(), dtype, num_tokens)

    def _measure_machine(self) -> Machine:
        """The native linear competes for the GEMM peak, so that its own ratio cannot fall under 1 unnoticed."""
        import torch

        ops, threads = self._ops(), self._args.threads
        rows, inputs, outputs = 1024, 576, 3072
        weight = ops.pack([torch.randn(outputs, inputs)], (outputs, inputs), "float32", None, gate_up=False)
        x, out = torch.randn(rows, inputs), torch.empty(rows, outputs)
        own = Gemm(2.0 * rows * inputs * outputs, lambda: ops.linear(x, weight, out))
        return measure_machine(self._report, lambda at, size: ops.read(at, size, threads), [own], self._args.runs)

    def _add(self, name: str, work: Work, seconds: list[float]) -> float:
        floor = self._machine.floor_ms(work.weight_bytes, work.flops, work.kv_bytes)
        value = statistics.median(seconds) * 1e3
        self._report.add(name, value, "ms", floor, len(seconds))
        return value

    def _decode(self, name: str, steps: Steps, batch: int, context: int) -> None:
        if self._wanted(name):
            plan = steps.decode(batch, context)
            self._add(name, steps.decode_work(batch, context), self._execute(steps, plan))

    def _prefill(self, name: str, steps: Steps, length: int) -> None:
        if self._wanted(name):
            plan = steps.prefill(length)
            self._add(name, steps.prefill_work(length), self._execute(steps, plan))

    def _execute(self, steps: Steps, plan: StepPlan) -> list[float]:
        return self._machine.watch(lambda: steps.runner.execute(plan), self._args.runs)

    def _narrow(self, dtype: Dtype, suffix: str, wide: Steps) -> None:
        """Narrow weights at batch 1, over their own floor and over what float32 takes at that moment."""
        name = f"decode_b1_ctx256_{suffix}"
        if not self._wanted(name):
            return
        steps = self._steps(dtype, 1024)
        plan, wide_plan = steps.decode(1, 256), wide.decode(1, 256)
        value = self._add(name, steps.decode_work(1, 256), self._execute(steps, plan))
        wide_ms = statistics.median(self._execute(wide, wide_plan)) * 1e3
        self._report.add(f"{name}_over_fp32", value, "ms", wide_ms, self._args.runs)

    def _around_the_kernels(self, steps: Steps) -> None:
        """What a decode step of 32 spends outside of kernels, and in the sampler."""
        from cluster.request import SamplingParams
        from engine.sampler import sample

        runs, batch = self._args.runs, 32
        plan = steps.decode(batch, 256)
        step_ms = median_ms(lambda: steps.runner.execute(plan), runs)
        logits = steps.model.forward(steps.runner._batch(plan.chunks), steps.cache.pool).clone()
        positions = [256] * batch
        greedy = [SamplingParams(max_tokens=1)] * batch
        nucleus = [SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9, seed=row) for row in range(batch)]
        sums = steps.model.weights.ops.exp_sums
        greedy_ms = median_ms(lambda: sample(logits, greedy, positions, sums), runs)
        idle_ms = self._idle_ms(steps, plan)
        self._report.add("python_share_b32", max(0.0, idle_ms - greedy_ms), "ms", step_ms, runs)
        self._report.add("sampler_greedy_b32", greedy_ms, "ms", step_ms, runs)
        self._report.add(
            "sampler_topp_b32", median_ms(lambda: sample(logits, nucleus, positions, sums), runs), "ms", step_ms, runs
        )

    def _idle_ms(self, steps: Steps, plan: StepPlan) -> float:
        """A step whose kernels do nothing: what Python takes, and the sampler."""
        ops: Any = steps.model.weights.ops
        real = ops._lib
        ops._lib = _Idle(real)
        try:
            return median_ms(lambda: steps.runner.execute(plan), self._args.runs)
        finally:
            ops._lib = real

    def _hugging_face(self, steps: Steps) -> None:
        """transformers at batch 32 over a cache of 256 tokens: value over the same floor as ours."""
        name = "hf_decode_b32_ctx256"
        if not self._wanted(name):
            return
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(self._args.threads)
        model = AutoModelForCausalLM.from_pretrained(self._directory, dtype=torch.float32).eval()
        ids = torch.randint(3, steps.config.vocab_size, (32, 255))
        with torch.inference_mode():
            cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values

            def step() -> None:
                model(ids[:, :1], cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
                cache.crop(-1)

            seconds = self._machine.watch(step, self._args.runs)
            theirs = self._add(name, steps.decode_work(32, 256), seconds)
        ours = statistics.median(self._execute(steps, steps.decode(32, 256))) * 1e3
        self._report.add("hf_over_ours_b32_ctx256", theirs, "ms", ours, len(seconds))

    def _start(self) -> None:
        """A decode node from its command line to its record in Redis, and the most memory it took for that."""
        if not (self._wanted("start_seconds") or self._wanted("peak_rss_ratio")):
            return
        from bench.node_start import start_node

        starts = [start_node(self._directory, self._args.threads) for _ in range(self._args.runs)]
        weights = sum(path.stat().st_size for path in Path(self._directory).glob("*.safetensors"))
        seconds = statistics.median(start.seconds for start in starts)
        peak = statistics.median(start.peak_bytes for start in starts)
        self._report.add("start_seconds", seconds, "s", START_LIMIT_S, len(starts))
        self._report.add("peak_rss_ratio", peak / 1e6, "MB", weights / 1e6, len(starts))


class _Idle:
    """The library with kernels that return at once."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name) if name.startswith("baton_max") else lambda *_arguments: 0


def main() -> int:
    """Entry point; returns the exit status."""
    made = parser("engine", DESCRIPTION)
    made.add_argument("--model", default="smollm2-135m", help="name or directory")
    args = made.parse_args()
    prepare(args)
    began = time.monotonic()
    EngineBench(args).run()
    print(f"{time.monotonic() - began:.0f} s in all", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
