"""What the environment may say about the way to the API server: a proxy, once; a password, never."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from aiohttp import web

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


async def hear(credentials: Credentials, url: str) -> None:
    """One request of our own client and one of the session that kopf watches through."""
    transport = ClusterTransport(credentials, user_agent="test")
    request = Request(method="GET", path="/version", query={}, headers={}, body=None, timeout=10)
    assert (await transport.send(request)).status == 200
    await transport.close()

    async def observe(request, handler):
        return await handler(request)

    async with (
        authenticated_session(credentials, user_agent="test", observe=observe) as session,
        session.get(f"{url}/version") as response,
    ):
        assert response.status == 200


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, list[web.BaseRequest]]]:
    """A server that answers everything, as a proxy does: its URL, and what it was asked."""
    heard: list[web.BaseRequest] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        heard.append(request)
        return web.json_response({})

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", heard
    await runner.cleanup()


async def test_no_password_of_a_netrc_file_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[str, list[web.BaseRequest]]
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    url, heard = server
    await hear(await Credentials.load(kubeconfig(tmp_path, url)), url)
    assert [request.headers.get("Authorization") for request in heard] == [None, None]


async def test_requests_and_watches_go_through_the_same_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[str, list[web.BaseRequest]]
) -> None:
    url, heard = server
    monkeypatch.setenv("HTTP_PROXY", url)
    await hear(await Credentials.load(kubeconfig(tmp_path, "http://api.invalid")), "http://api.invalid")
    assert [request.host for request in heard] == ["api.invalid", "api.invalid"]
