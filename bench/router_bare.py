"""A bare uvicorn app that streams given frames, one `send` each: what any Python server pays.

For `baton bench router`: `python -m bench.router_bare FRAMES_FILE`. It gives way to the event loop after each frame, as
whoever waits for a next token does. GET is answered with an empty object, which health checks of other routers take.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

_JSON_HEADERS = [(b"content-type", b"application/json")]
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]


def app_of(frames: list[bytes]) -> Any:
    """The ASGI app."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["method"] == "GET":
            await send({"type": "http.response.start", "status": 200, "headers": _JSON_HEADERS})
            await send({"type": "http.response.body", "body": b"{}"})
            return
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        for frame in frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    return app


async def main(frames: list[bytes]) -> None:
    """Serve on a free port, which is printed."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print(sock.getsockname()[1], flush=True)
        await uvicorn.Server(uvicorn.Config(app_of(frames), log_config=None, lifespan="off")).serve(sockets=[sock])


if __name__ == "__main__":
    content = Path(sys.argv[1]).read_bytes()
    uvloop.run(main([frame + b"\n\n" for frame in content.split(b"\n\n") if frame]))
