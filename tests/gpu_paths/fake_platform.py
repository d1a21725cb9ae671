"""A GPU that is not there: torch's CUDA, NVML and vLLM's compiled modules, replaced in one process.

It stands on torch's build for the CPU and on the Python files that vLLM's builds have in common, so
that modules which touch a device can be imported and asked without one. Nothing computes on it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from gpu_paths.fake_boards import GIB, Board, Driver

VLLM_VERSION = "0.32.0"
"""Of the CUDA build that seems to be installed; the one for the CPU has a name of its own."""
BOARD_VARIABLE = "HOLDFAST_FAKE_BOARD"
_JETSON_MARK = "/etc/nv_tegra_release"
"""By it vLLM finds a board that NVML does not know."""
_NVML = "vllm.third_party.pynvml"
_COMPILED = frozenset(
    {
        "vllm._C",
        "vllm._C_stable_libtorch",
        "vllm._deepselect_C",
        "vllm._flashkda_C",
        "vllm._flashmla_C",
        "vllm._flashmla_extension_C",
        "vllm._moe_C",
        "vllm._moe_C_stable_libtorch",
        "vllm._qutlass_C",
        "vllm.cumem_allocator",
        "vllm.fs_io_C",
        "vllm.spinloop",
        "vllm.third_party.flashmla.flash_mla_interface",
        "vllm.vllm_flash_attn._vllm_fa2_C",
        "vllm.vllm_flash_attn._vllm_fa3_C",
    }
)
"""What only the CUDA build has, or has in another form."""

_KERNEL_QUERIES = (
    "cutlass_group_gemm_supported",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
)
"""What vLLM asks of its compiled operators while it is imported."""


def import_torch() -> None:
    """Those parts of it that look for CUDA when they are imported, for more of it than is faked."""
    for name in ("_dynamo", "_inductor.standalone_compile", "_inductor.lowering"):
        importlib.import_module(f"torch.{name}")


def pretend(board: Board) -> Driver:
    """Make this process believe that it has `board`, before it imports vLLM.

    There is no way back: call it in a process that is made for it, see `fake_machine`.
    """
    if "vllm" in sys.modules:
        raise RuntimeError("vLLM has looked for a GPU already")
    import_torch()
    driver = Driver(board, board.total_bytes - GIB, board.total_bytes - GIB)
    os.register_at_fork(after_in_child=driver.forked)
    if board.visible_devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = board.visible_devices
    _install_version()
    sys.meta_path.insert(0, _Finder(driver))
    _install_torch(driver)
    if not board.has_nvml:
        _install_jetson()
    if board.is_integrated:
        _install_host(driver)
    return driver


def _install_version() -> None:
    known = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return VLLM_VERSION if distribution_name == "vllm" else known(distribution_name)

    importlib.metadata.version = version


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that are not here: each has every name, and none does anything.

    vLLM's copy of NVIDIA's module is changed once it is loaded.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in _COMPILED:
            return importlib.machinery.ModuleSpec(fullname, self)
        spec = None
        if fullname == _NVML:
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None:
            self._change(spec.loader)
        return spec

    def _change(self, loader: Any) -> None:
        execute = loader.exec_module

        def changed(nvml: ModuleType) -> None:
            execute(nvml)
            _install_nvml(nvml, self._driver)

        loader.exec_module = changed

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: Any = ModuleType(spec.name)
        module.__getattr__ = partial(_nothing, spec.name)
        return module  # type: ignore[no-any-return]  # Any, so that it takes a function

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def _nothing(module: str, name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(f"{module} has no {name}")
    if name[0].isupper():
        return type(name, (), {})
    return lambda *_given, **_named: None


def _install_torch(driver: Driver) -> None:
    """torch's own functions that ask NVML stay, over what the fake NVML says."""
    import torch

    board = driver.board
    torch.version.cuda = "13.0"
    torch.cuda._is_compiled = lambda: True
    torch.cuda._raw_device_count_nvml = lambda: board.count if board.has_nvml else -1
    torch.cuda._raw_device_uuid_nvml = lambda: _uuids(board) if board.has_nvml else None
    torch._C._cuda_isInBadFork = lambda: driver.is_in_bad_fork
    torch.cuda._is_in_bad_fork = lambda: driver.is_in_bad_fork
    torch.cuda.is_initialized = lambda: bool(driver.calls)
    answers = {
        "_cuda_getDeviceCount": lambda: _visible_count(board),
        "_cuda_init": lambda: None,
    }
    for name, answer in answers.items():
        setattr(torch._C, name, _asked(driver, name, answer))
    for name, answer in _cuda_answers(driver).items():
        setattr(torch.cuda, name, _asked(driver, name, answer))
    for name, answer in _accelerator_answers(driver).items():
        setattr(torch.accelerator, name, _asked(driver, name, answer))
    for query in _KERNEL_QUERIES:
        setattr(torch.ops._C, query, lambda _capability: True)
    for kind in ("Event", "Stream"):
        made = {"__init__": _asked(driver, kind, lambda *_given, **_named: None)}
        setattr(torch.cuda, kind, type(kind, (), made))
    # Nothing was allocated, and nothing else is asked for then.
    torch._C._accelerator_isAllocatorInitialized = lambda: False
    # Asked without the driver.
    torch.accelerator.current_accelerator = lambda *_given: torch.device("cuda")


