/**
 * Errors as they cross the wire.
 *
 *     CallforestError          a service refused or failed; has code, reason, metadata
 *     |- UnavailableError      repeat with back-off (UNAVAILABLE, DEADLINE_EXCEEDED)
 *     `- RefusedError          a repeat fails alike, unless retryAfterMs is set
 *
 * Contract: docs/protocol.md, section "Errors".
 */

import { Code, ConnectError } from "@connectrpc/connect";

import {
  DOMAIN,
  type ErrorDetail,
  type ErrorFacts,
  type FieldViolation,
  readDetails,
} from "./errorDetails.js";
import { ErrorReason, ErrorReasonSchema, type Status } from "./stubs.js";

const PREFIX = "ERROR_REASON_";

const REASONS: ReadonlyMap<string, ErrorReason> = new Map(
  ErrorReasonSchema.values.map(({ name, number }) => [name, number]),
);

/** What of an error is known besides its code and message. */
export interface ErrorParts {
  readonly reason?: ErrorReason;
  readonly metadata?: Readonly<Record<string, string>>;
  readonly retryAfterMs?: number | undefined;
  readonly violations?: readonly FieldViolation[];
  readonly cause?: unknown;
}

/** A service refused or failed, or could not be reached. */
export class CallforestError extends Error {
  override readonly name: string = "CallforestError";
  /** The gRPC status code. */
  readonly code: Code;
  /** A value of ErrorReason; UNSPECIFIED when the peer sent none. */
  readonly reason: ErrorReason;
  /** The facts that the reason's comment in the schema names. */
  readonly metadata: Readonly<Record<string, string>>;
  /** When a repeat can succeed, in milliseconds, if the service said so. */
  readonly retryAfterMs: number | undefined;
  /** The fields at fault, for INVALID_MESSAGE. */
  readonly violations: readonly FieldViolation[];

  constructor(code: Code, message: string, parts: ErrorParts = {}) {
    super(message, parts.cause === undefined ? undefined : { cause: parts.cause });
    this.code = code;
    this.reason = parts.reason ?? ErrorReason.UNSPECIFIED;
    this.metadata = parts.metadata ?? {};
    this.retryAfterMs = parts.retryAfterMs;
    this.violations = parts.violations ?? [];
  }

  /** Name code, reason, message and facts in one line. */
  override toString(): string {
    const facts = Object.entries(this.metadata).map(([key, fact]) => ` ${key}=${fact}`);
    return `${Code[this.code]} ${ErrorReason[this.reason]}: ${this.message}${facts.join("")}`;
  }
}

/** The service did not answer, or is not there. Repeat with the same ids. */
export class UnavailableError extends CallforestError {
  override readonly name = "UnavailableError";
}

/** The service refused. A repeat fails alike, unless `retryAfterMs` is set. */
export class RefusedError extends CallforestError {
  override readonly name = "RefusedError";
}

/** Turn the status of an item's result into the error that its caller gets. */
export function errorOfStatus(status: Status): CallforestError {
  const details = status.details.map(({ typeUrl, value }) => ({
    type: typeUrl.slice(typeUrl.lastIndexOf("/") + 1),
    value,
  }));
  const code = status.code in Code ? (status.code as Code) : Code.Unknown;
  return typed(code, status.message, readDetails(details));
}

/**
 * Turn what a call threw into the error that its caller gets.
 *
 * What carries no status comes from the connection: whatever its code, the service is not there,
 * and the outcome is unknown. So is CANCELLED, which comes only when the caller did not cancel: a
 * server that shuts down resets the calls that reach it too late.
 */
export function errorOfCall(thrown: unknown): CallforestError {
  if (thrown instanceof CallforestError) return thrown;
  const error = ConnectError.from(thrown);
  const facts = readDetails(error.details.filter(isIncoming));
  const status = error.metadata.has("grpc-status") && error.code !== Code.Canceled;
  const broken = !status && facts.domain !== DOMAIN && CONNECTION_CODES.has(error.code);
  const code = broken ? Code.Unavailable : error.code;
  return typed(code, error.rawMessage, facts, error);
}

/** Give the error of a service that cannot be reached, or left. */
export function peerUnavailable(peer: string, how: string): UnavailableError {
  return new UnavailableError(Code.Unavailable, `${peer} is not available (${how})`, {
    reason: ErrorReason.PEER_UNAVAILABLE,
    metadata: { peer },
  });
}

/** Give the error of an attempt that is not of the mode that was asked for. */
export function modeMismatch(captureKey: string, asked: string, opened: string): RefusedError {
  const message = `the attempt was opened in mode ${opened}, but ${asked} was asked for`;
  return new RefusedError(Code.FailedPrecondition, message, {
    reason: ErrorReason.MODE_MISMATCH,
    metadata: {
      capture_key: captureKey,
      expected: asked.toLowerCase(),
      actual: opened.toLowerCase(),
    },
  });
}

/** Give the error of an answer that did not come in time. */
export function late(name: string, timeoutMs: number): UnavailableError {
  const message = `${name} did not answer in time; whether it took effect is unknown`;
  return new UnavailableError(Code.DeadlineExceeded, message, {
    reason: ErrorReason.ITEM_DEADLINE,
    metadata: { timeout_ms: String(timeoutMs) },
  });
}

/** Codes that the transport gives to streams and connections that broke. */
const CONNECTION_CODES: ReadonlySet<Code> = new Set([
  Code.Aborted,
  Code.Canceled,
  Code.Internal,
  Code.Unknown,
]);

function isIncoming(detail: ConnectError["details"][number]): detail is ErrorDetail {
  return "type" in detail;
}

function typed(code: Code, message: string, facts: ErrorFacts, cause?: unknown): CallforestError {
  const ours = facts.domain === DOMAIN;
  const parts: ErrorParts = {
    reason: (ours ? REASONS.get(PREFIX + facts.reason) : undefined) ?? ErrorReason.UNSPECIFIED,
    metadata: ours ? facts.metadata : {},
    retryAfterMs: facts.retryAfterMs,
    violations: facts.violations,
    cause,
  };
  const transient = code === Code.Unavailable || code === Code.DeadlineExceeded;
  return new (transient ? UnavailableError : RefusedError)(code, message, parts);
}
