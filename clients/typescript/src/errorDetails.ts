/** The details of a `google.rpc.Status` that the mesh sends, read from their serialized form. */

import { BinaryReader } from "@bufbuild/protobuf/wire";

/** A serialized detail: its message's full name, and its bytes. */
export interface ErrorDetail {
  readonly type: string;
  readonly value: Uint8Array;
}

/** A field of the request that breaks a rule of its schema. */
export interface FieldViolation {
  readonly field: string;
  readonly description: string;
}

/** What the details of one status say. */
export interface ErrorFacts {
  /** The domain of the first ErrorInfo, or "". */
  domain: string;
  /** Its reason, or "". */
  reason: string;
  /** Its metadata. */
  metadata: Record<string, string>;
  /** The delay of RetryInfo in milliseconds, rounded up; absent without one. */
  retryAfterMs?: number;
  /** The violations of BadRequest. */
  violations: FieldViolation[];
}

/** The domain of every error of the mesh. */
export const DOMAIN = "callforest";

/**
 * Read the details that the contract names (docs/protocol.md, section "Errors"); others are passed
 * over, and so is one that cannot be read.
 */
export function readDetails(details: readonly ErrorDetail[]): ErrorFacts {
  const facts: ErrorFacts = { domain: "", reason: "", metadata: {}, violations: [] };
  for (const { type, value } of details) {
    const read = READERS.get(type);
    if (read === undefined) continue;
    try {
      read(value, facts);
    } catch {
      // The code and the message still hold: an error must not be replaced by one of reading it.
    }
  }
  return facts;
}

type Fields = Readonly<Record<number, (reader: BinaryReader) => void>>;

/** Give each known field to its reader; skip the others. */
function readFields(value: Uint8Array, fields: Fields): void {
  const reader = new BinaryReader(value);
  while (reader.pos < reader.len) {
    const [number, wireType] = reader.tag();
    const read = fields[number];
    if (read === undefined) {
      reader.skip(wireType, number);
    } else {
      read(reader);
    }
  }
}

function readErrorInfo(value: Uint8Array, facts: ErrorFacts): void {
  const metadata: Record<string, string> = {};
  let domain = "";
  let reason = "";
  readFields(value, {
    1: (reader) => (reason = reader.string()),
    2: (reader) => (domain = reader.string()),
    3: (reader) => {
      let key = "";
      let fact = "";
      readFields(reader.bytes(), {
        1: (entry) => (key = entry.string()),
        2: (entry) => (fact = entry.string()),
      });
      metadata[key] = fact;
    },
  });
  if (facts.domain !== DOMAIN) Object.assign(facts, { domain, reason, metadata });
}

function readRetryInfo(value: Uint8Array, facts: ErrorFacts): void {
  let seconds = 0;
  let nanos = 0;
  readFields(value, {
    1: (reader) =>
      readFields(reader.bytes(), {
        1: (delay) => (seconds = Number(delay.int64())),
        2: (delay) => (nanos = delay.int32()),
      }),
  });
  facts.retryAfterMs = seconds * 1000 + Math.ceil(nanos / 1e6);
}

function readBadRequest(value: Uint8Array, facts: ErrorFacts): void {
  readFields(value, {
    1: (reader) => {
      let field = "";
      let description = "";
      readFields(reader.bytes(), {
        1: (violation) => (field = violation.string()),
        2: (violation) => (description = violation.string()),
      });
      facts.violations.push({ field, description });
    },
  });
}

const READERS: ReadonlyMap<string, (value: Uint8Array, facts: ErrorFacts) => void> = new Map([
  ["google.rpc.ErrorInfo", readErrorInfo],
  ["google.rpc.RetryInfo", readRetryInfo],
  ["google.rpc.BadRequest", readBadRequest],
]);
