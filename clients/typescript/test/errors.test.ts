import assert from "node:assert/strict";
import { describe, it } from "node:test";

import { create } from "@bufbuild/protobuf";
import { BinaryWriter, WireType } from "@bufbuild/protobuf/wire";
import { Code, ConnectError } from "@connectrpc/connect";

import {
  ErrorReason,
  errorOfCall,
  errorOfStatus,
  RefusedError,
  UnavailableError,
} from "../src/index.js";
import { StatusSchema } from "../src/stubs.js";
import { statusOf } from "./fakeServer.js";

describe("a status", () => {
  it("becomes an error with code, reason and metadata", () => {
    const metadata = { capture_key: "r1", state: "sealed" };
    const error = errorOfStatus(statusOf(9, "ATTEMPT_CLOSED", { metadata }));
    assert.ok(error instanceof RefusedError);
    assert.equal(error.code, Code.FailedPrecondition);
    assert.equal(error.reason, ErrorReason.ATTEMPT_CLOSED);
    assert.deepEqual({ ...error.metadata }, metadata);
    assert.equal(error.retryAfterMs, undefined);
    assert.equal(
      error.toString(),
      "FailedPrecondition ATTEMPT_CLOSED: said the fake capture_key=r1 state=sealed",
    );
  });

  it("says when to repeat, in milliseconds", () => {
    const error = errorOfStatus(statusOf(8, "OVERLOADED", { retryMs: 1250 }));
    assert.equal(error.retryAfterMs, 1250);
    assert.ok(error instanceof RefusedError);
  });

  for (const code of [Code.Unavailable, Code.DeadlineExceeded]) {
    it(`of ${Code[code]} may be repeated`, () => {
      assert.ok(errorOfStatus(statusOf(code, "DRAINING")) instanceof UnavailableError);
    });
  }

  it("of another domain, or with an unknown reason, has no reason of ours", () => {
    const foreign = errorOfStatus(statusOf(9, "ATTEMPT_CLOSED", { domain: "elsewhere" }));
    const unknown = errorOfStatus(statusOf(9, "NEVER_HEARD_OF", { metadata: { a: "b" } }));
    assert.equal(foreign.reason, ErrorReason.UNSPECIFIED);
    assert.equal(unknown.reason, ErrorReason.UNSPECIFIED);
    assert.deepEqual({ ...unknown.metadata }, { a: "b" });
  });

  it("with a code that does not exist is UNKNOWN and refused", () => {
    const error = errorOfStatus(create(StatusSchema, { code: 99, message: "what" }));
    assert.equal(error.code, Code.Unknown);
    assert.ok(error instanceof RefusedError);
  });

  it("names the fields at fault", () => {
    const violation = new BinaryWriter().tag(1, WireType.LengthDelimited).string("slot");
    violation.tag(2, WireType.LengthDelimited).string("too large");
    const bad = new BinaryWriter().tag(1, WireType.LengthDelimited).bytes(violation.finish());
    const status = statusOf(3, "INVALID_MESSAGE");
    const typeUrl = "type.googleapis.com/google.rpc.BadRequest";
    const details = [...status.details, { typeUrl, value: bad.finish() }];
    const error = errorOfStatus(create(StatusSchema, { code: 3, message: "no", details }));
    assert.deepEqual(error.violations, [{ field: "slot", description: "too large" }]);
  });

  it("whose details cannot be read keeps its code and message", () => {
    const typeUrl = "type.googleapis.com/google.rpc.ErrorInfo";
    const details = [{ typeUrl, value: Uint8Array.of(0x0a, 0xff) }];
    const error = errorOfStatus(create(StatusSchema, { code: 9, message: "no", details }));
    assert.deepEqual([error.code, error.message], [Code.FailedPrecondition, "no"]);
  });
});

describe("what a call throws", () => {
  for (const code of [Code.Aborted, Code.Canceled, Code.Internal, Code.Unknown]) {
    it(`as ${Code[code]} without a status is a connection that broke`, () => {
      const error = errorOfCall(new ConnectError("stream destroyed", code));
      assert.ok(error instanceof UnavailableError);
      assert.equal(error.code, Code.Unavailable);
    });
  }

  it("with a status is what the service says", () => {
    const trailers = { "grpc-status": "13" };
    const error = errorOfCall(new ConnectError("fault", Code.Internal, trailers));
    assert.equal(error.code, Code.Internal);
    assert.ok(error instanceof RefusedError);
  });

  it("as CANCELLED came from a server that shuts down", () => {
    const reset = new ConnectError("", Code.Canceled, { "grpc-status": "1" });
    assert.ok(errorOfCall(reset) instanceof UnavailableError);
  });
});
