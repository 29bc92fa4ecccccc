"""Request parameters, read the same way whichever protocol carried them (protocols.md 1.6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from engines.errors import InvalidInput
from frontend.inference import Parameter

MAX_TIMEOUT_US: Final = 30 * 24 * 3600 * 1_000_000
"""Longest ``timeout`` a request may name: thirty days. More is a unit mistake, and would overflow a deadline in ns."""
MAX_PRIORITY: Final = 2**32 - 1
EXPLAIN: Final = "ringserve_explain"
_SIMPLE: Final = (bool, int, float, str)
_RESERVED: Final = "triton_"
_ALLOWED_RESERVED: Final = "triton_enable_empty_final_response"
"""Set by one load generator on every gRPC request; without decoupled models it changes nothing."""


@dataclass(slots=True)
class Options:
    """What the parameters of a request mean; made for that request alone.

    Attributes:
        values: every parameter as sent, for hooks.
        timeout_us: 0 if none.
        binary_default: whether outputs that say nothing are wanted in binary form.
        explain: whether the response should tell about the batch the request ran in.
    """

    values: dict[str, Parameter]
    timeout_us: int = 0
    binary_default: bool = False
    explain: bool = False


def read_parameters(parameters: Mapping[str, Any]) -> Options:
    """Check request-level parameters and return their meaning; unknown keys are kept, sequence keys mean nothing here.

    Raises:
        InvalidInput: a value is no string, number or boolean; a known key has a wrong type or range; a reserved key.
    """
    values: dict[str, Parameter] = {}
    timeout_us = 0
    binary_default = False
    explain = False
    for key, value in parameters.items():
        if not isinstance(value, _SIMPLE):
            raise InvalidInput(
                f"parameter '{key}': expected a string, a number or a boolean, got {_name_of_type(value)}"
            )
        if key == "timeout":
            timeout_us = _whole(key, value, MAX_TIMEOUT_US, " microseconds")
        elif key == "priority":
            _whole(key, value, MAX_PRIORITY, "")
        elif key == "binary_data_output":
            binary_default = flag_parameter(key, value, "request")
        elif key == EXPLAIN:
            explain = flag_parameter(key, value, "request")
        elif key.startswith(_RESERVED) and key != _ALLOWED_RESERVED:
            raise InvalidInput(
                f"parameter keys starting with 'triton_' are reserved for system usage, got '{key}'; "
                f"only '{_ALLOWED_RESERVED}' may be set"
            )
        values[key] = value
    return Options(values, timeout_us, binary_default, explain)


def flag_parameter(key: str, value: object, where: str) -> bool:
    """Return a boolean parameter.

    Raises:
        InvalidInput: it is anything else; names the key and ``where`` it stood.
    """
    if not isinstance(value, bool):
        raise InvalidInput(f"{where}: parameter '{key}' must be a boolean, got {_name_of_type(value)}")
    return value


def classification_parameter(value: object, output: str) -> int:
    """Return how many classes an output should list, at least 1.

    Raises:
        InvalidInput: not a positive integer.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_PRIORITY:
        raise InvalidInput(f"output '{output}': parameter 'classification' must be a positive integer, got {value!r}")
    return value


def _whole(key: str, value: Parameter, most: int, unit: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"parameter '{key}' must be an integer{unit and ' of' + unit}, got {_name_of_type(value)}")
    if not 0 <= value <= most:
        raise InvalidInput(f"parameter '{key}' must be between 0 and {most}{unit}, got {value}")
    return value


def _name_of_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"the boolean {str(value).lower()}"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the string {value[:80]!r}"
        case list():
            return "a list"
        case _:
            return "an object"
