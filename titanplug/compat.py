"""Shims for versions of other libraries, and nothing else.

Importing this module imports neither torch nor Lightning.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import io
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from threading import Lock
from types import ModuleType
from typing import Any

from titanplug.errors import MissingExtraError, TitanplugError

MINIMUM_TORCH = "2.11"
_LAST_COLLECTIVE_S = 0.05


def require_torch(minimum: str = MINIMUM_TORCH) -> None:
    """Check the installed torch without importing it.

    Args:
        minimum: lowest version that will do, as ``"major.minor"``. Development builds of a version
            count as that version.

    Raises:
        TitanplugError: the installed torch is older.
    """
    installed = version("torch")
    if _release(installed) < _release(minimum):
        raise TitanplugError(
            f"torch {installed} is installed: titanplug needs torch {minimum} or newer. "
            f"Run: pip install 'torch>={minimum}'"
        )


def require_extra(module_name: str, extra: str) -> ModuleType:
    """Import a module that one of titanplug's extras installs.

    Args:
        module_name: full name of the module, for example ``"datasets"``.
        extra: the extra that brings it, for example ``"data"``.

    Returns:
        The module.

    Raises:
        MissingExtraError: the module is not installed. An installed module that fails to import
            raises its own error.
    """
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A dependency that is missing inside an installed module is another error.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise MissingExtraError(
            f"The module {module_name!r} is not installed: it comes with the extra {extra!r}. "
            f"Run: pip install 'titanplug[{extra}]'",
            name=module_name,
        ) from error


def on_import(module_name: str, callback: Callable[[], object]) -> None:
    """Run ``callback`` once, right after ``module_name`` has been imported.

    It runs at once where the module is there already. An error in the callback fails that import.
    This keeps ``import titanplug`` light: what has to be registered with Lightning is registered
    when the user imports Lightning.

    Args:
        module_name: full name of the module.
        callback: called without arguments.
    """
    if module_name in sys.modules:
        callback()
    else:
        _finder.add(module_name, callback)


def let_strategy_validate_settings() -> None:
    """Ask a strategy that has ``validate_settings(world_size, precision)`` in the Trainer's constructor.

    Lightning 2.6 judges the precision before it asks the strategy: it refuses with a list of its own
    where the strategy is an instance, and on CPU it turns 16-mixed into bf16-mixed where the strategy is
    given by name. Strategies without that method keep Lightning's rules. Done once for the process.
    """
    from lightning.pytorch.trainer.connectors import accelerator_connector

    connector_class = accelerator_connector._AcceleratorConnector
    original = connector_class._validate_precision_choice
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def validate(connector: Any) -> None:
        ask = getattr(connector.strategy, "validate_settings", None)
        if ask is None:
            original(connector)
            return
        plugin = connector._precision_plugin_flag
        world_size = len(connector._parallel_devices) * connector._num_nodes_flag
        ask(world_size, connector._precision_flag if plugin is None else plugin.precision)

    connector_class._validate_precision_choice = validate  # type: ignore[assignment]


def tell_namespaces_apart() -> None:
    """Name the cause where a module of ``pytorch_lightning`` is given to a Trainer of ``lightning``.

    Lightning 2.6 means to, but looks at the class alone, not at those it inherits from. Done once for the
    process.
    """
    from lightning.pytorch.utilities import compile as checks

    original = checks._check_mixed_imports
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def check(instance: object) -> None:
        packages = {cls.__module__.partition(".")[0] for cls in type(instance).__mro__}
        if "pytorch_lightning" not in packages:
            original(instance)
            return
        raise TypeError(
            f"{type(instance).__qualname__} is a LightningModule of `pytorch_lightning`, the Trainer is of "
            "`lightning`: these are two packages with classes of their own. Import both from `lightning`, "
            "for which TitanStrategy is."
        )

    checks._check_mixed_imports = check


def hide_warnings_of_lightning() -> None:
    """Leave out a warning to Lightning's developers that torch 2.13 prints on every rank (2.6 asks so)."""
    warnings.filterwarnings(
        "ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", category=FutureWarning
    )


def keep_subclasses_apart_in_compile_cache() -> None:
    """Compile again in each process what takes tensor subclasses.

    torch 2.13 finds a function in its cache on disk that was compiled for plain tensors, and the other way
    round: torchao's optimizers fail in the second process that steps.
    """
    import torch._functorch.config

    torch._functorch.config.enable_autograd_cache = False


@functools.cache
def let_collectives_end_before_exit() -> None:
    """Give gloo's threads the interpreter's lock once more when this process ends.

    They need it to drop the tensors of a collective, which may be after that has returned. A thread that
    still waits for it when the interpreter is finalized is ended inside a destructor, and the process
    aborts (torch 2.13: "terminate called without an active exception").
    """
    atexit.register(time.sleep, _LAST_COLLECTIVE_S)


