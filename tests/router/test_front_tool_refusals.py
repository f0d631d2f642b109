"""Bad tools: one clear 400 each, before the model is told of any, whatever may be called."""

from __future__ import annotations

from typing import Any

import pytest
from front_harness import CHAT, HELLO, Front, check_refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")


def tool(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (["xyzzy"], "tools[0]"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "xyzzy", "function": {"name": "f"}}], "tools[0].type"),
        ([{"function": {"name": "f"}}], "tools[0].type"),
        ([tool(5)], "tools[0].function.name"),
        ([tool("")], "tools[0].function.name"),
        ([tool("xyzzy xyzzy")], "tools[0].function.name"),
        ([tool("f\n")], "tools[0].function.name"),
        ([tool("é")], "tools[0].function.name"),
        ([tool("f" * 65)], "tools[0].function.name"),
        ([tool(), tool("xyzzy"), tool()], "tools[2].function.name"),
        ([tool(description=5)], "tools[0].function.description"),
        ([tool(strict="xyzzy")], "tools[0].function.strict"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters="xyzzy")], "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], "tools[0].function.parameters"),
        ([tool(parameters={"type": None})], "tools[0].function.parameters"),
        ([tool(f"f{number}") for number in range(129)], "tools"),
        ([tool(description="xyzzy" * 20_000)], "tools"),
    ],
)
@pytest.mark.parametrize("choice", [None, "none", "required"])
async def test_c7_tools(front: Front, tools: Any, param: str, choice: str | None) -> None:
    response = await front.http.post(CHAT, json={"messages": HELLO, "tools": tools, "tool_choice": choice})
    assert (await check_refusal(front, response, 400))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "xyzzy"}}}, "tool_choice"),
        ({"tool_choice": {"type": "xyzzy", "function": {"name": "f"}}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "guided_regex": "a"}, "guided_regex"),
        ({"tool_choice": "required", "tools": [tool(parameters={"$ref": "#nothing"})]}, "tools"),
        ({"tool_choice": "required", "tools": [tool(parameters={"properties": {"a": {"type": "xyz"}}})]}, "tools"),
    ],
)
async def test_c7_tool_choice(front: Front, fields: dict[str, Any], param: str) -> None:
    response = await front.http.post(CHAT, json={"messages": HELLO, "tools": [tool()]} | fields)
    assert (await check_refusal(front, response, 400))["param"] == param
