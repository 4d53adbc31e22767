"""What the environment may say about the way to the API server: a proxy, once; a password, never."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from prebook_operator.kube.auth import Credentials, authenticated_session
from prebook_operator.kube.transport import ClusterTransport, Request


def kubeconfig(folder: Path, server: str, **cluster: str) -> Path:
    path = folder / "config"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("exempt", "expected"),
    [("", "http://proxy:3128"), ("api.example", None), ("other.example", "http://proxy:3128"), (".example", None)],
)
async def test_the_environments_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exempt: str, expected: str | None
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", exempt)
    credentials = await Credentials.load(kubeconfig(tmp_path, "https://api.example:6443"))
    assert credentials.configuration.proxy == expected


async def test_the_kubeconfigs_own_proxy_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    path = kubeconfig(tmp_path, "https://api.example:6443", **{"proxy-url": "http://mine:8080"})
    credentials = await Credentials.load(path)
    assert credentials.configuration.proxy == "http://mine:8080"


async def test_no_password_of_a_netrc_file_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aiohttp import web

    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    heard: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        heard.append(request.headers.get("Authorization"))
        return web.json_response({})

    application = web.Application()
    application.router.add_get("/version", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        credentials = await Credentials.load(kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
        transport = ClusterTransport(credentials, user_agent="test")
        request = Request(method="GET", path="/version", query={}, headers={}, body=None, timeout=10)
        assert (await transport.send(request)).status == 200
        await transport.close()

        async def observe(request, handler):
            return await handler(request)

        async with (
            authenticated_session(credentials, user_agent="test", observe=observe) as session,
            session.get(f"http://127.0.0.1:{port}/version") as response,
        ):
            assert response.status == 200
    finally:
        await runner.cleanup()
    assert heard == [None, None]
