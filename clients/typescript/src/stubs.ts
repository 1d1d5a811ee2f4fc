/**
 * The generated stubs that this client is made of, in one place.
 *
 * `protoc-gen-es` writes them from `proto/`; harnesses may use them without this client.
 */

export * from "../../../generated/typescript/callforest/capture/v1/attempt_pb.js";
export * from "../../../generated/typescript/callforest/capture/v1/capture_admission_pb.js";
export * from "../../../generated/typescript/callforest/capture/v1/frame_pb.js";
export * from "../../../generated/typescript/callforest/capture/v1/item_pb.js";
export * from "../../../generated/typescript/callforest/capture/v1/receipt_pb.js";
export * from "../../../generated/typescript/callforest/capture/v1/selection_pb.js";
export * from "../../../generated/typescript/callforest/error/v1/error_reason_pb.js";
export * from "../../../generated/typescript/callforest/finalizer/v1/finalizer_service_pb.js";
export * from "../../../generated/typescript/callforest/gateway/v1/gateway_service_pb.js";
export * from "../../../generated/typescript/google/rpc/status_pb.js";
export {
  type AdmitCallsRequest,
  type AdmitCallsResponse,
  AdmissionService,
} from "../../../generated/typescript/callforest/admission/v1/admission_service_pb.js";
export {
  LedgerService,
} from "../../../generated/typescript/callforest/ledger/v1/ledger_service_pb.js";
