import assert from "node:assert/strict";
import { afterEach, describe, it } from "node:test";

import type { MessageInitShape } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";

import { CompletionApi, GatewayClient, UnavailableError } from "../src/index.js";
import {
  type CompletionCall,
  GatewayService,
  type MeasureRequest,
  type MeasureResultSchema,
} from "../src/stubs.js";
import { FakeGateway, FakeServer, type Taken } from "./fakeServer.js";

const ending: (() => Promise<void>)[] = [];

afterEach(async () => {
  for (const end of ending.splice(0).reverse()) await end();
});

function clientOf(server: FakeServer): GatewayClient {
  ending.push(() => server.stop());
  const client = new GatewayClient(server.channel.transport, "t");
  ending.push(() => client.close());
  return client;
}

type Result = MessageInitShape<typeof MeasureResultSchema>;

/** Count a request's bytes as its tokens. */
async function* counted(
  requests: AsyncIterable<MeasureRequest>,
  taken: CompletionCall[],
): AsyncGenerator<{ results: Result[] }> {
  for await (const { items } of requests) {
    const results: Result[] = [];
    for (const { context, body } of items) {
      if (body.case !== "call") continue;
      taken.push(body.value);
      const value = { promptTokenCount: body.value.request.length, isExact: true };
      results.push({
        sequence: context?.sequence ?? 0n,
        outcome: { case: "measured", value },
      });
    }
    yield { results };
  }
}

describe("a gateway's client", () => {
  it("measures calls that are not made", async () => {
    const taken: CompletionCall[] = [];
    const server = await FakeServer.start((router) => {
      router.service(GatewayService, { measure: (requests) => counted(requests, taken) });
    });
    const client = clientOf(server);
    const request = new TextEncoder().encode('{"messages":[]}');
    const measured = await client.measure("k", request, CompletionApi.CHAT, {
      continuesCallId: "c1",
    });
    assert.equal(measured.promptTokenCount, request.length);
    assert.equal(measured.isExact, true);
    assert.deepEqual(
      taken.map((call) => [call.captureKey, call.continuesCallId, call.historyIsWhole]),
      [["k", "c1", false]],
    );
  });

  it("names the call that a request continues, or none", async () => {
    const gateway = new FakeGateway(({ context }: Taken) => [
      { sequence: context.sequence, outcome: { case: "completion", value: { callId: "c2" } } },
    ]);
    const client = clientOf(await FakeServer.start(gateway.routes));
    const request = { messages: [] };
    const api = CompletionApi.CHAT;
    await client.complete("k", request);
    await client.complete("k", request, api, { continuesCallId: "c1" });
    await client.complete("k", request, api, { continuesCallId: "c1", historyIsWhole: true });
    assert.deepEqual(
      gateway.taken.map(({ call }) => [call?.continuesCallId, call?.historyIsWhole]),
      [
        [undefined, false],
        ["c1", false],
        ["c1", true],
      ],
    );
  });

  it("sends a call with a key again when its stream broke, and no other", async () => {
    const gateway = new FakeGateway(({ context }: Taken, stream) => {
      if (stream === 1) throw new ConnectError("gone", Code.Unavailable);
      const value = { callId: "c2" };
      return [{ sequence: context.sequence, outcome: { case: "completion", value } }];
    });
    const client = clientOf(await FakeServer.start(gateway.routes));
    const request = { messages: [] };
    const api = CompletionApi.CHAT;
    const made = await client.complete("k", request, api, { idempotencyKey: "one" });
    assert.equal(made.callId, "c2");
    assert.deepEqual(
      gateway.taken.map(({ call }) => call?.idempotencyKey),
      ["one", "one"],
    );
    const other = new FakeGateway(() => {
      throw new ConnectError("gone", Code.Unavailable);
    });
    const keyless = clientOf(await FakeServer.start(other.routes));
    await assert.rejects(keyless.complete("k", request), UnavailableError);
    assert.deepEqual(
      other.taken.map(({ call }) => call?.idempotencyKey),
      [""],
    );
  });
});
