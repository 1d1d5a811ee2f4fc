import assert from "node:assert/strict";
import { afterEach, describe, it } from "node:test";

import { create, toBinary } from "@bufbuild/protobuf";
import { Code, ConnectError, createClient } from "@connectrpc/connect";

import { FRAME_BYTES, framesOf } from "../src/frames.js";
import {
  CallforestError,
  completions,
  CompletionApi,
  ErrorReason,
  GatewayClient,
  ItemStream,
  type ItemStreamOptions,
  RefusedError,
  UnavailableError,
} from "../src/index.js";
import { CompletionCallSchema, GatewayService, ServedCompletionSchema } from "../src/stubs.js";
import {
  FakeGateway,
  FakeServer,
  type ResultInit,
  sizeOf,
  statusOf,
  type Taken,
} from "./fakeServer.js";

const ending: (() => Promise<void>)[] = [];

afterEach(async () => {
  for (const end of ending.splice(0).reverse()) await end();
});

/** Serve a fake gateway; give a client of it. */
async function clientOf(gateway: FakeGateway, options?: ItemStreamOptions): Promise<GatewayClient> {
  const server = await serverOf(gateway);
  const client = new GatewayClient(server.channel.transport, "t", options);
  ending.push(() => client.close());
  return client;
}

async function serverOf(gateway: FakeGateway): Promise<FakeServer> {
  const server = await FakeServer.start(gateway.routes);
  ending.push(() => server.stop());
  return server;
}

/** Serve the request's own bytes. */
function echo({ context, call }: Taken): ResultInit[] {
  const completion = { response: call?.request ?? new Uint8Array(), callId: "c" };
  return [{ sequence: context.sequence, outcome: { case: "completion", value: completion } }];
}

function failed(taken: Taken, reason: string, code = Code.InvalidArgument): ResultInit[] {
  const value = statusOf(code, reason);
  return [{ sequence: taken.context.sequence, outcome: { case: "error", value } }];
}

function never(): Promise<ResultInit[]> {
  return new Promise(() => undefined);
}

function ask(client: GatewayClient, text: string, timeoutMs = 30_000): Promise<string> {
  return client.complete("r1", { text }, CompletionApi.CHAT, { timeoutMs }).then((served) => {
    const echoed = JSON.parse(Buffer.from(served.response).toString()) as { text: string };
    return echoed.text;
  });
}

function because(kind: typeof CallforestError, reason: ErrorReason): (error: unknown) => boolean {
  return (error) => error instanceof kind && error.reason === reason;
}

describe("many callers", () => {
  it("share few messages, and each gets its own answer", async () => {
    const gateway = new FakeGateway(echo);
    const client = await clientOf(gateway);
    const texts = Array.from({ length: 900 }, (_, index) => `text ${index}`);
    assert.deepEqual(await Promise.all(texts.map((text) => ask(client, text))), texts);
    const counts = gateway.requests.map(({ items }) => items.length);
    assert.ok(Math.max(...counts) <= 256, `${counts}`);
    assert.ok(counts.length < 100, `${counts.length} messages`);
    const sequences = gateway.taken.map(({ context }) => context.sequence);
    assert.ok(sequences.every((one, index) => index === 0 || one > (sequences[index - 1] ?? one)));
    assert.ok(gateway.taken.every(({ context }) => context.tenant === "t"));
    assert.equal(gateway.streams, 1);
  });

  it("get answers in any order", async () => {
    const held: (() => void)[] = [];
    const gateway = new FakeGateway(
      (taken) => new Promise((resolve) => held.push(() => resolve(echo(taken)))),
    );
    const client = await clientOf(gateway);
    const answers = ["a", "b", "c"].map((text) => ask(client, text));
    await gateway.until(({ taken }) => taken.length === 3);
    held.reverse().forEach((release) => release());
    assert.deepEqual(await Promise.all(answers), ["a", "b", "c"]);
  });

  it("fail each on its own", async () => {
    let count = 0;
    const gateway = new FakeGateway((taken) => {
      count += 1;
      return count % 2 === 0 ? failed(taken, "REQUEST_REFUSED") : echo(taken);
    });
    const client = await clientOf(gateway);
    const answers = await Promise.allSettled(["a", "b", "c"].map((text) => ask(client, text)));
    assert.deepEqual(answers.map(({ status }) => status), ["fulfilled", "rejected", "fulfilled"]);
    await assert.rejects(ask(client, "d"), because(RefusedError, ErrorReason.REQUEST_REFUSED));
    assert.equal(gateway.streams, 1);
  });

  it("are at most 1,024 unanswered ones", async () => {
    const held: (() => void)[] = [];
    const gateway = new FakeGateway(
      (taken) => new Promise((resolve) => held.push(() => resolve(echo(taken)))),
    );
    const client = await clientOf(gateway);
    const texts = Array.from({ length: 1030 }, (_, index) => `${index}`);
    const answers = Promise.all(texts.map((text) => ask(client, text)));
    await gateway.until(({ taken }) => taken.length === 1024);
    for (let answered = 0; answered < texts.length; answered += 1) {
      await gateway.until(() => held.length > 0);
      assert.ok(gateway.taken.length - answered <= 1024);
      held.shift()?.();
      if (answered + 1024 < texts.length) {
        await gateway.until(({ taken }) => taken.length > answered + 1024);
      }
    }
    assert.deepEqual(await answers, texts);
  });
});

