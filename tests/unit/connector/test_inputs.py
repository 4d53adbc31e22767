"""What comes in from outside: parameters, messages, settings, control requests, handshake requests."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from prebook_connector import control, params, protocol
from prebook_connector import settings as connector_settings
from prebook_connector.install import install, main
from prebook_connector.listener import HandshakeListener
from prebook_connector.recorder import MemoryRecorder

GOOD = {
    "do_remote_prefill": True,
    "transfer_id": "t",
    "remote_engine_id": "e",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(anything | st.dictionaries(st.sampled_from([*GOOD, "do_remote_decode", "tp_size", "pp_size"]), anything))
def test_no_parameters_raise_anything_but_bad_params(value: Any) -> None:
    with contextlib.suppress(params.BadParamsError):
        params.parse(value, base_request_id="r")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"remote_port": 0}, "bad_number"),
        ({"remote_port": "5600"}, "bad_number"),
        ({"remote_port": True}, "bad_number"),
        ({"remote_host": ""}, "bad_text"),
        ({"remote_host": "a\nb"}, "bad_text"),
        ({"remote_engine_id": "x" * 300}, "bad_text"),
        ({"tp_size": -1}, "bad_number"),
        ({"do_remote_decode": True}, "both_roles"),
        ({"do_remote_prefill": "yes"}, "bad_flag"),
    ],
)
def test_bad_parameters_name_their_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(params.BadParamsError) as caught:
        params.parse({**GOOD, **change}, base_request_id="r")
    assert caught.value.reason == reason


def test_missing_parameters_are_missing_not_fatal() -> None:
    for name in ("remote_engine_id", "remote_host", "remote_port"):
        with pytest.raises(params.BadParamsError, match="missing"):
            params.parse({key: value for key, value in GOOD.items() if key != name}, base_request_id="r")


def test_a_router_without_transfer_ids_gets_one_from_the_shared_request_id() -> None:
    decode = params.parse({**GOOD, "transfer_id": None}, base_request_id="cmpl-abc-0")
    prefill = params.parse({"do_remote_decode": True}, base_request_id="cmpl-abc-0")
    assert decode is not None
    assert prefill is not None
    assert decode.transfer_id == prefill.transfer_id == "request:cmpl-abc-0"


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_protocol_errors(payload: bytes) -> None:
    for candidate in (payload, b"PBK" + payload, b"PBK\x01" + payload):
        with contextlib.suppress(protocol.ProtocolError):
            protocol.decode(candidate)


def test_fields_of_a_newer_peer_are_ignored() -> None:
    raw = {"op": "cancel", "transfer_id": "t", "something": [1, 2]}
    assert protocol.decode(b"PBK\x01" + msgspec.msgpack.encode(raw)) == protocol.Cancel("t")


def test_oversized_messages_are_refused_on_both_ways() -> None:
    with pytest.raises(protocol.ProtocolError, match="oversized"):
        protocol.encode(protocol.Cancel("x" * (protocol.MAX_MESSAGE_BYTES + 1)))
    with pytest.raises(protocol.ProtocolError, match="oversized"):
        protocol.decode(b"PBK\x01" + b"x" * protocol.MAX_MESSAGE_BYTES)


@pytest.mark.parametrize("value", [{"lease_seconds": 0}, {"verify": "maybe"}, {"unknown": 1}, []])
def test_settings_errors_name_the_key_and_what_is_allowed(value: Any) -> None:
    with pytest.raises(connector_settings.SettingsError) as caught:
        connector_settings.parse({"prebook": value})
    assert "kv_connector_extra_config.prebook" in str(caught.value)


@pytest.mark.parametrize("line", [b"", b"x", b"[]", b"{}", b'{"op": 1}', b'{"op": "boom"}', b"\xff\xfe", b"[" * 5000])
def test_control_garbage_gets_an_error(line: bytes) -> None:
    def boom(request: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("inside")

    assert control.answer(line, {"boom": boom})["ok"] is False


def test_the_control_socket_outlives_bad_clients(tmp_path: Path) -> None:
    server = control.ControlServer(folder=tmp_path, name="w.sock", handlers={"hi": lambda request: {"echo": request}})
    server.start()
    try:
        for junk in (b"", b"\x00" * 10, b"no newline"):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(server.path))
                client.sendall(junk)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(server.path))
            client.sendall(b'garbage\n{"op": "hi", "n": 1}\n')
            answers = client.makefile("rb")
            assert json.loads(answers.readline())["ok"] is False
            assert json.loads(answers.readline())["echo"]["n"] == 1
        assert server.path.stat().st_mode & 0o777 == 0o600
    finally:
        server.stop()
    assert not server.path.exists()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_side_channel_survives_garbage_and_serves_the_next_peer() -> None:
    port = free_port()
    listener = HandshakeListener(host="127.0.0.1", port=port, payloads={(0, 0): b"payload"}, greeting=b"get")
    listener.start()
    context = zmq.Context()
    try:

        def ask(*frames: bytes, answer: bool = True) -> list[bytes]:
            client = context.socket(zmq.DEALER)
            client.setsockopt(zmq.LINGER, 0)
            client.setsockopt(zmq.RCVTIMEO, 3000 if answer else 100)
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send_multipart(frames)
            return client.recv_multipart()

        good = msgspec.msgpack.encode((b"get", 0, 0))
        for frames in ([b""], [b"", b"\xff"], [b"", msgspec.msgpack.encode([1, 2])], [b"", good, good], [good]):
            with pytest.raises(zmq.Again):
                ask(*frames, answer=False)
        unknown_rank = ask(b"", msgspec.msgpack.encode((b"get", 7, 7)))
        assert unknown_rank[1] == b""
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert ask(b"", good)[1] == b"payload"
        assert listener.refused >= 4
    finally:
        context.destroy(linger=0)
        listener.stop()


def test_a_port_in_use_is_said_with_its_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            HandshakeListener(host="127.0.0.1", port=port, payloads={}, greeting=b"get").start()


def test_installing_twice_leaves_one_working_copy(tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / "prebook_connector" / "stale.py").write_text("")
    destination = install(tmp_path)
    assert (destination / "connector.py").exists()
    assert not (destination / "stale.py").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["prebook_connector"]


def test_installing_to_an_impossible_place_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file")]) == 1
    assert "is the volume mounted" in capsys.readouterr().err


def test_the_recorder_knows_its_metrics() -> None:
    recorder = MemoryRecorder()
    with pytest.raises(KeyError):
        recorder.count("no_such_counter")
    with pytest.raises(ValueError, match="labels"):
        recorder.count("transfers")
    with pytest.raises(ValueError, match="no histogram"):
        recorder.observe("no_such", 1.0)
    recorder.count("transfers", ("committed",))
    recorder.observe("overlap_ratio", 0.5)
    with pytest.raises(ValueError, match="no gauge"):
        recorder.gauge("no_such", 1.0)
    recorder.gauge("booked_blocks", 3.0)
    assert recorder.take() == {
        "counts": {"transfers|committed": 1.0},
        "samples": {"overlap_ratio": [0.5]},
        "gauges": {"booked_blocks": 3.0},
    }
    recorder.gauge("booked_blocks", 3.0)
    assert recorder.take() is None, "an unchanged gauge is no news"
    for record in (lambda: recorder.count("writes"), lambda: recorder.observe("overlap_ratio", 1.0)):
        record()
        assert recorder.take() is not None
        assert recorder.take() is None
    recorder.gauge("booked_blocks", 4.0)
    assert recorder.take() == {"counts": {}, "samples": {}, "gauges": {"booked_blocks": 4.0}}
    assert recorder.totals() == {"transfers|committed": 1.0, "writes": 1.0}
