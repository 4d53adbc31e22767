"""The front door of every engine pod: ASGI middleware that vLLM's own API server loads with ``--middleware``.

In a decode pod it decides per request whether a prefill peer computes the prompt, starts both legs at the same moment
and looks after them; in a prefill pod it accepts legs only from peers that know the model's token. There is no router
process: any gateway may stand in front of the decode pods.

Layers, top to bottom (each imports only what is below it)::

    asgi                             scopes, bodies, who answers what
    exchange | endpoints             one client request | the /prebook/v1 paths
    supervision                      the two legs of one attempt
    legs | client | discovery | sources | control | probe | security | metrics | errors     one concern each
    policy | peertable | params      decisions: pure, no I/O, no clock of their own
    bodies | identity | settings | addresses | reasons | types

What it refuses to do: tokenize, look into the response of the model beyond its first bytes, or keep state about a
request once it was answered (apart from the last few transfer accounts that ``/prebook/v1/status`` shows).

``DispatchMiddleware`` is resolved on use, so that the drain hook, which needs only the settings, starts fast. vLLM uses
the name when it builds its application; an environment that describes no dispatcher ends the start there, with the
reason. (Later, in the class's constructor, the server would swallow the exception and answer every request with 500.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prebook_connector.dispatch.asgi import DispatchMiddleware

__all__ = ["DispatchMiddleware"]


def __getattr__(name: str) -> object:
    if name == "DispatchMiddleware":
        from prebook_connector.dispatch.asgi import DispatchMiddleware
        from prebook_connector.dispatch.settings import Settings

        Settings.from_environment()
        return DispatchMiddleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
