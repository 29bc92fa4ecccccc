"""What follows from a model's signature alone for every request of it: worked out once per signature, not per request.

Clients send requests of few forms: the same names, datatypes and shapes with other elements. A form that was found to
fit is remembered, so that the next request of that form costs one look-up; whatever is not remembered is compared in
full and may be wrong.
"""

from __future__ import annotations

import sys
from typing import Final

from engines.bundle.signature import Signature
from engines.tensor import TensorSpec
from frontend.inference import RequestedOutput
from frontend.kserve.json_data import HALF_TYPES

MAX_CONTRACTS: Final = 1024
"""Signatures remembered at once; when more come all are forgotten, and those in use are worked out again."""
MAX_FORMS: Final = 64
"""Forms of requests remembered per signature, likewise."""

FormKey = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, datatype and shape of each input, as they were sent."""


class Form:
    """Inputs that fit a signature.

    Attributes:
        order: for each client input its index in the request.
        rows: along the batch axis; 1 if no client input has one.
        sizes_bytes: for each client input the length of its wire form, if that follows from the shape and any bytes of
            it are elements; else -1.
    """

    __slots__ = ("order", "rows", "sizes_bytes")

    def __init__(self, order: tuple[int, ...], rows: int, sizes_bytes: tuple[int, ...]) -> None:
        self.order = order
        self.rows = rows
        self.sizes_bytes = sizes_bytes


class Contract:
    """One signature, prepared for requests.

    Attributes:
        wanted: what a request that lists no outputs wants.
        half_outputs: whether one of them cannot be told in JSON.
        outputs: by name the client output's spec, datatype and index among the executable outputs; -1 if a hook makes
            it.
        variant: the only variant, -1 if there are several or it has variable axes.
        whole_rows: largest number of rows that is executed in one piece.
    """

    __slots__ = ("forms", "half_outputs", "outputs", "signature", "variant", "wanted", "whole_rows")

    def __init__(self, signature: Signature) -> None:
        executable = [spec.name for spec in signature.outputs]
        self.signature = signature
        self.forms: dict[FormKey, Form] = {}
        self.wanted = tuple(RequestedOutput(spec.name) for spec in signature.client_outputs)
        self.half_outputs = any(spec.element.wire in HALF_TYPES for spec in signature.client_outputs)
        self.outputs: dict[str, tuple[TensorSpec, str, int]] = {
            spec.name: (spec, spec.element.wire, executable.index(spec.name) if spec.name in executable else -1)
            for spec in signature.client_outputs
        }
        self.variant = 0 if len(signature.variants) == 1 and not signature.variants[0].sizes else -1
        self.whole_rows = signature.max_rows if signature.coalesces else sys.maxsize

    def remember(self, key: FormKey, form: Form) -> None:
        """Let the next request of this form be known."""
        if len(self.forms) >= MAX_FORMS:
            self.forms.clear()
        self.forms[key] = form


_contracts: dict[int, Contract] = {}


def contract_of(signature: Signature) -> Contract:
    """Return the contract of a signature, the same one each time."""
    # By identity, since to hash a signature means to hash all that is in it (6 us). A contract keeps its signature
    # alive, so nothing else can have that id.
    known = _contracts.get(id(signature))
    if known is None:
        if len(_contracts) >= MAX_CONTRACTS:
            _contracts.clear()
        known = _contracts[id(signature)] = Contract(signature)
    return known