def saved_values(content: memoryview, num_bytes: int) -> memoryview | None:
    """The values of one tensor in what ``torch.save`` wrote of it, without a copy.

    None where they aren't the only ones, as of a tensor subclass. ``torch.load`` can map a file only.
    """
    import torch

    file: Any = _View(content)
    reader: Any = torch._C.PyTorchFileReader(file)
    if not num_bytes or not reader.has_record("data/0") or reader.has_record("data/1"):
        return None
    if reader.get_record_size("data/0") != num_bytes:
        return None
    begin = reader.get_record_offset("data/0")
    return content[begin : begin + num_bytes]


class _View(io.RawIOBase):
    """Bytes in memory as a file."""

    def __init__(self, content: memoryview) -> None:
        super().__init__()
        self._content = content
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._content)}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, target: Any) -> int:
        part = self._content[self._position : self._position + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)


@contextmanager
def one_group_for_equal_ranks() -> Iterator[None]:
    """Inside, device meshes that are made share a process group wherever it has the same ranks.

    torch makes a group for each axis and view, one for each rank alone where the degree is 1. Under gloo each
    has a thread that wakes up a hundred times a second; under NCCL each in use has buffers.
    """
    from torch.distributed import device_mesh

    own = device_mesh.new_group
    known: dict[Any, Any] = {}

    def new_group(ranks: Any = None, **options: Any) -> Any:
        # All ranks make all groups in one order, so all find the same ones here.
        alike = {name: value for name, value in options.items() if name != "group_desc"}
        key = (None if ranks is None else tuple(ranks), repr(alike))
        if key not in known:
            known[key] = own(ranks=ranks, **options)
        return known[key]

    device_mesh.new_group = new_group  # type: ignore[assignment]
    try:
        yield
    finally:
        device_mesh.new_group = own


def split_backward() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two halves of torch's backward, of the input and of the weights, for zero-bubble schedules.

    They stand behind its own pipeline runtime and are not exported (2.11 to 2.14).
    """
    from torch.distributed.pipelining import _backward

    return _backward.stage_backward_input, _backward.stage_backward_weight


def flash_attention_cuda(query: Any, key: Any, value: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    """CUDA's flash attention with its log-sum-exp, which has no public function (2.11 to 2.14).

    Args:
        query: (B, H, Sq, K), in a half type.
        key: (B, Hkv, Sk, K).
        value: (B, Hkv, Sk, K).
        causal: query i sees keys 0 to i.
        scale: of the scores.
    """
    import torch

    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, False, scale=scale
    )
    return out, lse


def flash_attention_backward_cuda(
    grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, causal: bool, scale: float
) -> tuple[Any, Any, Any]:
    """The backward of :func:`flash_attention_cuda`; without dropout it uses no random state."""
    import torch

    unused = torch.empty(2, dtype=torch.uint64, device=query.device)
    lengths = query.shape[2], key.shape[2]
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, out, lse, None, None, *lengths, 0.0, causal, unused, unused[:0], scale=scale
    )
    return dq, dk, dv


@contextmanager
def torch_ring_attention(*, zigzag: bool, float32: bool) -> Iterator[tuple[Any, Any]]:
    """Forward and backward of torch's own ring attention, behind its context-parallel API (2.11 to 2.14).

    Args:
        zigzag: sequences are in zigzag order.
        float32: put parts together in float32; else in the dtype of the inputs.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as api

    options = api._cp_options
    before = options.enable_load_balance, options.convert_to_f32
    options.enable_load_balance, options.convert_to_f32 = zigzag, float32
    try:
        yield api._templated_ring_attention, api._templated_ring_attention_backward
    finally:
        options.enable_load_balance, options.convert_to_f32 = before


def _release(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a version: expected 'major.minor', for example '2.11'.")
    return int(match[1]), int(match[2])


class _ImportFinder(MetaPathFinder):
    """Finds the awaited modules through the other finders and wraps their loaders."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._callbacks: dict[str, list[Callable[[], object]]] = {}

    def add(self, module_name: str, callback: Callable[[], object]) -> None:
        with self._lock:
            self._callbacks.setdefault(module_name, []).append(callback)
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._callbacks:
            return None
        for finder in list(sys.meta_path):
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(fullname, path, target)
            if isinstance(spec, ModuleSpec):
                if spec.loader is not None:
                    spec.loader = _NotifyingLoader(spec.loader, self)
                return spec
        return None

    def run_callbacks(self, module_name: str) -> None:
        with self._lock:
            callbacks = self._callbacks.pop(module_name, [])
            if not self._callbacks and self in sys.meta_path:
                sys.meta_path.remove(self)
        for callback in callbacks:
            callback()


class _NotifyingLoader(Loader):
    """Stands in for a module's loader until the module runs, then gives it back its own."""

    def __init__(self, loader: Loader, finder: _ImportFinder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # runpy and find_spec's callers ask for more than Loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module must see its own loader: resources, pickling and inspect ask it for more.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.run_callbacks(module.__name__)


_finder = _ImportFinder()
