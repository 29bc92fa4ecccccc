"""The messages of KServe's gRPC service and of the model configuration it carries, as compact text.

Names, numbers and types are facts of the wire; ``frontend.descriptors`` says how the text is read. Of the model
configuration, only what this server fills or clients look for is declared.
"""

from __future__ import annotations

from typing import Final

PACKAGE: Final = "inference"
SERVICE: Final = "inference.GRPCInferenceService"
CONFIG_FILE: Final = "model_config.proto"
SERVICE_FILE: Final = "grpc_service.proto"

RPCS: Final = (
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "ModelStreamInfer",
    "ModelConfig", "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload",
    "SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
    "CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister", "TraceSetting", "LogSettings",
)  # fmt: skip
"""Every RPC is unary, takes NameRequest and gives NameResponse, but for ``STREAM_RPC``."""
STREAM_RPC: Final = "ModelStreamInfer"
"""Streams ModelInferRequest in and ModelStreamInferResponse out."""

CONFIG_SCHEMA: Final = """
enum DataType
  TYPE_INVALID 0
  TYPE_BOOL 1
  TYPE_UINT8 2
  TYPE_UINT16 3
  TYPE_UINT32 4
  TYPE_UINT64 5
  TYPE_INT8 6
  TYPE_INT16 7
  TYPE_INT32 8
  TYPE_INT64 9
  TYPE_FP16 10
  TYPE_FP32 11
  TYPE_FP64 12
  TYPE_STRING 13
  TYPE_BF16 14

message ModelInstanceGroup
  name 1 string
  kind 4 ModelInstanceGroup.Kind
  count 2 int32
  gpus 3 int32*
  profile 5 string*
  passive 7 bool
  host_policy 9 string
enum ModelInstanceGroup.Kind
  KIND_AUTO 0
  KIND_GPU 1
  KIND_CPU 2
  KIND_MODEL 3

message ModelTensorReshape
  shape 1 int64*

message ModelInput
  name 1 string
  data_type 2 DataType
  format 3 ModelInput.Format
  dims 4 int64*
  reshape 5 ModelTensorReshape
  is_shape_tensor 6 bool
  allow_ragged_batch 7 bool
  optional 8 bool
  is_non_linear_format_io 9 bool
enum ModelInput.Format
  FORMAT_NONE 0
  FORMAT_NHWC 1
  FORMAT_NCHW 2

message ModelOutput
  name 1 string
  data_type 2 DataType
  dims 3 int64*
  reshape 5 ModelTensorReshape
  label_filename 4 string
  is_shape_tensor 6 bool
  is_non_linear_format_io 7 bool

message ModelVersionPolicy
  latest?policy_choice 1 ModelVersionPolicy.Latest
  all?policy_choice 2 ModelVersionPolicy.All
  specific?policy_choice 3 ModelVersionPolicy.Specific
message ModelVersionPolicy.Latest
  num_versions 1 uint32
message ModelVersionPolicy.All
message ModelVersionPolicy.Specific
  versions 1 int64*

message ModelQueuePolicy
  timeout_action 1 ModelQueuePolicy.TimeoutAction
  default_timeout_microseconds 2 uint64
  allow_timeout_override 3 bool
  max_queue_size 4 uint32
enum ModelQueuePolicy.TimeoutAction
  REJECT 0
  DELAY 1

message ModelDynamicBatching
  preferred_batch_size 1 int32*
  max_queue_delay_microseconds 2 uint64
  preserve_ordering 3 bool
  priority_levels 4 uint64
  default_priority_level 5 uint64
  default_queue_policy 6 ModelQueuePolicy
  priority_queue_policy 7 map<uint64,ModelQueuePolicy>

message ModelSequenceBatching
  max_sequence_idle_microseconds 1 uint64

message ModelEnsembling
  step 1 ModelEnsembling.Step*
message ModelEnsembling.Step
  model_name 1 string
  model_version 2 int64
  input_map 3 map<string,string>
  output_map 4 map<string,string>
  model_namespace 5 string

message ModelParameter
  string_value 1 string

message ModelTransactionPolicy
  decoupled 1 bool

message ModelResponseCache
  enable 1 bool

message ModelConfig
  name 1 string
  platform 2 string
  backend 17 string
  runtime 25 string
  version_policy 3 ModelVersionPolicy
  max_batch_size 4 int32
  input 5 ModelInput*
  output 6 ModelOutput*
  dynamic_batching?scheduling_choice 11 ModelDynamicBatching
  sequence_batching?scheduling_choice 13 ModelSequenceBatching
  ensemble_scheduling?scheduling_choice 15 ModelEnsembling
  instance_group 7 ModelInstanceGroup*
  default_model_filename 8 string
  parameters 14 map<string,ModelParameter>
  model_transaction_policy 19 ModelTransactionPolicy
  response_cache 24 ModelResponseCache
"""

