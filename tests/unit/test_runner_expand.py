"""References and mount paths in the text of a pod spec."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prebook_operator.local.expand import expand_references, path_rewriter


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(POD_IP):8000", "127.0.0.2:8000"),
        ('{"host":"$(POD_IP)","x":"$(NOPE)"}', '{"host":"127.0.0.2","x":"$(NOPE)"}'),
        ("$$(POD_IP)", "$(POD_IP)"),
        ("$$$(POD_IP)", "$127.0.0.2"),
        ("$POD_IP ${POD_IP} $", "$POD_IP ${POD_IP} $"),
        ("$(POD_IP", "$(POD_IP"),
    ],
)
def test_references_follow_the_rule_of_kubernetes(text: str, expected: str) -> None:
    assert expand_references(text, variables={"POD_IP": "127.0.0.2"}) == expected


def test_a_replaced_value_is_not_expanded_again() -> None:
    assert expand_references("$(A)", variables={"A": "$(B)", "B": "x"}) == "$(B)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/run/prebook", "/tmp/v/run"),
        ("/run/prebook/worker.sock", "/tmp/v/run/worker.sock"),
        ("file:///run/prebook/peers.json", "file:///tmp/v/run/peers.json"),
        (
            '{"control_dir":"/run/prebook","token":"/etc/token/token"}',
            '{"control_dir":"/tmp/v/run","token":"/tmp/v/token/token"}',
        ),
        ("--dir=/run/prebook,/etc/token", "--dir=/tmp/v/run,/tmp/v/token"),
        ("/run/prebook-other", "/run/prebook-other"),
        ("/run/prebook.d", "/run/prebook.d"),
        ("/var/run/prebook", "/var/run/prebook"),
        ("~/run/prebook", "~/run/prebook"),
        ("host/run/prebook", "host/run/prebook"),
        ("/run/prebook/inner/x", "/tmp/v/inner/x"),
        ("/run/prebook/innermost", "/tmp/v/run/innermost"),
    ],
)
def test_paths_change_at_path_boundaries_only(text: str, expected: str) -> None:
    rewrite = path_rewriter(
        {"/run/prebook": "/tmp/v/run", "/run/prebook/inner/": "/tmp/v/inner", "/etc/token": "/tmp/v/token"}
    )
    assert rewrite(text) == expected


def test_what_was_put_in_is_not_rewritten_again() -> None:
    assert path_rewriter({"/a": "/b/a", "/b": "/c"})("/a:/b") == "/b/a:/c"


@given(st.text(alphabet='ab/.-_: "=', max_size=40))
def test_text_without_the_mount_is_left_alone(text: str) -> None:
    rewrite = path_rewriter({"/mnt/volume": "/tmp/x"})
    assert rewrite(text) == text
    assert rewrite(f"/mnt/volume {text}") == f"/tmp/x {text}"
