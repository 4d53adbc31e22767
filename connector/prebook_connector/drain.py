"""``python3 -m prebook_connector.drain --timeout N``: the preStop hook of an engine pod.

Asks the pod's own dispatcher to take no new work and waits until nothing is under way any more. The answer is asked
for, not slept for; only a decode pod first lets a moment pass (``--settle``), because Services and balancers learn with
a delay that it is going, and requests that still arrive in that time are served.

Exit status: 0 drained, or nothing there to drain; 1 the time was over first; 2 the hook itself is set up wrongly.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from prebook_connector.dispatch.security import TOKEN_HEADER, PeerToken
from prebook_connector.dispatch.settings import Role, Settings, SettingsError

_SLACK = 5.0
_MAX_ANSWER = 1 << 16


def drain(settings: Settings, *, timeout: float) -> int:
    """Asks the dispatcher at ``settings.bind`` to drain within ``timeout`` seconds. Returns the exit status."""
    request = urllib.request.Request(
        f"http://{settings.bind}/prebook/v1/drain?timeout={timeout}",
        method="POST",
        data=b"",
        headers={TOKEN_HEADER: PeerToken(settings.token_file).current()},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout + _SLACK) as response:
            answer = json.loads(response.read(_MAX_ANSWER))
    except urllib.error.HTTPError as error:
        print(f"drain was refused with HTTP status {error.code}", file=sys.stderr)
        return 2
    except TimeoutError:
        print(f"no answer within {timeout + _SLACK:.0f} s", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"nothing to drain: the API server is not there ({error})")
        return 0
    except ValueError:
        print("drain was answered with something that is not JSON", file=sys.stderr)
        return 2
    drained = isinstance(answer, dict) and answer.get("drained") is True
    print("drained" if drained else f"not drained within {timeout:.0f} s: {json.dumps(answer)}")
    return 0 if drained else 1


def main(
    argv: list[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="prebook_connector.drain", description="Drains this engine pod.")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for work that is under way")
    parser.add_argument(
        "--settle", type=float, default=2.0, help="seconds that a decode pod keeps serving before it starts to drain"
    )
    arguments = parser.parse_args(argv)
    try:
        settings = Settings.from_environment(environment)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    settle = min(arguments.settle, arguments.timeout) if settings.role is Role.DECODE else 0.0
    sleep(settle)
    return drain(settings, timeout=max(0.0, arguments.timeout - settle))


if __name__ == "__main__":
    sys.exit(main())
