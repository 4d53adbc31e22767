"""Runs inside a client pod (`python3 - ARGUMENTS < client.py`) and talks to the front Service as any client would.

`chat SECONDS`: asks until SECONDS have passed (at least once), one request after the other, each of them another
prompt. Prints one JSON line a request: {"status", "text", "transfer", "local", "seconds", "error"}. `get URL`: prints
the body of a GET.
"""

import json
import sys
import time
import urllib.error
import urllib.request

URL = "http://smollm2:8000/v1/chat/completions"
QUESTION = "What is the capital of France? Answer with one word."


def ask(number: int) -> dict[str, object]:
    """Send one chat request and say what came of it; errors are results here, not exceptions."""
    # The number keeps prompts apart, or the second would find its KV blocks in decode's prefix cache and move nothing.
    system = f"You are assistant number {number}. You answer questions about geography truthfully and briefly. " * 4
    body = {
        "model": "smollm2",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}],
        "max_tokens": 12,
        "temperature": 0,
    }
    request = urllib.request.Request(URL, json.dumps(body).encode(), {"Content-Type": "application/json"})
    started = time.monotonic()
    answer: dict[str, object] = {"status": 0, "text": "", "transfer": None, "local": None, "error": None}
    try:
        with urllib.request.urlopen(request, timeout=180) as response:
            answer["status"] = response.status
            answer["transfer"] = response.headers.get("x-prebook-transfer")
            answer["local"] = response.headers.get("x-prebook-local")
            answer["text"] = json.load(response)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        answer |= {"status": error.code, "error": error.read().decode(errors="replace")[:500]}
    except (OSError, ValueError, KeyError) as error:
        answer["error"] = repr(error)
    return answer | {"seconds": round(time.monotonic() - started, 2)}


def main() -> None:
    """Entry point."""
    if sys.argv[1] == "get":
        with urllib.request.urlopen(sys.argv[2], timeout=30) as response:
            print(response.read().decode())
        return
    until, number = time.monotonic() + float(sys.argv[2]), int(sys.argv[3])
    while True:
        print(json.dumps(ask(number)), flush=True)
        number += 1
        if time.monotonic() >= until:
            return


main()
