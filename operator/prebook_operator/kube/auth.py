"""Who we are to the API server: configuration from the pod's service account or a kubeconfig, with tokens that are
read again before they expire.

The official client (`kubernetes.aio`) loads the configuration: it knows service
accounts, kubeconfigs and exec plugins such as EKS's. What it loads serves both our own client and the session that
kopf watches through, so a rotated token reaches both (kopf#1266, kubernetes-client#741)."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import config as aio_config
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from prebook_operator.kube.errors import KubeError

SERVICE_HOST = "KUBERNETES_SERVICE_HOST"


class NoCluster(KubeError):
    """There is neither a service account nor a usable kubeconfig."""


class Credentials:
    """Connection settings of one cluster. Make one per event loop: exec plugins and refreshes run in the loop that
    uses it."""

    def __init__(self, configuration: Configuration, *, kubeconfig: Path | None) -> None:
        self._configuration = configuration
        self._kubeconfig = kubeconfig

    @classmethod
    async def load(cls, kubeconfig: Path | None = None) -> Credentials:
        """From `kubeconfig`, else the pod's service account, else the default kubeconfig. Raises NoCluster with what
        was tried."""
        configuration = Configuration()
        await _fill(configuration, kubeconfig)
        return cls(configuration, kubeconfig=kubeconfig)

    async def reload(self) -> None:
        """Reads token and certificates again, after the server has answered 401."""
        fresh = Configuration()
        await _fill(fresh, self._kubeconfig)
        self._configuration = fresh

    @property
    def server(self) -> str:
        """Base URL of the API server, without a trailing slash."""
        return str(self._configuration.host).rstrip("/")

    @property
    def configuration(self) -> Configuration:
        """The official client's own settings."""
        return self._configuration

    def ssl_context(self) -> ssl.SSLContext:
        """TLS settings, client certificate included, as the official client makes them."""
        context: ssl.SSLContext = RESTClientObject(self._configuration).ssl_context
        return context

    async def authorization(self) -> str | None:
        """Value of the Authorization header; None when a client certificate identifies us. In a pod the token file is
        read again every minute."""
        key = await self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if key:
            return str(key)
        if self._configuration.username:
            return str(self._configuration.get_basic_auth_token())
        return None


async def _fill(configuration: Configuration, kubeconfig: Path | None) -> None:
    try:
        if kubeconfig is None and os.environ.get(SERVICE_HOST):
            aio_config.load_incluster_config(client_configuration=configuration)
        else:
            await aio_config.load_kube_config(
                config_file=str(kubeconfig) if kubeconfig else None, client_configuration=configuration
            )
    except aio_config.ConfigException as error:
        tried = str(kubeconfig) if kubeconfig else "the pod's service account and the default kubeconfig"
        raise NoCluster(f"no cluster to talk to: tried {tried}: {error}") from error
    # Left to the environment, aiohttp would read ~/.netrc and look up proxies anew for every single request, on a
    # thread of its own, and send a password that it finds there.
    configuration.client_session_kwargs = {"trust_env": False}
    if not configuration.proxy:
        configuration.proxy = proxy_of(str(configuration.host))


def proxy_of(server: str) -> str | None:
    """The proxy that the environment (HTTPS_PROXY, NO_PROXY and their like) names for the API server."""
    url = urlsplit(server)
    if url.hostname is None or proxy_bypass(url.hostname):
        return None
    return getproxies().get(url.scheme)


def authenticated_session(
    credentials: Credentials, *, user_agent: str, observe: aiohttp.ClientMiddlewareType
) -> aiohttp.ClientSession:
    """An aiohttp session that adds a fresh Authorization header to every request, for kopf; `observe` sees every
    exchange."""

    async def authorize(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        value = await credentials.authorization()
        if value is not None:
            request.headers["Authorization"] = value
        return await handler(request)

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=credentials.ssl_context()),
        middlewares=(observe, authorize),
        proxy=credentials.configuration.proxy,
        headers={"User-Agent": user_agent},
        read_bufsize=2**18,
    )
