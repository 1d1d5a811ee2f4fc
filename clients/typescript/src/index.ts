/** Callforest for Node: run rollouts over gRPC. */

export { Code } from "@connectrpc/connect";

export { type Channel, MESSAGE_BYTES_MAX, openChannel } from "./channel.js";
export { type FieldViolation } from "./errorDetails.js";
export {
  CallforestError,
  errorOfCall,
  errorOfStatus,
  RefusedError,
  UnavailableError,
} from "./errors.js";
export { FRAME_BYTES, type Frame, FrameAssembler, framesOf, PAYLOAD_BYTES } from "./frames.js";
export {
  COMPLETION_TIMEOUT_MS,
  type CompleteOptions,
  GatewayClient,
  type MeasureOptions,
} from "./gateway.js";
export { ItemStream, type ItemStreamOptions, type SendOptions } from "./itemStream.js";
export {
  type GroupSlot,
  type OpenOptions,
  type OpenRollout,
  type OwnerOptions,
  type OwnerTransports,
  RolloutOwner,
  type RolloutOutcome,
} from "./rollout.js";
export { admissions, completions, measures, type StreamSpec } from "./streamSpec.js";
export { CaptureMode, CompletionApi, ErrorReason, type Receipt, ReceiptSchema } from "./stubs.js";
export { callUnary } from "./unary.js";
