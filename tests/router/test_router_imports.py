from __future__ import annotations

import subprocess
import sys


def test_router_imports_no_torch() -> None:
    """The router starts on a small machine in a second: nothing it imports may bring torch along."""
    program = (
        "import sys; import router.app, router.answer, router.tokenizer;"
        "print([name for name in ('torch', 'transformers', 'numpy', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
