"""Checks of engine arguments and environment variables: what Prebook owns is refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prebook_operator.api.errors import FieldError
from prebook_operator.api.owned import OWNED_ENV, OWNED_ENV_PREFIX, OWNED_FLAGS, SECRET_ENV, flag_key, owned_flag
from prebook_operator.api.pod_template import EnvVar


def check_args(args: Sequence[str], *, path: str) -> Iterator[FieldError]:
    """Faults of `args`, each by its index."""
    if args and not args[0].startswith("-"):
        yield FieldError(
            f"{path}[0]", f"{args[0]!r} belongs to no option", "Start with an option such as --max-model-len=32768"
        )
    for index, argument in enumerate(args):
        flag = owned_flag(argument)
        if flag is None:
            continue
        given = flag_key(argument)
        message = (
            f"{flag} is set by Prebook" if given == flag else f"{given} may stand for {flag}, which is set by Prebook"
        )
        yield FieldError(f"{path}[{index}]", message, OWNED_FLAGS[flag])


def check_env(env: Sequence[EnvVar], *, path: str) -> Iterator[FieldError]:
    """Faults of `env`, each by its name."""
    for name, count in Counter(variable.name for variable in env).items():
        if count > 1:
            yield FieldError(f"{path}[{name}]", f"is given {count} times", "Keep one")
    for variable in env:
        yield from _variable(variable, path=f"{path}[{variable.name}]")


def _variable(variable: EnvVar, *, path: str) -> Iterator[FieldError]:
    name, source = variable.name, variable.value_from
    if name in OWNED_ENV or name.startswith(OWNED_ENV_PREFIX):
        yield FieldError(
            path,
            "is set by Prebook",
            OWNED_ENV.get(name, f"Remove it: names starting with {OWNED_ENV_PREFIX} are Prebook's"),
        )
    if variable.value is not None and source is not None:
        yield FieldError(path, "has both value and valueFrom", "Keep one")
    if name in SECRET_ENV and variable.value:
        yield FieldError(
            path, "holds a credential as plain text", "Put it into a Secret and use valueFrom.secretKeyRef"
        )
    if source is not None:
        given = [ref for ref in (source.secret_key_ref, source.config_map_key_ref, source.field_ref) if ref is not None]
        if len(given) != 1:
            yield FieldError(
                f"{path}.valueFrom", f"has {len(given)} sources", "Give one of secretKeyRef, configMapKeyRef, fieldRef"
            )
