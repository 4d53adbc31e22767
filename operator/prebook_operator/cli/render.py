"""`prebook render FILE`: the Kubernetes objects that the operator would make, as YAML."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from prebook_operator.api.manifest_yaml import to_yaml
from prebook_operator.cli.files import read_model
from prebook_operator.plan import revision_of
from prebook_operator.render import cluster_context, render

if TYPE_CHECKING:
    from prebook_operator.cli.main import Subparsers

DEFAULT_IMAGE: Final = "ghcr.io/prebook/operator:0.1.0"

DESCRIPTION: Final = """\
Print the Kubernetes objects that the operator would make from a DisaggregatedModel. Nothing is contacted and nothing is
changed. The Secret with the peer token is left out: the operator makes it once, with a random token."""

EXAMPLES: Final = """\
examples:
  prebook render model.yaml                         all objects
  prebook render model.yaml | kubectl diff -f -     compare with what runs
  prebook render --revision model.yaml              only the revision; the same text is the suffix of object names
  cat model.yaml | prebook render -                 from standard input"""


def register(subparsers: Subparsers) -> None:
    """Adds `render`."""
    parser = subparsers.add_parser(
        "render",
        help="print the Kubernetes objects of a model",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="file with a DisaggregatedModel, or - for standard input")
    parser.add_argument("--namespace", "-n", help="namespace of the objects (default: the file's, else default)")
    parser.add_argument(
        "--operator-image", default=DEFAULT_IMAGE, help="image that brings the connector (default: %(default)s)"
    )
    parser.add_argument("--revision", action="store_true", help="print only the revision")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the objects."""
    model = read_model(arguments.file)
    if arguments.revision:
        print(revision_of(model).rev8)
        return 0
    namespace = arguments.namespace or model.metadata.namespace or "default"
    manifests = render(model, cluster_context(namespace, operator_image=arguments.operator_image))
    print(to_yaml(manifests), end="")
    return 0
