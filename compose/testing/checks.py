"""What must be true of the services in containers. Each check is one function; an ``AssertionError`` fails it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from testing.shell import printed
from testing.stack import MODEL, NODE_IMAGE, NODES_OF_A_KIND, PROJECT, ROUTER_IMAGE, Stack, start

Check = Callable[[Stack], None]

_NODE_KINDS: Final = ("prefill", "decode")
_QUESTION: Final = [{"role": "user", "content": "What is the capital of France?"}]


def expect(condition: bool, message: str) -> None:
    """Fail the running check with ``message``."""
    if not condition:
        raise AssertionError(message)


def router_image_has_no_torch(stack: Stack) -> None:
    done = _python(stack, ROUTER_IMAGE, "import torch")
    expect("ModuleNotFoundError" in done.stderr, f"torch in the router's image: {printed(done)}")
    done = _python(stack, ROUTER_IMAGE, "import fastapi, tokenizers, router, cluster")
    expect(done.returncode == 0, printed(done))


def node_image_has_torch_and_ucx(stack: Stack) -> None:
    done = _python(stack, NODE_IMAGE, "import torch, ucxx, transformers, prefill_node, decode_node")
    expect(done.returncode == 0, printed(done))


def nothing_runs_as_root(stack: Stack) -> None:
    for image in (ROUTER_IMAGE, NODE_IMAGE):
        user = stack.docker("image", "inspect", "-f", "{{.Config.User}}", image).stdout.strip()
        expect(user == "baton", f"{image} runs as {user or 'root'}")


def refuses_to_start_without_settings(stack: Stack) -> None:
    for name in ("BATON_SECRET", "REDIS_PASSWORD", "BATON_MODEL_DIR"):
        done = stack.compose("config", timeout_s=60, check=False, without=name)
        expect(done.returncode != 0 and f"set {name}" in printed(done), f"without {name}: {printed(done)[:300]}")


def serves_with_two_nodes_of_each_kind(stack: Stack) -> None:
    start(stack)
    for kind in _NODE_KINDS:
        found = [container["State"]["Status"] for container in stack.containers(kind)]
        expect(found == ["running"] * NODES_OF_A_KIND, f"{kind}: {found}")


def nodes_compute_with_the_kernels_of_their_image(stack: Stack) -> None:
    done = _python(stack, NODE_IMAGE, "from kernels.cpu.prebuilt import find_prebuilt; print(find_prebuilt())")
    expect(".so" in done.stdout, f"no built kernels for this CPU in the image: {printed(done)}")
    for kind in _NODE_KINDS:
        for container in stack.containers(kind):
            said = printed(stack.docker("logs", container["Id"]))
            expect("on the native backend" in said, f"{container['Name']}: {said[:600]}")
            expect("building the CPU kernels" not in said, f"{container['Name']} built its own: {said[:600]}")


def chat_completion(stack: Stack) -> None:
    body = {"model": MODEL, "messages": _QUESTION, "max_tokens": 24, "temperature": 0}
    answer = _post(stack, "/v1/chat/completions", body)
    choice = answer["choices"][0]
    expect("Paris" in choice["message"]["content"], f"answered {choice['message']!r}")
    expect(choice["finish_reason"] in ("stop", "length"), f"finish_reason {choice['finish_reason']!r}")
    _check_usage(answer, at_most=24)


def completion_is_repeatable(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    answers = [_post(stack, "/v1/completions", body) for _ in range(2 * NODES_OF_A_KIND**2)]
    texts = {answer["choices"][0]["text"] for answer in answers}
    expect(len(texts) == 1, f"the same greedy request gave {texts}")
    expect(bool(texts.pop().strip()), "an empty completion")
    for answer in answers:
        _check_usage(answer, at_most=12)


def every_node_works_and_kv_crosses_over_ucx(stack: Stack) -> None:
    bodies = [{"model": MODEL, "prompt": f"{n} times one is", "max_tokens": 8, "temperature": 0} for n in range(16)]
    with ThreadPoolExecutor(len(bodies)) as clients:
        for answer in clients.map(lambda body: _post(stack, "/v1/completions", body), bodies):
            _check_usage(answer, at_most=8)
    eventually(lambda: _check_all_worked(stack), within_s=15)


def streams(stack: Stack) -> None:
    body = {"model": MODEL, "messages": _QUESTION, "max_tokens": 24, "temperature": 0, "stream": True}
    answer = stack.request("POST", "/v1/chat/completions", json=body)
    expect(answer.status_code == 200, f"{answer.status_code} {answer.text[:300]}")
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    expect(len(events) > 2 and events[-1] == "[DONE]", f"stream ended with {events[-1:]}")
    deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    whole = _post(stack, "/v1/chat/completions", {**body, "stream": False})
    expect(text == whole["choices"][0]["message"]["content"], f"streamed {text!r}")


def nodes_advertise_addresses_of_their_own(stack: Stack) -> None:
    redis = stack.containers("redis")[0]["Id"]
    script = """
        export REDISCLI_AUTH=$REDIS_PASSWORD
        for key in $(redis-cli --raw keys 'baton:node:*'); do
            case $(redis-cli --raw type "$key") in
                hash) redis-cli --raw hgetall "$key" ;;
                *) redis-cli --raw get "$key" ;;
            esac
        done"""
    listed = stack.docker("exec", redis, "sh", "-c", script).stdout
    for kind in _NODE_KINDS:
        for container in stack.containers(kind):
            address = _addresses(container)[0]
            expect(address in listed, f"{container['Name']} ({address}) is not in Redis: {listed[:600]!r}")


def only_the_router_is_published(stack: Stack) -> None:
    for container in stack.containers():
        service = container["Config"]["Labels"]["com.docker.compose.service"]
        published = [one for many in (container["NetworkSettings"]["Ports"] or {}).values() for one in many or []]
        wanted = [{"HostIp": "127.0.0.1", "HostPort": stack.settings["BATON_PORT"]}] if service == "router" else []
        expect(published == wanted, f"{service} publishes {published}")


def nodes_are_on_the_inner_network_only(stack: Stack) -> None:
    for container in stack.containers():
        service = container["Config"]["Labels"]["com.docker.compose.service"]
        names = {name.removeprefix(f"{PROJECT}_") for name in container["NetworkSettings"]["Networks"]}
        expect(names == ({"plane", "front"} if service == "router" else {"plane"}), f"{service} is on {names}")


def redis_keeps_nothing_and_asks_for_the_password(stack: Stack) -> None:
    redis = stack.containers("redis")[0]["Id"]
    refused = stack.docker("exec", redis, "redis-cli", "ping").stdout
    expect("NOAUTH" in refused, f"without a password Redis said {refused!r}")
    script = "export REDISCLI_AUTH=$REDIS_PASSWORD; redis-cli config get save; redis-cli config get appendonly"
    told = stack.docker("exec", redis, "sh", "-c", script).stdout.split("\n")
    expect(told[:4] == ["save", "", "appendonly", "no"], f"persistence: {told}")
    running = stack.docker("top", redis).stdout
    expect(stack.settings["REDIS_PASSWORD"] not in running, "the password is in the process list")


def all_are_healthy_and_none_restarted(stack: Stack) -> None:
    eventually(lambda: _check_health(stack), within_s=30)
    secrets = [stack.settings["REDIS_PASSWORD"], stack.settings["BATON_SECRET"]]
    for container in stack.containers():
        expect(container["RestartCount"] == 0, f"{container['Name']} restarted {container['RestartCount']} times")
        shown = " ".join(container["Config"]["Cmd"])
        expect(not any(secret in shown for secret in secrets), f"{container['Name']} shows a secret")


def serves_on_after_losing_a_pair(stack: Stack) -> None:
    for kind in _NODE_KINDS:
        stack.docker("rm", "-f", stack.containers(kind)[-1]["Id"])
    # A request sent before the router notices may fail; afterwards none may.
    eventually(lambda: completion_is_repeatable(stack), within_s=10)


def everything_stops_when_told(stack: Stack) -> None:
    stack.compose("stop", "-t", "20", timeout_s=90)
    ended = {container["Name"]: container["State"]["ExitCode"] for container in stack.containers()}
    # 143 is SIGTERM; 137 would be SIGKILL, after the 20 s.
    expect(len(ended) == 4 and set(ended.values()) <= {0, 143}, f"exit codes {ended}")


def eventually(check: Callable[[], None], within_s: float) -> None:
    """Repeat ``check`` until it holds; its last error counts when the time is over."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def _check_health(stack: Stack) -> None:
    for container in stack.containers():
        health = container["State"]["Health"]["Status"]
        expect(health == "healthy", f"{container['Name']} is {health}")


