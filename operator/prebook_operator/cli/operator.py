"""`prebook operator`: the process that runs in the cluster."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prebook_operator.api import Allow

if TYPE_CHECKING:
    from prebook_operator.cli.main import Subparsers

DESCRIPTION: Final = """\
Watch DisaggregatedModels and keep their pods, Services and the rest as they ask for. Usually the chart runs this in
the cluster; started by hand it uses your kubeconfig, which is good for trying things out.

Several may run: one leads, the others stand by. It writes nothing while nothing changes, and needs no finalizers: while
it is down, models keep serving and can be deleted."""

EXAMPLES: Final = """\
examples:
  prebook operator --namespace default --image localhost/prebook:dev     against the current kubeconfig, one namespace
  prebook operator --all-namespaces --image ghcr.io/you/prebook:0.1.0    everywhere; needs a ClusterRole
  curl -s localhost:8081/readyz; curl -s localhost:8080/metrics          what it says about itself

What models may not do unless it is allowed here: folders of the node (--allow-host-path), the node's namespaces,
privileged containers, further capabilities, other service accounts."""


def register(subparsers: Subparsers) -> None:
    """Adds `operator`."""
    parser = subparsers.add_parser(
        "operator",
        help="run the Kubernetes operator",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_scope(parser)
    _add_allowances(parser)
    _add_process(parser)
    parser.set_defaults(run=run)


def _add_scope(parser: argparse.ArgumentParser) -> None:
    scope = parser.add_argument_group("what to look after")
    where = scope.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--namespace", action="append", default=[], metavar="NAMESPACE", help="watch this namespace; may be repeated"
    )
    where.add_argument("--all-namespaces", action="store_true", help="watch every namespace")
    scope.add_argument(
        "--image",
        default=os.environ.get("OPERATOR_IMAGE"),
        metavar="IMAGE",
        help="image of this operator, which brings the connector into the engines' pods (default: $OPERATOR_IMAGE)",
    )
    scope.add_argument(
        "--kubeconfig", type=Path, metavar="FILE", help="default: the pod's service account, else ~/.kube/config"
    )


def _add_allowances(parser: argparse.ArgumentParser) -> None:
    allow = parser.add_argument_group(
        "what models may ask for", "All off: a model's author gets the privileges of its pods."
    )
    allow.add_argument("--allow-host-path", action="store_true", help="folders of the node as volumes and caches")
    allow.add_argument("--allow-host-namespaces", action="store_true", help="hostNetwork, hostPID, hostIPC")
    allow.add_argument("--allow-privileged", action="store_true", help="privileged containers")
    allow.add_argument(
        "--allow-capability", action="append", default=[], metavar="NAME", help="add this Linux capability"
    )
    allow.add_argument(
        "--allow-service-account", action="append", default=[], metavar="NAME", help="run under this service account"
    )


def _add_process(parser: argparse.ArgumentParser) -> None:
    process = parser.add_argument_group("the process")
    process.add_argument(
        "--lease-namespace",
        default=os.environ.get("POD_NAMESPACE", "default"),
        metavar="NAMESPACE",
        help="where the leader lease lives (default: $POD_NAMESPACE, else default)",
    )
    process.add_argument("--lease-name", default="prebook-operator", metavar="NAME", help="(default: %(default)s)")
    process.add_argument(
        "--health-port", type=int, default=8081, metavar="PORT", help="/healthz and /readyz (default: %(default)s)"
    )
    process.add_argument(
        "--metrics-port", type=int, default=8080, metavar="PORT", help="/metrics (default: %(default)s)"
    )
    process.add_argument("--bind", default="0.0.0.0", metavar="ADDRESS", help="for both (default: %(default)s)")
    process.add_argument(
        "--workers", type=int, default=8, metavar="N", help="models in work at once (default: %(default)s)"
    )
    process.add_argument(
        "--resync", type=float, default=600.0, metavar="SECONDS", help="look at every model this often"
    )
    process.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    process.add_argument("--log-format", choices=("text", "json"), default="text")


def run(arguments: argparse.Namespace) -> int:
    """Runs until told to stop. 0: stopped; 1: no cluster, or a port is taken; 2: arguments."""
    if not arguments.image:
        print(
            "error: --image is missing. Give the image of this operator: the engines' init container copies the "
            "connector from it",
            file=sys.stderr,
        )
        return 2
    # Imported here, so that the other commands do not wait for kopf and the Kubernetes client.
    from prebook_operator.app import Operator
    from prebook_operator.kube.auth import NoCluster
    from prebook_operator.logs import configure
    from prebook_operator.settings import Settings

    configure(level=arguments.log_level, style=arguments.log_format)
    settings = Settings(
        image=arguments.image,
        namespaces=tuple(arguments.namespace),
        lease_namespace=arguments.lease_namespace,
        lease_name=arguments.lease_name,
        own_namespace=os.environ.get("POD_NAMESPACE"),
        kubeconfig=arguments.kubeconfig,
        allow=Allow(
            host_path=arguments.allow_host_path,
            host_namespaces=arguments.allow_host_namespaces,
            privileged=arguments.allow_privileged,
            capabilities=frozenset(arguments.allow_capability),
            service_accounts=frozenset(arguments.allow_service_account),
        ),
        workers=arguments.workers,
        resync=arguments.resync,
        health_port=arguments.health_port,
        metrics_port=arguments.metrics_port,
        bind=arguments.bind,
    )

    async def operate() -> None:
        await Operator(settings).run()

    try:
        asyncio.run(operate())
    except (NoCluster, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
