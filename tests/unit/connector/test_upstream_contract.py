"""What the connector relies on in vLLM, name by name, so that an upgrade says what changed.

When one fails after a vLLM upgrade: read the named upstream code again, adapt ``upstream.py`` (or the hook in
``scheduler.py``/``worker.py``), then change the expectation here and ``SUPPORTED_VLLM``.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the engine extra: vLLM is not installed")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker, metadata, push_scheduler, push_worker
from vllm.model_executor.layers.attention import kv_transfer_utils
from vllm.v1.core.sched import output, scheduler
from vllm.v1.worker import gpu_model_runner, kv_connector_model_runner_mixin

from prebook_connector import upstream
from prebook_connector.connector import PrebookConnector
from prebook_connector.metadata import PrebookMetadata


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("owner", "name", "expected"),
    [
        (base_worker.NixlBaseConnectorWorker, "register_kv_caches", ["self", "kv_caches"]),
        (
            base_worker.NixlBaseConnectorWorker,
            "add_remote_agent",
            ["self", "nixl_agent_meta", "remote_tp_rank", "remote_tp_size", "remote_dcp_size"],
        ),
        (
            base_worker.NixlBaseConnectorWorker,
            "_add_notif_only_remote_agent",
            ["self", "metadata", "remote_tp_size", "remote_dcp_size"],
        ),
        (base_worker.NixlBaseConnectorWorker, "_validate_remote_parallel_config", ["self", "agent_metadata"]),
        (base_worker.NixlBaseConnectorWorker, "_cleanup_remote_engine", ["self", "engine_id", "log_eviction"]),
        (base_worker.NixlBaseConnectorWorker, "_logical_to_kernel_block_ids", ["self", "block_ids", "ratio"]),
        (
            base_worker.NixlBaseConnectorWorker,
            "_map_block_ids_for_block_size_ratio",
            ["self", "local_block_ids", "remote_block_ids", "block_size_ratio"],
        ),
        (push_worker.NixlPushConnectorWorker, "_xfer_blocks_for_req", ["self", "req_id", "meta"]),
        (push_scheduler.NixlPushConnectorScheduler, "get_exchange_clipped_blocks", ["self", "block_ids", "clip_ssm"]),
        (push_scheduler.NixlPushConnectorScheduler, "_get_remote_prefill_token_count", ["self", "num_prompt_tokens"]),
        (push_scheduler.NixlPushConnectorScheduler, "_truncate_request_for_prefill", ["self", "request"]),
    ],
)
def test_signatures(owner: Any, name: str, expected: list[str]) -> None:
    assert parameters(getattr(owner, name)) == expected


def test_only_the_hooks_of_a_layer_ask_whether_there_is_metadata() -> None:
    """PrebookConnector answers "no" to spare a step those hooks, unless it pushes layers."""
    connector = object.__new__(PrebookConnector)
    for watches in (True, False):
        connector._worker = SimpleNamespace(watches_layers=watches)
        connector._connector_metadata = PrebookMetadata()
        assert connector.has_connector_metadata() is watches
    assert "has_connector_metadata()" in inspect.getsource(kv_transfer_utils.maybe_transfer_kv_layer)
    for module in (kv_connector_model_runner_mixin, gpu_model_runner):
        assert "has_connector_metadata" not in inspect.getsource(module)


def test_our_write_has_the_signature_that_upstream_calls() -> None:
    assert parameters(upstream.DataPath._xfer_blocks) == parameters(push_worker.NixlPushConnectorWorker._xfer_blocks)
    source = inspect.getsource(push_worker.NixlPushConnectorWorker._xfer_blocks_for_req)
    for keyword in ("read_spec=", "request_id=", "dst_engine_id=", "remote_request_id=", "local_xfer_side_handle="):
        assert keyword in source
    assert "self._sending_transfers[req_id].extend(handles)" in source


def test_upstream_computes_descriptors_with_the_arguments_that_we_pass() -> None:
    assert parameters(base_worker.NixlBaseConnectorWorker._compute_desc_ids) == [
        "self", "block_ids", "dst_num_blocks", "block_size_ratio", "physical_blocks_per_logical",
        "region_num_blocks", "region_group_ids", "uses_region_group_mapping",
    ]  # fmt: skip
    assert parameters(base_worker.NixlBaseConnectorWorker._apply_prefix_caching)[1:] == [
        "decode_block_ids", "prefill_block_ids", "decode_physical_per_logical", "prefill_physical_per_logical",
    ]  # fmt: skip


def test_the_agent_is_made_where_we_can_take_its_threads_away() -> None:
    source = inspect.getsource(base_worker.NixlBaseConnectorWorker.__init__)
    assert "nixl_agent_config(" in source
    assert "os.sched_setaffinity(0, rsv_cores_for_kv)" in source
    original = base_worker.nixl_agent_config
    with upstream._quiet_agent():
        config = base_worker.nixl_agent_config(num_threads=4, capture_telemetry=True)
        assert (config.enable_pthread, config.num_threads) == (False, 0)
    assert base_worker.nixl_agent_config is original


def test_the_compatibility_hash_contains_the_transfer_mode() -> None:
    assert "transfer_mode" in parameters(metadata.compute_nixl_compatibility_hash)
    source = inspect.getsource(base_worker.NixlBaseConnectorWorker.register_kv_caches)
    assert "transfer_mode=self._TRANSFER_MODE" in source
    assert upstream.NixlPushConnectorScheduler._TRANSFER_MODE == "push"


def test_the_handshake_speaks_upstreams_language() -> None:
    source = inspect.getsource(base_worker.NixlBaseConnectorWorker._nixl_handshake)
    assert "msgspec.msgpack.encode(" in source
    assert "(GET_META_MSG, remote_pp_rank, remote_rank)" in source
    assert {"compatibility_hash", "agent_metadata_bytes"} <= set(metadata.NixlHandshakePayload.__dataclass_fields__)


def test_hooks_exist_with_these_parameters() -> None:
    connector = base.KVConnectorBase_V1
    assert parameters(connector.handle_preemptions) == ["self", "kv_connector_metadata"]
    assert parameters(connector.get_num_new_matched_tokens) == ["self", "request", "num_computed_tokens"]
    assert parameters(connector.update_state_after_alloc) == ["self", "request", "blocks", "num_external_tokens"]
    assert parameters(connector.build_connector_meta) == ["self", "scheduler_output"]
    assert parameters(connector.get_transfer_results) == ["self", "finished_req_ids"]
    assert {"finished_sending", "finished_recving", "failed_recving"} == set(
        base.KVConnectorTransferResults.__dataclass_fields__
    )


def test_the_scheduler_does_with_failures_what_we_rely_on() -> None:
    failed = inspect.getsource(scheduler.Scheduler._handle_failed_recving)
    assert "request.num_computed_tokens = 0" in failed
    waiting = inspect.getsource(scheduler.Scheduler._update_waiting_for_remote_kv)
    assert "self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)" in waiting
    finished = inspect.getsource(scheduler.Scheduler._update_from_kv_xfer_finished)
    assert "assert req_id in self.requests" in finished  # why Results lets only known ids through
    aborted = inspect.getsource(scheduler.Scheduler.finish_requests)
    assert "RequestStatus.WAITING_FOR_REMOTE_KVS" in aborted


def test_the_step_carries_what_the_settling_is_computed_from() -> None:
    fields = output.SchedulerOutput.__dataclass_fields__
    assert {"num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs", "preempted_req_ids"} <= set(fields)
    assert {"kv_connector_block_state", "total_num_scheduled_tokens"} <= set(fields)
    assert {"req_ids", "num_computed_tokens"} <= set(output.CachedRequestData.__dataclass_fields__)


def test_the_worker_asks_for_preemptions_before_it_touches_blocks() -> None:
    from vllm.v1.worker import gpu_model_runner

    source = inspect.getsource(gpu_model_runner.GPUModelRunner.execute_model)
    assert source.index("handle_preemptions") < source.index("_update_states(scheduler_output)")


def test_a_layer_is_told_after_its_kv_was_written_and_regions_are_ordered_by_layer() -> None:
    """What the last chunk's WRITEs by layer stand on (``DataPath.layer_regions``, ``LayerWatch``)."""
    assert parameters(base.KVConnectorBase_V1.save_kv_layer) == [
        "self", "layer_name", "kv_layer", "attn_metadata", "kwargs"
    ]  # fmt: skip
    wrapper = inspect.getsource(kv_transfer_utils.maybe_transfer_kv_layer)
    assert wrapper.index("result = func(*args, **kwargs)") < wrapper.index("connector.save_kv_layer(")
    register = inspect.getsource(base_worker.NixlBaseConnectorWorker.register_kv_caches)
    assert "key=_region_sort_key" in register
    assert "self.region_names.append(layer_name)" in register
    constructor = inspect.getsource(base_worker.NixlBaseConnectorWorker.__init__)
    for name in ("_has_mamba", "_transfer_layer_group_ids", "_layer_specs", "_uses_region_group_mapping"):
        assert f"self.{name}" in constructor, name


def test_an_unknown_version_stops_with_both_versions_named() -> None:
    upstream.check_version("0.32.0+cpu")
    with pytest.raises(upstream.UnsupportedVersionError, match=r"vLLM 0\.33\.1 is installed.*supports 0\.32\.0"):
        upstream.check_version("0.33.1")


def test_the_connector_is_found_by_its_module_path() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = KVTransferConfig(
        kv_connector="PrebookConnector", kv_connector_module_path="prebook_connector.connector", kv_role="kv_producer"
    )
    found = KVConnectorFactory.get_connector_class(config)
    assert found.__name__ == "PrebookConnector"
    assert KVConnectorFactory.supports_hma_config(config)
