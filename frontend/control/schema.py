"""The control service's messages as compact text (``frontend.descriptors`` says how it is read).

The package carries its version: fields are only ever added, and a change of meaning is a ``v2`` beside it.
"""

from __future__ import annotations

from typing import Final

PACKAGE: Final = "ringserve.control.v1"
SERVICE: Final = f"{PACKAGE}.ControlService"
FILE: Final = "ringserve/control/v1/control.proto"
RPCS: Final = ("ModelControlStatus", "SetModelPolicy", "SetModelResidency", "Compact")
"""Every RPC is unary, takes NameRequest and gives NameResponse."""

SCHEMA: Final = """
message ModelControlStatusRequest
  model 1 string
message ModelControlStatusResponse
  workers 1 WorkerControl*

message WorkerControl
  worker 1 string
  residency_mode 2 string
  discipline 3 string
  sizing 4 string
  models 5 ModelControl*
message ModelControl
  name 1 string
  version 2 string
  weight 3 double
  queue_depth 4 uint64
  dispatch_count 5 uint64
  requests_served 6 uint64
  rows_served 7 uint64
  compute_seconds 8 double
  effective_max_batch 9 uint64
  batch_axis 10 BatchAxis
  residency 11 string
message BatchAxis
  input 1 string
  axis 2 uint32

message SetModelPolicyRequest
  model 1 string
  weight 2 double
message SetModelPolicyResponse
  model 1 string
  weight 2 double
  versions 3 string*

message SetModelResidencyRequest
  model 1 string
  residency 2 string
message SetModelResidencyResponse

message CompactRequest
  reload 1 string*
message CompactResponse
"""
