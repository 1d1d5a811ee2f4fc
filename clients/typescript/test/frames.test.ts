import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { create } from "@bufbuild/protobuf";

import { FRAME_BYTES, type Frame, FrameAssembler, framesOf, PAYLOAD_BYTES } from "../src/frames.js";
import { CallforestError, ErrorReason } from "../src/index.js";
import { FrameBeginSchema, FrameChunkSchema } from "../src/stubs.js";

function payload(size: number, seed = 1): Uint8Array {
  return Uint8Array.from({ length: size }, (_, index) => (index * 31 + seed) % 251);
}

function begin(sizeBytes: number, sha256 = new Uint8Array(32)): Frame {
  const value = create(FrameBeginSchema, { sizeBytes: BigInt(sizeBytes), sha256 });
  return { case: "begin", value };
}

function chunk(size: number): Frame {
  return { case: "chunk", value: create(FrameChunkSchema, { content: payload(size) }) };
}

function refusal(reason: ErrorReason): (error: unknown) => boolean {
  return (error) => error instanceof CallforestError && error.reason === reason;
}

describe("cutting", () => {
  for (const size of [1, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES]) {
    it(`gives ${size} bytes back`, () => {
      const serialized = payload(size);
      const frames = framesOf(serialized);
      assert.equal(frames.length, 2 + Math.ceil(size / FRAME_BYTES));
      const assembler = new FrameAssembler();
      const given = frames.map((frame) => assembler.take(7n, frame));
      assert.ok(given.slice(0, -1).every((one) => one === undefined), "nothing before the end");
      assert.deepEqual(Buffer.from(given.at(-1) ?? []), Buffer.from(serialized));
      assert.equal(assembler.has(7n), false);
    });
  }

  it("refuses what no peer takes", () => {
    const tooLarge = new Uint8Array(PAYLOAD_BYTES + 1);
    assert.throws(() => framesOf(tooLarge), refusal(ErrorReason.MESSAGE_TOO_LARGE));
  });
});

describe("putting together", () => {
  it("takes frames of several payloads in turn", () => {
    const first = framesOf(payload(FRAME_BYTES + 5, 1));
    const second = framesOf(payload(FRAME_BYTES + 9, 2));
    const assembler = new FrameAssembler();
    const sizes = first.flatMap((frame, index) => {
      const other = second[index];
      assert.ok(other);
      return [assembler.take(1n, frame)?.length, assembler.take(2n, other)?.length];
    });
    assert.deepEqual(sizes.slice(-2), [FRAME_BYTES + 5, FRAME_BYTES + 9]);
  });

  const end = framesOf(payload(1)).at(-1);
  assert.ok(end);
  const cases: [string, Frame[]][] = [
    ["a chunk without a begin", [chunk(1)]],
    ["an end without a begin", [end]],
    ["a second begin", [begin(4), begin(4)]],
    ["more than was announced", [begin(4), chunk(5)]],
    ["less than was announced", [begin(4), chunk(3), end]],
    ["another digest", [begin(4), chunk(4), end]],
    ["nothing", [begin(0)]],
    ["more than any payload has", [begin(PAYLOAD_BYTES + 1)]],
    ["a digest of another length", [begin(4, new Uint8Array(31))]],
  ];
  for (const [what, frames] of cases) {
    it(`refuses ${what} and forgets the payload`, () => {
      const assembler = new FrameAssembler();
      assert.throws(
        () => frames.forEach((frame) => assembler.take(1n, frame)),
        refusal(ErrorReason.FRAME_BROKEN),
      );
      assert.equal(assembler.has(1n), false);
    });
  }

  it("holds only so many payloads, and so many bytes", () => {
    for (const limits of [{ payloadsMax: 2 }, { bytesMax: 9 }]) {
      const assembler = new FrameAssembler(limits);
      assembler.take(1n, begin(4));
      assembler.take(2n, begin(4));
      assert.throws(() => assembler.take(3n, begin(4)), refusal(ErrorReason.OVERLOADED));
      assembler.drop(1n);
      assembler.take(3n, begin(4));
      assert.ok(assembler.has(3n));
    }
  });
});