def _check_all_worked(stack: Stack) -> None:
    nodes = {kind: [_metrics(stack, container) for container in stack.containers(kind)] for kind in _NODE_KINDS}
    for kind, name in (("prefill", "prefill_computed_tokens_total"), ("decode", "decode_computed_tokens_total")):
        computed = [node[f"baton_{name}"] for node in nodes[kind]]
        expect(all(computed), f"tokens computed by the {kind} nodes: {computed}")
    sent = sum(node["baton_kv_bytes_sent_total"] for node in nodes["prefill"])
    received = sum(node["baton_kv_bytes_received_total"] for node in nodes["decode"])
    expect(sent == received > 0, f"{sent:.0f} KV bytes sent, {received:.0f} received")
    for node in nodes["prefill"]:
        used = [name for name in node if name.startswith("baton_kv_transport_info") and 'scheme="ucx"' in name]
        expect(len(used) == 1 and 'transport="tcp"' in used[0], f"KV transport: {used}")
    for node in (*nodes["prefill"], *nodes["decode"]):
        held = {name: value for name, value in node.items() if name.startswith("baton_kv_blocks{")}
        expect(held['baton_kv_blocks{state="owned"}'] == 0, f"blocks after the last request: {held}")


def _metrics(stack: Stack, container: dict[str, Any]) -> dict[str, float]:
    code = "from urllib.request import urlopen as u; print(u('http://127.0.0.1:9000/metrics').read().decode())"
    lines = stack.docker("exec", container["Id"], "python", "-c", code).stdout.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def _python(stack: Stack, image: str, code: str) -> Any:
    return stack.docker("run", "--rm", "--network=none", image, "python", "-c", code, timeout_s=120, check=False)


