import assert from "node:assert/strict";
import { afterEach, describe, it } from "node:test";

import { Code, ConnectError } from "@connectrpc/connect";

import {
  CaptureMode,
  ErrorReason,
  RefusedError,
  RolloutOwner,
  UnavailableError,
} from "../src/index.js";
import {
  AdmissionService,
  type FinalizeRolloutRequest,
  FinalizerService,
  LedgerService,
} from "../src/stubs.js";
import { FakeServer } from "./fakeServer.js";

interface FakeMesh {
  readonly owner: RolloutOwner;
  readonly calls: [string, object][];
}

/** What the fake Admission throws on its next calls; undefined for an answer. */
let faults: (ConnectError | undefined)[] = [];
/** The mode that the fake Admission opens attempts in; undefined for the one asked for. */
let answeredMode: CaptureMode | undefined;
let running: FakeServer | undefined;

afterEach(async () => {
  faults = [];
  answeredMode = undefined;
  await running?.stop();
});

async function mesh(): Promise<FakeMesh> {
  const calls: [string, object][] = [];
  const attempt = { rolloutId: "r1", captureKey: "r1-a1", attemptNumber: 1 };
  const note = (name: string, request: object): void => {
    calls.push([name, request]);
    const fault = faults.shift();
    if (fault !== undefined) throw fault;
  };
  running = await FakeServer.start((router) => {
    router.service(AdmissionService, {
      openAttempt: (request) => (
        note("open", request), { attempt: { ...attempt, mode: answeredMode ?? request.mode } }
      ),
      closeAttempt: (request) => (note("close", request), { attempt }),
    });
    router.service(LedgerService, {
      awaitSettled: (request) => (note("await", request), { attempt }),
      sealAttempt: (request) => (
        note("seal", request), { attempt: { ...attempt, epoch: 2n, revision: 7n } }
      ),
    });
    router.service(FinalizerService, {
      finalizeRollout: (request) => (
        note("finalize", request), { receipt: { rolloutId: "r1", masked: true } }
      ),
      finalizeGroup: (request) => (note("group", request), { cursor: 4n, rowIds: ["g_g0_s0"] }),
    });
  });
  const { transport } = running.channel;
  const owner = new RolloutOwner(
    { admission: transport, ledger: transport, finalizer: transport },
    { tenant: "t", settleWaitMs: 500, timeoutMs: 2000 },
  );
  return { owner, calls };
}

describe("a rollout's owner", () => {
  it("opens an attempt in the mode that it is told", async () => {
    const { owner, calls } = await mesh();
    await owner.open("r1");
    await owner.open("r1", { mode: CaptureMode.FOREST });
    assert.deepEqual(
      calls.map(([, request]) => "mode" in request && request.mode),
      [CaptureMode.UNSPECIFIED, CaptureMode.FOREST],
    );
  });

  it("takes the chain of a service that knows no modes", async () => {
    const { owner } = await mesh();
    answeredMode = CaptureMode.UNSPECIFIED;
    const opened = await owner.open("r1", { mode: CaptureMode.CHAIN });
    assert.equal(opened.attempt.mode, CaptureMode.UNSPECIFIED);
    await assert.rejects(owner.open("r1", { mode: CaptureMode.FOREST }), RefusedError);
  });

  it("refuses an attempt of another mode than the one asked for", async () => {
    const { owner } = await mesh();
    answeredMode = CaptureMode.CHAIN;
    assert.equal((await owner.open("r1")).attempt.mode, CaptureMode.CHAIN, "any mode will do");
    await assert.rejects(owner.open("r1", { mode: CaptureMode.FOREST }), (error) => {
      assert.ok(error instanceof RefusedError);
      assert.equal(error.reason, ErrorReason.MODE_MISMATCH);
      assert.deepEqual(error.metadata, {
        capture_key: "r1-a1",
        expected: "forest",
        actual: "chain",
      });
      return true;
    });
  });

  it("finishes in order, naming the sealed epoch and revision", async () => {
    const { owner, calls } = await mesh();
    const rollout = await owner.open("r1");
    assert.equal(rollout.captureKey, "r1-a1");
    const outcome = { reward: 0.5, declaredResponseId: "chatcmpl-1" };
    const receipt = await owner.finish(rollout, outcome, { groupId: "g", slot: 3 });
    assert.equal(receipt.masked, true, "a masked receipt is no error");
    assert.deepEqual(
      calls.map(([name]) => name),
      ["open", "close", "await", "seal", "finalize"],
    );
    assert.ok(calls.every(([, request]) => "tenant" in request && request.tenant === "t"));
    const { $typeName: _, scoredResponse, ...named } = calls[4]?.[1] as Record<string, unknown>;
    assert.deepEqual(named, {
      tenant: "t",
      groupId: "g",
      rolloutId: "r1",
      slot: 3,
      captureKey: "r1-a1",
      epoch: 2n,
      revision: 7n,
      result: new Uint8Array(),
      environmentMasked: false,
      maskRefusedSelection: false,
      ...outcome,
    });
    assert.deepEqual(scoredResponse, new Uint8Array());
  });

  it("hands on what the harness says of its calls", async () => {
    const { owner, calls } = await mesh();
    const rollout = await owner.open("r1", { mode: CaptureMode.FOREST });
    const outcome = {
      reward: 1,
      result: new TextEncoder().encode("{}"),
      selection: { callIds: ["a", "b"], terminalCallId: "b" },
      environmentMasked: true,
      maskRefusedSelection: true,
    };
    await owner.finish(rollout, outcome, { groupId: "g", slot: 0 });
    const asked = calls[4]?.[1] as FinalizeRolloutRequest;
    assert.deepEqual(asked.result, outcome.result);
    assert.deepEqual(asked.selection?.callIds, ["a", "b"]);
    assert.equal(asked.selection?.terminalCallId, "b");
    assert.deepEqual([asked.environmentMasked, asked.maskRefusedSelection], [true, true]);
  });

  it("publishes a group, or gives it up with a reason", async () => {
    const { owner, calls } = await mesh();
    assert.equal((await owner.publish("g", 2)).cursor, 4n);
    await owner.abandon("g", 2, "lost");
    const requests = calls.map(([, request]) => request as { abandonReason: string });
    assert.deepEqual(requests.map(({ abandonReason }) => abandonReason), ["", "lost"]);
  });

  it("repeats under one request id while a service is away", async () => {
    const { owner, calls } = await mesh();
    faults = [
      new ConnectError("starting", Code.Unavailable),
      new ConnectError("reset in shutdown", Code.Canceled),
    ];
    await owner.open("r1");
    const ids = calls.map(([, request]) => (request as { requestId: string }).requestId);
    assert.equal(ids.length, 3);
    assert.equal(new Set(ids).size, 1);
  });

  it("repeats no refusal, and nothing once its time is up", async () => {
    const { owner, calls } = await mesh();
    faults = [new ConnectError("no", Code.InvalidArgument)];
    await assert.rejects(owner.open("r1"), RefusedError);
    assert.equal(calls.length, 1);
    await running?.stop();
    await assert.rejects(owner.open("r1"), (error) => {
      assert.ok(error instanceof UnavailableError);
      return error.reason === ErrorReason.UNSPECIFIED;
    });
  });
});