describe("large payloads", () => {
  it("travel in frames both ways, in messages that gRPC's default limits allow", async () => {
    const gateway = new FakeGateway((taken) => framed(taken, Buffer.from(bytesOf(taken))));
    const client = await clientOf(gateway);
    const texts = ["x".repeat(5 << 20), "y".repeat(900_000), "z".repeat(900_000), "w", "v"];
    assert.deepEqual(await Promise.all(texts.map((text) => ask(client, text))), texts);
    assert.ok(Math.max(...gateway.requests.map(sizeOf)) < 2 << 20);
    const frames = gateway.requests.flatMap(({ items }) => items.map(({ body }) => body.case));
    assert.equal(frames.filter((one) => one === "chunk").length, 6);
    assert.equal(frames.filter((one) => one === "call").length, 4);
  });

  it("that came whole beyond gRPC's default limit are not taken", async () => {
    const client = await clientOf(new FakeGateway(echo));
    const refused = (error: unknown): boolean =>
      error instanceof RefusedError && error.code === Code.ResourceExhausted;
    await assert.rejects(ask(client, "x".repeat(5 << 20)), refused);
  });

  it("that break on the way are refused", async () => {
    const gateway = new FakeGateway((taken) => {
      const broken = Buffer.from(bytesOf(taken));
      const results = framed(taken, broken);
      broken[FRAME_BYTES + 9] = 1;
      return results;
    });
    const client = await clientOf(gateway);
    const asked = ask(client, "x".repeat(2 << 20));
    await assert.rejects(asked, because(RefusedError, ErrorReason.FRAME_BROKEN));
  });

  it("beyond 64 MiB are never sent", async () => {
    const gateway = new FakeGateway(echo);
    const client = await clientOf(gateway);
    const asked = client.complete("r1", new Uint8Array((64 << 20) + 1));
    await assert.rejects(asked, because(RefusedError, ErrorReason.MESSAGE_TOO_LARGE));
    assert.equal(gateway.streams, 0);
  });
});

/** The serialized answer that serves a call's own request. */
function bytesOf({ call }: Taken): Uint8Array {
  const response = call?.request ?? new Uint8Array();
  return toBinary(ServedCompletionSchema, create(ServedCompletionSchema, { response }));
}

function framed({ context }: Taken, serialized: Uint8Array): ResultInit[] {
  return framesOf(serialized).map((frame) => ({ sequence: context.sequence, outcome: frame }));
}

describe("time", () => {
  it("ends an item that is not answered, and the server hears of it", async () => {
    const gateway = new FakeGateway(never);
    const client = await clientOf(gateway);
    await assert.rejects(
      ask(client, "a", 200),
      because(UnavailableError, ErrorReason.ITEM_DEADLINE),
    );
    await gateway.until(({ taken }) => taken.length === 2);
    const [asked, cancelled] = gateway.taken;
    assert.ok(asked && asked.context.timeoutMs <= 200);
    assert.equal(cancelled?.call, undefined);
    assert.equal(cancelled?.context.sequence, asked.context.sequence);
  });

  it("is an hour at most, and a millisecond at least", async () => {
    const client = await clientOf(new FakeGateway(echo));
    for (const timeoutMs of [0, -1, NaN, 3_600_001]) {
      await assert.rejects(ask(client, "a", timeoutMs), RangeError);
    }
  });

  it("goes on while nobody is there", async () => {
    const server = await serverOf(new FakeGateway(echo));
    await server.stop();
    const client = new GatewayClient(server.channel.transport);
    ending.push(() => client.close());
    await assert.rejects(
      ask(client, "a", 300),
      because(UnavailableError, ErrorReason.ITEM_DEADLINE),
    );
  });
});