SERVICE_SCHEMA: Final = """
message ServerLiveRequest
message ServerLiveResponse
  live 1 bool
message ServerReadyRequest
message ServerReadyResponse
  ready 1 bool
message ModelReadyRequest
  name 1 string
  version 2 string
message ModelReadyResponse
  ready 1 bool
message ServerMetadataRequest
message ServerMetadataResponse
  name 1 string
  version 2 string
  extensions 3 string*
message ModelMetadataRequest
  name 1 string
  version 2 string
message ModelMetadataResponse
  name 1 string
  versions 2 string*
  platform 3 string
  inputs 4 ModelMetadataResponse.TensorMetadata*
  outputs 5 ModelMetadataResponse.TensorMetadata*
message ModelMetadataResponse.TensorMetadata
  name 1 string
  datatype 2 string
  shape 3 int64*

message InferParameter
  bool_param?parameter_choice 1 bool
  int64_param?parameter_choice 2 int64
  string_param?parameter_choice 3 string
  double_param?parameter_choice 4 double
  uint64_param?parameter_choice 5 uint64
message InferTensorContents
  bool_contents 1 bool*
  int_contents 2 int32*
  int64_contents 3 int64*
  uint_contents 4 uint32*
  uint64_contents 5 uint64*
  fp32_contents 6 float*
  fp64_contents 7 double*
  bytes_contents 8 bytes*
message ModelInferRequest
  model_name 1 string
  model_version 2 string
  id 3 string
  parameters 4 map<string,InferParameter>
  inputs 5 ModelInferRequest.InferInputTensor*
  outputs 6 ModelInferRequest.InferRequestedOutputTensor*
  raw_input_contents 7 bytes*
message ModelInferRequest.InferInputTensor
  name 1 string
  datatype 2 string
  shape 3 int64*
  parameters 4 map<string,InferParameter>
  contents 5 InferTensorContents
message ModelInferRequest.InferRequestedOutputTensor
  name 1 string
  parameters 2 map<string,InferParameter>
message ModelInferResponse
  model_name 1 string
  model_version 2 string
  id 3 string
  parameters 4 map<string,InferParameter>
  outputs 5 ModelInferResponse.InferOutputTensor*
  raw_output_contents 6 bytes*
message ModelInferResponse.InferOutputTensor
  name 1 string
  datatype 2 string
  shape 3 int64*
  parameters 4 map<string,InferParameter>
  contents 5 InferTensorContents
message ModelStreamInferResponse
  error_message 1 string
  infer_response 2 ModelInferResponse

message ModelConfigRequest
  name 1 string
  version 2 string
message ModelConfigResponse
  config 1 ModelConfig

message ModelStatisticsRequest
  name 1 string
  version 2 string
message StatisticDuration
  count 1 uint64
  ns 2 uint64
message InferStatistics
  success 1 StatisticDuration
  fail 2 StatisticDuration
  queue 3 StatisticDuration
  compute_input 4 StatisticDuration
  compute_infer 5 StatisticDuration
  compute_output 6 StatisticDuration
  cache_hit 7 StatisticDuration
  cache_miss 8 StatisticDuration
message InferResponseStatistics
  compute_infer 1 StatisticDuration
  compute_output 2 StatisticDuration
  success 3 StatisticDuration
  fail 4 StatisticDuration
  empty_response 5 StatisticDuration
  cancel 6 StatisticDuration
message InferBatchStatistics
  batch_size 1 uint64
  compute_input 2 StatisticDuration
  compute_infer 3 StatisticDuration
  compute_output 4 StatisticDuration
message MemoryUsage
  type 1 string
  id 2 int64
  byte_size 3 uint64
message ModelStatistics
  name 1 string
  version 2 string
  last_inference 3 uint64
  inference_count 4 uint64
  execution_count 5 uint64
  inference_stats 6 InferStatistics
  batch_stats 7 InferBatchStatistics*
  memory_usage 8 MemoryUsage*
  response_stats 9 map<string,InferResponseStatistics>
message ModelStatisticsResponse
  model_stats 1 ModelStatistics*

message ModelRepositoryParameter
  bool_param?parameter_choice 1 bool
  int64_param?parameter_choice 2 int64
  string_param?parameter_choice 3 string
  bytes_param?parameter_choice 4 bytes
message RepositoryIndexRequest
  repository_name 1 string
  ready 2 bool
message RepositoryIndexResponse
  models 1 RepositoryIndexResponse.ModelIndex*
message RepositoryIndexResponse.ModelIndex
  name 1 string
  version 2 string
  state 3 string
  reason 4 string
message RepositoryModelLoadRequest
  repository_name 1 string
  model_name 2 string
  parameters 3 map<string,ModelRepositoryParameter>
message RepositoryModelLoadResponse
message RepositoryModelUnloadRequest
  repository_name 1 string
  model_name 2 string
  parameters 3 map<string,ModelRepositoryParameter>
message RepositoryModelUnloadResponse

message SystemSharedMemoryStatusRequest
  name 1 string
message SystemSharedMemoryStatusResponse
  regions 1 map<string,SystemSharedMemoryStatusResponse.RegionStatus>
message SystemSharedMemoryStatusResponse.RegionStatus
  name 1 string
  key 2 string
  offset 3 uint64
  byte_size 4 uint64
message SystemSharedMemoryRegisterRequest
  name 1 string
  key 2 string
  offset 3 uint64
  byte_size 4 uint64
message SystemSharedMemoryRegisterResponse
message SystemSharedMemoryUnregisterRequest
  name 1 string
message SystemSharedMemoryUnregisterResponse
message CudaSharedMemoryStatusRequest
  name 1 string
message CudaSharedMemoryStatusResponse
  regions 1 map<string,CudaSharedMemoryStatusResponse.RegionStatus>
message CudaSharedMemoryStatusResponse.RegionStatus
  name 1 string
  device_id 2 uint64
  byte_size 3 uint64
message CudaSharedMemoryRegisterRequest
  name 1 string
  raw_handle 2 bytes
  device_id 3 int64
  byte_size 4 uint64
message CudaSharedMemoryRegisterResponse
message CudaSharedMemoryUnregisterRequest
  name 1 string
message CudaSharedMemoryUnregisterResponse

message TraceSettingRequest
  settings 1 map<string,TraceSettingRequest.SettingValue>
  model_name 2 string
message TraceSettingRequest.SettingValue
  value 1 string*
message TraceSettingResponse
  settings 1 map<string,TraceSettingResponse.SettingValue>
message TraceSettingResponse.SettingValue
  value 1 string*
message LogSettingsRequest
  settings 1 map<string,LogSettingsRequest.SettingValue>
message LogSettingsRequest.SettingValue
  bool_param?parameter_choice 1 bool
  uint32_param?parameter_choice 2 uint32
  string_param?parameter_choice 3 string
message LogSettingsResponse
  settings 1 map<string,LogSettingsResponse.SettingValue>
message LogSettingsResponse.SettingValue
  bool_param?parameter_choice 1 bool
  uint32_param?parameter_choice 2 uint32
  string_param?parameter_choice 3 string
"""
