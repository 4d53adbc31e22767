"""What this pod's own engine says about itself: its ids from the API server's state, its health from ``/health``.

Read by attribute from vLLM's application state (``vllm/entrypoints/launchers/api_server/app_state.py``), so nothing of
vLLM is imported here.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from prebook_connector.dispatch.identity import VERSION, Identity, Load, SideChannel
from prebook_connector.dispatch.settings import Settings
from prebook_connector.dispatch.types import App, Message, Scope

_HEALTH_SECONDS = 5.0


class Engine:
    """This pod's engine."""

    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._state: Any = None
        self._outer: Any = None

    def attach(self, scope: Scope) -> None:
        """Remembers the application from any scope that passes by."""
        if self._state is None and (application := scope.get("app")) is not None:
            self._state, self._outer = application.state, application

    @property
    def engine_id(self) -> str | None:
        """The KV transfer engine id, or None before the engine is up (or without a connector)."""
        config = getattr(getattr(self._state, "vllm_config", None), "kv_transfer_config", None)
        value = getattr(config, "engine_id", None)
        return value if isinstance(value, str) and value else None

    @property
    def mla(self) -> bool:
        """Whether the model uses multi-head latent attention."""
        model = getattr(getattr(self._state, "vllm_config", None), "model_config", None)
        return bool(getattr(model, "use_mla", False))

    @property
    def parses_chat(self) -> bool:
        """Whether a reasoning or tool parser shapes the chat stream (``OpenAIServingChat.parser_cls``)."""
        serving = getattr(self._state, "openai_serving_chat", None)
        return getattr(serving, "parser_cls", serving) is not None

    def identity(self, *, compat_hash: str | None, draining: bool, load: Load) -> Identity | None:
        """This pod's identity, or None before the engine is up."""
        engine_id = self.engine_id
        if engine_id is None:
            return None
        settings = self._settings
        return Identity(
            version=VERSION,
            role=settings.role,
            engine_id=engine_id,
            side_channel=SideChannel(host=settings.side_channel_host, port=settings.side_channel_port),
            tp_size=settings.tp_size,
            pp_size=settings.pp_size,
            dp_size=settings.dp_size,
            revision=settings.revision,
            compat_hash=compat_hash,
            mode=settings.mode,
            vllm_version=vllm_version(),
            served_model=settings.served_model,
            draining=draining,
            load=load,
        )

    async def healthy(self) -> bool:
        """Whether the engine answers ``/health`` with 200; an exception or a time-out is a no."""
        if self._outer is None:
            return False
        status = 0

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])

        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": "/health",
            "raw_path": b"/health",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost")],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": {},
            "app": self._outer,
        }
        try:
            async with asyncio.timeout(_HEALTH_SECONDS):
                await self._app(scope, receive, send)
        except Exception:  # whatever the application raises here means that it is not healthy
            return False
        return status == 200


def vllm_version() -> str:
    """Version of the vLLM that runs in this process, or an empty string outside of one."""
    return str(getattr(sys.modules.get("vllm"), "__version__", ""))