describe("a caller that gives up", () => {
  it("gets its own reason, and the server hears of it", async () => {
    const gateway = new FakeGateway(never);
    const client = await clientOf(gateway);
    const giving = new AbortController();
    const asked = client.complete("r1", {}, CompletionApi.CHAT, { signal: giving.signal });
    await gateway.until(({ taken }) => taken.length === 1);
    const reason = new Error("enough");
    giving.abort(reason);
    await assert.rejects(asked, reason);
    await gateway.until(({ taken }) => taken.length === 2);
    assert.equal(gateway.taken[1]?.call, undefined);
  });

  it("before it asked sends nothing", async () => {
    const gateway = new FakeGateway(echo);
    const client = await clientOf(gateway);
    const signal = AbortSignal.abort(new Error("never mind"));
    await assert.rejects(
      client.complete("r1", {}, CompletionApi.CHAT, { signal }),
      /never mind/,
    );
    assert.equal(gateway.streams, 0);
  });

  it("by closing the client gets UNAVAILABLE, and so does who comes later", async () => {
    const gateway = new FakeGateway(never);
    const client = await clientOf(gateway);
    const asked = ask(client, "a");
    const rejected = assert.rejects(asked, because(UnavailableError, ErrorReason.PEER_UNAVAILABLE));
    await gateway.until(({ taken }) => taken.length === 1);
    await client.close();
    await rejected;
    await assert.rejects(ask(client, "b"), UnavailableError);
  });
});

describe("a stream that breaks", () => {
  /** A client whose items may, or may not, be repeated. */
  async function streamOf(
    gateway: FakeGateway,
    repeatable: boolean,
    options?: ItemStreamOptions,
  ): Promise<{ send: (text: string) => Promise<string>; server: FakeServer }> {
    const server = await serverOf(gateway);
    const spec = completions(createClient(GatewayService, server.channel.transport));
    const stream = new ItemStream({ ...spec, repeatable }, options);
    ending.push(() => stream.close());
    const send = async (text: string): Promise<string> => {
      const fields = { captureKey: "r1", api: CompletionApi.CHAT, request: Buffer.from(text) };
      const call = create(CompletionCallSchema, fields);
      const { response } = await stream.send(call, { tenant: "t", timeoutMs: 30_000 });
      return Buffer.from(response).toString();
    };
    return { send, server };
  }

  it("is opened again, and items are sent again under their sequence", async () => {
    const gateway = new FakeGateway((taken, stream) => (stream === 1 ? never() : echo(taken)));
    const { send, server } = await streamOf(gateway, true);
    const large = "x".repeat(2 << 20);
    const answers = ["a", large, "c"].map(send);
    await gateway.until(({ taken }) => taken.length === 3);
    server.cut();
    assert.deepEqual(await Promise.all(answers), ["a", large, "c"]);
    const sequences = gateway.taken.map(({ context }) => Number(context.sequence));
    assert.deepEqual(sequences, [1, 2, 3, 1, 2, 3]);
    assert.equal(await send("d"), "d");
  });

  it("fails items that may not be repeated, and the next one finds a new stream", async () => {
    const gateway = new FakeGateway((taken, stream) => (stream === 1 ? never() : echo(taken)));
    const { send, server } = await streamOf(gateway, false);
    const asked = send("a");
    await gateway.until(({ taken }) => taken.length === 1);
    server.cut();
    await assert.rejects(asked, UnavailableError);
    assert.equal(await send("b"), "b");
    assert.deepEqual(gateway.taken.map(({ call }) => String(call?.request)), ["97", "98"]);
  });

  it("by draining is opened again", async () => {
    const unavailable = new ConnectError("draining", Code.Unavailable);
    const gateway = new FakeGateway((taken, stream) => {
      if (stream === 1) throw unavailable;
      return echo(taken);
    });
    const { send } = await streamOf(gateway, true);
    assert.equal(await send("a"), "a");
    assert.equal(gateway.streams, 2);
  });

  it("by a refusal fails everyone at once", async () => {
    const gateway = new FakeGateway(() => {
      throw new ConnectError("no such service", Code.Unimplemented);
    });
    const { send } = await streamOf(gateway, true);
    const refused = (error: unknown): boolean =>
      error instanceof RefusedError && error.code === Code.Unimplemented;
    await assert.rejects(send("a"), refused);
    assert.equal(gateway.streams, 1);
  });

  it("by age takes nothing new, and loses nothing", async () => {
    const held: (() => void)[] = [];
    const streams: number[] = [];
    const gateway = new FakeGateway((taken, stream) => {
      streams.push(stream);
      return new Promise((resolve) => held.push(() => resolve(echo(taken))));
    });
    const { send } = await streamOf(gateway, false, { renewAfterMs: 0 });
    const first = send("a");
    await gateway.until(({ taken }) => taken.length === 1);
    const second = send("b");
    held[0]?.();
    assert.equal(await first, "a");
    await gateway.until(({ taken }) => taken.length === 2);
    held[1]?.();
    assert.equal(await second, "b");
    assert.deepEqual(streams, [1, 2]);
  });
});
