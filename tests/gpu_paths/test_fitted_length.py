"""Where vLLM fits the model length to the memory, the reservation is for what it ends with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.core.kv_cache_utils import estimate_max_model_len, get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from gpu_paths.fake_memory import GIB, FakeMemory
from gpu_paths.hooked_worker import config, followed, manager
from gpu_paths.world import Scenario, answers
from holdfast import demo
from holdfast.demo.files import ensure_demo_model
from holdfast.worker.agreement import fitted_kv_bytes, fitted_tokens, with_length
from holdfast.workspace import reservers
from holdfast.workspace.plan import MIB, RESERVE_GRANULE_BYTES, Term
from holdfast.workspace.reservers import GROUP, ReserverContext

MAX_TOKENS = 1 << 20
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
WINDOWED = SlidingWindowSpec(
    block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, sliding_window=256
)
CHEAP = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
LAYERS = 32
AVAILABLE_BYTES = 50 * GIB

Declared = Callable[[Callable[[ReserverContext], int]], None]


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Declared:
    """Installs a reserver whose need is what a function makes of its context."""

    def install(need: Callable[[ReserverContext], int]) -> None:
        class Installed(EntryPoint):
            def load(self) -> Any:
                return lambda context: [Term("declared", "test", need(context))]

        point = Installed("test", "test:declare", GROUP)
        monkeypatch.setattr(reservers, "entry_points", lambda **_: metadata.EntryPoints([point]))

    return install


def fitted_config() -> Any:
    """As `--max-model-len auto` resolves it."""
    vllm_config = config(max_model_len=MAX_TOKENS)
    vllm_config.model_config.original_max_model_len = -1
    return vllm_config


@pytest.mark.parametrize("bytes_per_token", [0, 4096, 200_000, 1 << 20])
@pytest.mark.parametrize("ubatches", [1, 2])
def test_the_reservation_is_that_of_the_length_which_vllm_ends_with(
    bytes_per_token: int,
    ubatches: int,
    declared: Declared,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """KV cache and workspaces take the memory there is, and neither is sized for more."""
    FakeMemory().install(monkeypatch)
    declared(lambda context: bytes_per_token * context.max_model_len)
    vllm_config = fitted_config()
    specs = {f"layer.{index}": SPEC for index in range(LAYERS)}
    with followed(tmp_path, monkeypatch, vllm_config=vllm_config, ubatches=ubatches) as worker:
        worker.kv_cache_spec = specs
        worker.available_bytes = AVAILABLE_BYTES
        held: list[int] = []
        worker.profile = lambda: held.append(manager().accounting.held_bytes)
        left_bytes = worker.determine_available_memory()
        (early_bytes,) = held
        late_bytes = manager().accounting.held_bytes - early_bytes
        # What contexts that are reserved for cannot use is left alone: less than one more granule.
        unused_bytes = AVAILABLE_BYTES - left_bytes - late_bytes
        assert 0 <= unused_bytes <= ubatches * RESERVE_GRANULE_BYTES * bool(bytes_per_token)
        # EngineCore keeps one block back.
        usable_bytes = left_bytes - LAYERS * SPEC.page_size_bytes
        tokens = estimate_max_model_len(vllm_config, specs, usable_bytes)
        assert vllm_config.model_config.max_model_len == MAX_TOKENS
        for size_bytes in manager().slot_sizes().values():
            needed_bytes = tokens * bytes_per_token
            # vLLM's length ends with a block, and a reservation with 2 MiB.
            spare_bytes = 3 * SPEC.block_size * bytes_per_token + RESERVE_GRANULE_BYTES
            assert 0 <= size_bytes - needed_bytes <= spare_bytes + 0.01 * needed_bytes
        # As EngineCore tells its workers; what is reserved then is there already.
        vllm_config.model_config.max_model_len = tokens
        sizes = manager().slot_sizes()
        worker.compile_or_warm_up_model()
        assert manager().slot_sizes() == sizes


def test_a_reservation_that_dwarfs_the_kv_cache_leaves_it_room(
    declared: Declared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What 2 MiB hold of the KV cache is many times the length that is reserved for."""
    FakeMemory().install(monkeypatch)
    declared(lambda context: MIB * context.max_model_len)
    vllm_config, specs = fitted_config(), {"layer": CHEAP}
    with followed(tmp_path, monkeypatch, vllm_config=vllm_config) as worker:
        worker.kv_cache_spec = specs
        worker.available_bytes = GIB
        usable_bytes = worker.determine_available_memory() - CHEAP.page_size_bytes
        tokens = estimate_max_model_len(vllm_config, specs, usable_bytes)
        (reserved_bytes,) = manager().slot_sizes().values()
    assert 0.95 * GIB < tokens * MIB <= reserved_bytes <= GIB


