"""Run by `helm test`: the operator is ready, as its Service answers it, and counts what it does."""

import sys
import urllib.error
import urllib.request


def fetch(url: str) -> str:
    """The body of `url`; exits with the reason when it cannot be had within five seconds."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return str(response.read().decode())
    except (urllib.error.URLError, OSError) as error:
        sys.exit(f"{url}: {error}")


ready_url, metrics_url = sys.argv[1:]
fetch(ready_url)
metrics = [line for line in fetch(metrics_url).splitlines() if line.startswith("prebook_")]
if not metrics:
    sys.exit(f"{metrics_url}: no metric of Prebook's")
print(f"ready; {len(metrics)} metrics")