def _post(stack: Stack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = stack.request("POST", path, json=body)
    expect(answer.status_code == 200, f"{path}: {answer.status_code} {answer.text[:500]}")
    return dict(answer.json())


def _check_usage(answer: dict[str, Any], at_most: int) -> None:
    usage = answer["usage"]
    expect(usage["prompt_tokens"] > 0 and 0 < usage["completion_tokens"] <= at_most, f"usage {usage}")
    expect(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], f"usage {usage}")


def _addresses(container: dict[str, Any]) -> list[str]:
    return [network["IPAddress"] for network in container["NetworkSettings"]["Networks"].values()]


# In this order: the first four need images only, the fifth starts the services, the last stops them.
CHECKS: Final[tuple[Check, ...]] = (
    router_image_has_no_torch,
    node_image_has_torch_and_ucx,
    nothing_runs_as_root,
    refuses_to_start_without_settings,
    serves_with_two_nodes_of_each_kind,
    nodes_compute_with_the_kernels_of_their_image,
    chat_completion,
    completion_is_repeatable,
    every_node_works_and_kv_crosses_over_ucx,
    streams,
    nodes_advertise_addresses_of_their_own,
    only_the_router_is_published,
    nodes_are_on_the_inner_network_only,
    redis_keeps_nothing_and_asks_for_the_password,
    all_are_healthy_and_none_restarted,
    serves_on_after_losing_a_pair,
    everything_stops_when_told,
)