@pytest.mark.parametrize("specs", [{}, {"layer": WINDOWED}], ids=["none", "windows"])
def test_a_kv_cache_that_bounds_no_context_is_reserved_for_the_longest(
    specs: dict[str, Any], declared: Declared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what vLLM takes then, even where it does not fit, which vLLM is left to say."""
    FakeMemory().install(monkeypatch)
    declared(lambda context: 4096 * context.max_model_len)
    vllm_config = fitted_config()
    vllm_config.max_in_flight_tokens = 2048
    with followed(tmp_path, monkeypatch, vllm_config=vllm_config) as worker:
        worker.kv_cache_spec = specs
        worker.available_bytes = GIB
        left_bytes = worker.determine_available_memory()
        assert manager().slot_sizes() == {(0, 0): 4096 * MAX_TOKENS}
    assert left_bytes < 0


@pytest.fixture(scope="module")
def demo_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's whole configuration of the demo model, whose length vLLM is to fit."""
    demo.register()
    model = ensure_demo_model(tmp_path_factory.mktemp("fitted"))
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        resolved = AsyncEngineArgs(model=str(model), max_model_len=-1).create_engine_config()
        resolved.cache_config.kv_cache_layout = "LBHNC"  # as EngineCore does before the sizing
        yield resolved


@pytest.mark.parametrize("windows", [0, 2, 3])
def test_engine_core_chooses_no_longer_context(windows: int, demo_config: Any) -> None:
    """vLLM's own fit, with the groups that it makes of full and of windowed layers."""
    longest_tokens = demo_config.model_config.max_model_len
    specs = {f"layer.{index}": SPEC if index >= windows else WINDOWED for index in range(6)}
    available_bytes = 150 * MIB
    tokens = fitted_tokens(demo_config, specs, available_bytes, lambda length: length * 30_000)
    assert 0 < tokens < longest_tokens == demo_config.model_config.max_model_len
    config_of_core = with_length(demo_config, longest_tokens)
    left_bytes = available_bytes - tokens * 30_000
    kv_bytes = fitted_kv_bytes(
        demo_config, specs, left_bytes, tokens, lambda length: max(0, length - tokens)
    )
    get_kv_cache_configs(config_of_core, [specs], [kv_bytes])
    assert 0.9 * tokens <= config_of_core.model_config.max_model_len <= tokens


@pytest.mark.parametrize("available_mib", [(24, 48), (48, 24), (48, 24, 36)])
def test_ranks_reserve_for_the_length_that_fits_in_the_memory_of_each(
    available_mib: tuple[int, ...], declared: Declared, tmp_path: Path
) -> None:
    """vLLM takes the shortest, so that what the poorest would reserve alone is enough for all."""
    declared(lambda context: 4096 * context.max_model_len)

    def said(*mib: int) -> list[str]:
        directory = tmp_path / str(len(mib))
        directory.mkdir()
        sizes_bytes = tuple(size * MIB for size in mib)
        return answers(Scenario(directory, len(mib), available_bytes=sizes_bytes))

    alone = said(min(available_mib))
    assert alone == ["12 MiB, 1 MiB more"]
    assert said(*available_mib) == alone * len(available_mib)


def test_reservers_see_one_length_in_all_that_they_are_shown(
    declared: Declared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two a reserver reads."""
    FakeMemory().install(monkeypatch)
    seen: list[tuple[int, int]] = []

    def need(context: ReserverContext) -> int:
        seen.append((context.max_model_len, context.vllm_config.model_config.max_model_len))
        return 4096 * context.max_model_len

    declared(need)
    with followed(tmp_path, monkeypatch, vllm_config=fitted_config()) as worker:
        worker.kv_cache_spec = {"layer": SPEC}
        worker.available_bytes = GIB
        worker.determine_available_memory()
    assert len(set(seen)) > 2
    assert all(one == other for one, other in seen)


def test_a_length_that_was_given_is_reserved_for_whatever_it_takes(
    declared: Declared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM cuts no length that the user gave, and refuses one that does not fit."""
    FakeMemory().install(monkeypatch)
    declared(lambda context: 4096 * context.max_model_len)
    given = config(max_model_len=MAX_TOKENS)
    with followed(tmp_path, monkeypatch, vllm_config=given) as worker:
        worker.available_bytes = GIB
        assert worker.determine_available_memory() == GIB
        assert manager().slot_sizes() == {(0, 0): 4 * GIB}


def test_where_no_token_fits_vllm_is_left_to_say_so(
    declared: Declared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own error names the flag to raise."""
    FakeMemory().install(monkeypatch)
    declared(lambda context: 4096 * context.max_model_len)
    with followed(tmp_path, monkeypatch, vllm_config=fitted_config()) as worker:
        worker.kv_cache_spec = {"layer": SPEC}
        worker.available_bytes = 100
        assert worker.determine_available_memory() == 100


def test_a_reserver_that_fails_is_told_of_once_for_each_reservation(
    declared: Declared,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not for each length that is tried."""
    FakeMemory().install(monkeypatch)

    def need(context: ReserverContext) -> int:
        raise OSError(context)

    declared(need)
    with followed(tmp_path, monkeypatch, vllm_config=fitted_config()) as worker:
        worker.kv_cache_spec = {"layer": SPEC}
        worker.available_bytes = GIB
        worker.determine_available_memory()
    assert caplog.text.count("Reserver test (test:declare) is left out") == 2
