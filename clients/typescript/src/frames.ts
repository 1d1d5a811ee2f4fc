/**
 * Large payloads in frames: cut by the sender, put together and checked by the receiver.
 *
 * Contract: docs/protocol.md, section "Large payloads".
 */

import { createHash } from "node:crypto";

import { create } from "@bufbuild/protobuf";
import { Code } from "@connectrpc/connect";

import { CallforestError, RefusedError } from "./errors.js";
import {
  ErrorReason,
  type FrameBegin,
  FrameBeginSchema,
  type FrameChunk,
  FrameChunkSchema,
  type FrameEnd,
  FrameEndSchema,
} from "./stubs.js";

/** Largest payload that travels whole, and largest content of one frame, in bytes. */
export const FRAME_BYTES = (1 << 20) - 4096;
/** Largest payload at all, in bytes. */
export const PAYLOAD_BYTES = 64 << 20;

/** One frame, as the body of an item or the outcome of a result holds it. */
export type Frame =
  | { readonly case: "begin"; readonly value: FrameBegin }
  | { readonly case: "chunk"; readonly value: FrameChunk }
  | { readonly case: "end"; readonly value: FrameEnd };

/**
 * Cut a serialized payload into its frames. The chunks are views of it, no copies.
 *
 * @throws RefusedError MESSAGE_TOO_LARGE: it exceeds PAYLOAD_BYTES.
 */
export function framesOf(serialized: Uint8Array): Frame[] {
  if (serialized.length > PAYLOAD_BYTES) {
    const message = "the payload is larger than any that is accepted";
    throw new RefusedError(Code.ResourceExhausted, message, {
      reason: ErrorReason.MESSAGE_TOO_LARGE,
      metadata: { size_bytes: String(serialized.length), limit_bytes: String(PAYLOAD_BYTES) },
    });
  }
  const sizeBytes = BigInt(serialized.length);
  const begin = create(FrameBeginSchema, { sizeBytes, sha256: sha256(serialized) });
  const frames: Frame[] = [{ case: "begin", value: begin }];
  for (let start = 0; start < serialized.length; start += FRAME_BYTES) {
    const content = serialized.subarray(start, start + FRAME_BYTES);
    frames.push({ case: "chunk", value: create(FrameChunkSchema, { content }) });
  }
  frames.push({ case: "end", value: create(FrameEndSchema) });
  return frames;
}

/** How much a FrameAssembler holds at most. */
export interface AssemblerLimits {
  /** Unfinished payloads; 64 unless given. */
  readonly payloadsMax?: number;
  /** Bytes that they announced together; 256 MiB unless given. */
  readonly bytesMax?: number;
}

interface Unfinished {
  readonly begin: FrameBegin;
  readonly chunks: Uint8Array[];
  size: number;
}

/** Puts the frames of many interleaved payloads together. Bounded. */
export class FrameAssembler {
  readonly #payloadsMax: number;
  readonly #bytesMax: number;
  readonly #open = new Map<bigint, Unfinished>();
  #announcedBytes = 0;

  constructor({ payloadsMax = 64, bytesMax = 4 * PAYLOAD_BYTES }: AssemblerLimits = {}) {
    this.#payloadsMax = payloadsMax;
    this.#bytesMax = bytesMax;
  }

  /**
   * Take a frame; give the serialized payload when it was the last, and undefined before.
   *
   * @throws RefusedError FRAME_BROKEN: out of order, too long, or not of the announced size or
   *   digest; the payload is forgotten. OVERLOADED: the bound is reached.
   */
  take(sequence: bigint, frame: Frame): Uint8Array | undefined {
    try {
      switch (frame.case) {
        case "begin":
          this.#begin(sequence, frame.value);
          return undefined;
        case "chunk":
          this.#chunk(sequence, frame.value);
          return undefined;
        case "end":
          return this.#end(sequence);
      }
    } catch (error) {
      this.drop(sequence);
      throw error;
    }
  }

  /** Whether a payload is unfinished. */
  has(sequence: bigint): boolean {
    return this.#open.has(sequence);
  }

  /** Forget a payload, if it is unfinished. */
  drop(sequence: bigint): void {
    const unfinished = this.#open.get(sequence);
    if (unfinished === undefined) return;
    this.#open.delete(sequence);
    this.#announcedBytes -= Number(unfinished.begin.sizeBytes);
  }

  #begin(sequence: bigint, begin: FrameBegin): void {
    if (this.#open.has(sequence)) throw broken(sequence, "no second begin", "begin");
    const size = Number(begin.sizeBytes);
    if (size < 1 || size > PAYLOAD_BYTES || begin.sha256.length !== 32) {
      throw broken(sequence, `a size of 1 to ${PAYLOAD_BYTES}`, String(begin.sizeBytes));
    }
    if (this.#open.size >= this.#payloadsMax || this.#announcedBytes + size > this.#bytesMax) {
      const message = "too many unfinished large payloads in this stream";
      throw new RefusedError(Code.ResourceExhausted, message, {
        reason: ErrorReason.OVERLOADED,
        metadata: { limit: "unfinished_payloads", limit_value: String(this.#payloadsMax) },
        retryAfterMs: 1000,
      });
    }
    this.#announcedBytes += size;
    this.#open.set(sequence, { begin, chunks: [], size: 0 });
  }

  #chunk(sequence: bigint, chunk: FrameChunk): void {
    const unfinished = this.#open.get(sequence);
    if (unfinished === undefined) throw broken(sequence, "begin", "chunk");
    unfinished.chunks.push(chunk.content);
    unfinished.size += chunk.content.length;
    const announced = Number(unfinished.begin.sizeBytes);
    if (unfinished.size > announced) {
      throw broken(sequence, `${announced} bytes`, `${unfinished.size} bytes`);
    }
  }

  #end(sequence: bigint): Uint8Array {
    const unfinished = this.#open.get(sequence);
    if (unfinished === undefined) throw broken(sequence, "begin", "end");
    const announced = Number(unfinished.begin.sizeBytes);
    if (unfinished.size !== announced) {
      throw broken(sequence, `${announced} bytes`, `${unfinished.size} bytes`);
    }
    const serialized = Buffer.concat(unfinished.chunks, unfinished.size);
    const actual = sha256(serialized);
    if (!actual.equals(unfinished.begin.sha256)) {
      const expected = Buffer.from(unfinished.begin.sha256).toString("hex");
      throw broken(sequence, expected, actual.toString("hex"));
    }
    this.drop(sequence);
    return serialized;
  }
}

function sha256(bytes: Uint8Array): Buffer<ArrayBuffer> {
  return createHash("sha256").update(bytes).digest() as Buffer<ArrayBuffer>;
}

function broken(sequence: bigint, expected: string, actual: string): CallforestError {
  const message = `frames of item ${sequence}: expected ${expected}, got ${actual}`;
  return new RefusedError(Code.InvalidArgument, `${message}; send the item again`, {
    reason: ErrorReason.FRAME_BROKEN,
    metadata: { expected, actual },
  });
}
