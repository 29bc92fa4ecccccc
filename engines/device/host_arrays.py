"""Arrays of the host device: numpy's, but as strict as a GPU's about what they mix with and when they are used.

A GPU's array module refuses host arrays as operands, refuses numpy's functions on its arrays, and lacks some functions.
Code that passes here by luck would fail there, so the same is refused here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from engines.device.base import Span
from engines.device.host_order import DeviceMisuse
from engines.tensor import NDArray

_NAMES: Final = """
    abs add amax amin arange argmax argmin array asarray ascontiguousarray broadcast_to clip concatenate copysign cos
    divmod empty equal exp expand_dims floor ceil full greater greater_equal isfinite isnan less less_equal log
    logical_and logical_not logical_or logical_xor matmul max maximum mean min minimum moveaxis multiply negative
    nonzero not_equal ones ones_like pad power prod remainder repeat reshape round sign sin split sqrt squeeze stack
    subtract sum swapaxes take tanh tile transpose true_divide where zeros zeros_like absolute any all cumsum mod sort
    argsort einsum tensordot floor_divide flip square"""
FUNCTIONS: Final = frozenset(_NAMES.split())
"""Functions of numpy that CuPy has under the same name; a test compares the list with CuPy where it is installed."""

_ENTRANCES: Final = frozenset({"array", "asarray", "ascontiguousarray"})
"""Functions that bring a host array to the device."""


class Running(threading.local):
    """What the thread is executing as the device."""

    title: str = ""
    in_graph: bool = False
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()


running = Running()


class HostArrays:
    """The array module of the host device."""

    inf = np.inf
    newaxis = None

    class lib:  # noqa: N801 - a module's name
        class stride_tricks:  # noqa: N801
            @staticmethod
            def as_strided(array: Any, shape: Any = None, strides: Any = None) -> Any:
                return _call(np.lib.stride_tricks.as_strided, "as_strided", (array, shape, strides), {})

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name, None)
        if isinstance(found, type) and (issubclass(found, np.generic) or found in (np.finfo, np.iinfo, np.dtype)):
            return found
        if name not in FUNCTIONS or found is None:
            raise AttributeError(f"the device's array module has no '{name}'")
        return lambda *args, **kwargs: _call(found, name, args, kwargs)


class DeviceArray(np.ndarray[Any, np.dtype[Any]]):
    """An array in "device" memory."""

    def get(self) -> NDArray:
        """Return a copy on the host. Not inside a graph: it would have to wait."""
        if running.in_graph:
            raise DeviceMisuse(f"'{running.title}' copies to the host inside a graph")
        return np.array(self.view(np.ndarray))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        _require_running(ufunc.__name__)
        opened = [_opened(array, ufunc.__name__) for array in inputs]
        return _closed(getattr(ufunc, method)(*opened, **_open_all(kwargs, ufunc.__name__)))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise TypeError(f"numpy.{function.__name__} does not take device arrays; use the device's array module")

    def __setitem__(self, key: Any, value: Any) -> None:
        _require_running("assignment")
        self.view(np.ndarray)[key] = _opened(value, "assignment")


def on_device(array: NDArray) -> DeviceArray:
    """Return the array as one of the device."""
    return array.view(DeviceArray)


def _call(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _require_running(name)
    entrance = name in _ENTRANCES
    if name == "take":
        # A GPU wraps an index that is out of range instead of raising.
        kwargs = {"mode": "wrap", **kwargs}
    opened = [_opened(value, name, entrance) for value in args]
    return _closed(function(*opened, **_open_all(kwargs, name)))


def _open_all(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: _opened(value, name) for key, value in kwargs.items()}


def _opened(value: Any, name: str, entrance: bool = False) -> Any:
    """Return a value as numpy takes it."""
    if isinstance(value, DeviceArray):
        return value.view(np.ndarray)
    if isinstance(value, np.ndarray) and not entrance:
        raise TypeError(f"{name}: a host array of shape {value.shape} was given where the device needs its own")
    if isinstance(value, (list, tuple)):
        return type(value)(_opened(part, name, entrance) for part in value)
    return value


def _closed(value: Any) -> Any:
    """Return what numpy returned as the device's."""
    if isinstance(value, (list, tuple)):
        return type(value)(_closed(part) for part in value)
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value).view(DeviceArray)
    return value


def _require_running(name: str) -> None:
    if not running.title:
        raise DeviceMisuse(f"{name}: arrays of the device are used inside 'launch' only (rule 6)")
