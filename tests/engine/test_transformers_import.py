"""transformers probes for an installed package named ``kernels``; ours has that name and must not be taken for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kernels

LOAD_A_MODEL = """
import cluster, engine, kernels, router
import transformers
from transformers.utils.import_utils import is_kernels_available
assert not is_kernels_available()
config = transformers.LlamaConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
)
model = transformers.AutoModelForCausalLM.from_config(config)
model.save_pretrained(target)
transformers.AutoModelForCausalLM.from_pretrained(target)
"""


def test_our_kernels_package_is_empty() -> None:
    assert kernels.__file__ is not None
    assert Path(kernels.__file__).read_text(encoding="utf-8") == ""


def test_transformers_imports_and_loads_beside_our_packages(tmp_path: Path) -> None:
    script = f"target = {str(tmp_path)!r}\n{LOAD_A_MODEL}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