def _cuda_answers(driver: Driver) -> dict[str, Callable[..., Any]]:
    return {
        "_lazy_init": lambda: None,
        "can_device_access_peer": lambda *_devices: True,
        "current_device": lambda: 0,
        "current_stream": lambda *_device: SimpleNamespace(),
        "get_arch_list": lambda: ["sm_90", "sm_100", "sm_120"],
        "get_device_capability": lambda *_device: driver.board.capability,
        "get_device_name": lambda *_device: driver.board.name,
        "get_device_properties": lambda *_device: _properties(driver.board),
        "init": lambda: None,
        "mem_get_info": lambda *_device: (driver.free_bytes, driver.board.total_bytes),
        "set_device": lambda _device: None,
        "synchronize": lambda *_device: None,
    }


def _accelerator_answers(driver: Driver) -> dict[str, Callable[..., Any]]:
    return {
        "current_device_index": lambda: 0,
        "empty_cache": lambda: None,
        "get_memory_info": lambda *_device: (driver.free_bytes, driver.board.total_bytes),
        "set_device_index": lambda _device: None,
        "synchronize": lambda *_device: None,
    }


def _asked(driver: Driver, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*given: Any, **named: Any) -> Any:
        driver.initialise(name)
        return answer(*given, **named)

    return asked


def _properties(board: Board) -> SimpleNamespace:
    major, minor = board.capability
    return SimpleNamespace(
        name=board.name,
        major=major,
        minor=minor,
        total_memory=board.total_bytes,
        is_integrated=int(board.is_integrated),
        multi_processor_count=132,
        shared_memory_per_block_optin=232448,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        L2_cache_size=50 * 1024**2,
        gcnArchName="",
    )


def _install_jetson() -> None:
    is_file: Any = os.path.isfile
    os.path.isfile = lambda path: path == _JETSON_MARK or is_file(path)


def _install_nvml(nvml: Any, driver: Driver) -> None:
    """Have NVIDIA's module answer; of a board without NVML it finds no library by itself."""
    board = driver.board
    if not board.has_nvml:
        return
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetCount = lambda: board.count
    nvml.nvmlDeviceGetHandleByIndex = lambda index: _handle(nvml, board, index)
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: _handle_by_uuid(nvml, board, uuid)
    nvml.nvmlDeviceGetIndex = lambda handle: handle
    nvml.nvmlDeviceGetName = lambda _handle: board.name
    nvml.nvmlDeviceGetUUID = lambda handle: _uuids(board)[handle]
    nvml.nvmlDeviceGetCudaComputeCapability = lambda _handle: board.capability
    nvml.nvmlDeviceGetMemoryInfo = lambda _handle: _memory(nvml, driver)
    nvml.nvmlDeviceGetP2PStatus = lambda *_given: nvml.NVML_P2P_STATUS_OK


def _handle(nvml: Any, board: Board, index: int) -> int:
    if not 0 <= index < board.count:
        raise nvml.NVMLError_InvalidArgument
    return index


def _handle_by_uuid(nvml: Any, board: Board, uuid: str) -> int:
    if uuid == board.visible_devices:
        return 0
    if uuid not in _uuids(board):
        raise nvml.NVMLError_NotFound
    return _uuids(board).index(uuid)


def _memory(nvml: Any, driver: Driver) -> SimpleNamespace:
    if driver.board.is_integrated:
        raise nvml.NVMLError_NotSupported
    total_bytes, free_bytes = driver.board.total_bytes, driver.free_bytes
    return SimpleNamespace(total=total_bytes, free=free_bytes, used=total_bytes - free_bytes)


def _install_host(driver: Driver) -> None:
    import psutil

    virtual_memory = psutil.virtual_memory

    def shared() -> Any:
        return virtual_memory()._replace(
            total=driver.board.total_bytes, available=driver.host_available_bytes
        )

    psutil.virtual_memory = shared


def _uuids(board: Board) -> list[str]:
    return [f"GPU-{index:08x}-0000-0000-0000-000000000000" for index in range(board.count)]


def _visible_count(board: Board) -> int:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return board.count if named is None else len([one for one in named.split(",") if one])
