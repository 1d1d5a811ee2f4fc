/** A server of generated services within the test's process, on a port of its own. */

import { once } from "node:events";
import { createServer, type Http2Server, type ServerHttp2Session } from "node:http2";
import type { AddressInfo } from "node:net";

import { create, fromBinary, type MessageInitShape, toBinary } from "@bufbuild/protobuf";
import { BinaryWriter, WireType } from "@bufbuild/protobuf/wire";
import type { ConnectRouter } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";

import { type Frame, FrameAssembler } from "../src/frames.js";
import { type Channel, openChannel } from "../src/index.js";
import {
  type CompleteItem,
  type CompleteRequest,
  CompleteRequestSchema,
  CompleteResultSchema,
  type CompletionCall,
  CompletionCallSchema,
  GatewayService,
  type ItemContext,
  type Status,
  StatusSchema,
} from "../src/stubs.js";

/** A running server and a channel to it. */
export class FakeServer {
  readonly #server: Http2Server;
  readonly #sessions: Set<ServerHttp2Session>;
  readonly channel: Channel;

  private constructor(server: Http2Server, sessions: Set<ServerHttp2Session>) {
    this.#server = server;
    this.#sessions = sessions;
    this.channel = openChannel(`127.0.0.1:${(server.address() as AddressInfo).port}`);
  }

  static async start(routes: (router: ConnectRouter) => void): Promise<FakeServer> {
    const serve = connectNodeAdapter({ routes });
    const server = createServer((request, response) => {
      // The adapter's clock of a call that is cut would keep the test's process alive for an hour.
      delete request.headers["grpc-timeout"];
      serve(request, response);
    });
    const sessions = new Set<ServerHttp2Session>();
    server.on("session", (session) => {
      sessions.add(session);
      session.on("close", () => sessions.delete(session));
    });
    server.listen(0, "127.0.0.1");
    await once(server, "listening");
    return new FakeServer(server, sessions);
  }

  /** Cut every connection, as a machine that dies would. */
  cut(): void {
    for (const session of this.#sessions) session.destroy();
  }

  async stop(): Promise<void> {
    this.channel.close();
    this.cut();
    await new Promise((resolve) => this.#server.close(resolve));
  }
}

/** What a fake gateway gives: a result's outcome. */
export type ResultInit = MessageInitShape<typeof CompleteResultSchema>;

/** One item as the fake gateway took it: a whole call, or a cancellation (`call` is undefined). */
export interface Taken {
  readonly context: ItemContext;
  readonly call: CompletionCall | undefined;
}

/** Gives the outcomes of a call on a stream, which are counted from 1. */
export type Answering = (taken: Taken, stream: number) => ResultInit[] | Promise<ResultInit[]>;

/** Answers model calls as a test says, and keeps what came. */
export class FakeGateway {
  readonly requests: CompleteRequest[] = [];
  readonly taken: Taken[] = [];
  /** Streams that were opened. */
  streams = 0;
  readonly #listeners = new Set<() => void>();

  /**
   * @param answer gives the outcomes that a call is answered with, or a promise of them; none for a
   *   call that is never answered. It may throw: that ends the stream.
   */
  constructor(readonly answer: Answering) {}

  readonly routes = (router: ConnectRouter): void => {
    router.service(GatewayService, { complete: (requests) => this.#serve(requests) });
  };

  /** Wait until a condition of what came holds. */
  async until(condition: (gateway: FakeGateway) => boolean): Promise<void> {
    while (!condition(this)) {
      await new Promise<void>((resolve) => this.#listeners.add(resolve));
    }
  }

  #tell(): void {
    for (const resolve of this.#listeners) resolve();
    this.#listeners.clear();
  }

  async *#serve(
    requests: AsyncIterable<CompleteRequest>,
  ): AsyncGenerator<{ results: ResultInit[] }> {
    this.streams += 1;
    const stream = this.streams;
    const results: ResultInit[] = [];
    let open = 0;
    let failure: unknown;
    let ended = false;
    let wake: () => void = () => undefined;
    const answer = async (taken: Taken): Promise<void> => {
      open += 1;
      try {
        results.push(...(await this.answer(taken, stream)));
      } catch (error) {
        failure = error;
      }
      open -= 1;
      wake();
    };
    const read = async (): Promise<void> => {
      const assembler = new FrameAssembler();
      for await (const request of requests) {
        this.requests.push(request);
        for (const item of request.items) {
          const taken = takenOf(item, assembler);
          if (taken === undefined) continue;
          this.taken.push(taken);
          if (taken.call !== undefined) void answer(taken);
        }
        this.#tell();
      }
      ended = true;
      wake();
    };
    let gone = false;
    void read().catch(() => {
      gone = true; // the test sees on its own side that the stream broke
      wake();
    });
    while (!gone && !(ended && open === 0 && results.length === 0)) {
      if (failure !== undefined) throw failure;
      const result = results.shift();
      if (result !== undefined) yield { results: [result] };
      else await new Promise<void>((resolve) => (wake = resolve));
    }
  }
}

function takenOf(item: CompleteItem, assembler: FrameAssembler): Taken | undefined {
  const { context, body } = item;
  if (context === undefined || body.case === undefined) throw new Error("an item without content");
  if (body.case === "call") return { context, call: body.value };
  if (body.case === "cancel") return { context, call: undefined };
  const serialized = assembler.take(context.sequence, body as Frame);
  return serialized && { context, call: fromBinary(CompletionCallSchema, serialized) };
}

/** Bytes of a request message. */
export function sizeOf(request: CompleteRequest): number {
  return toBinary(CompleteRequestSchema, request).length;
}

/** A status with the details of the mesh. */
export function statusOf(
  code: number,
  reason: string,
  { metadata = {}, retryMs, domain = "callforest" }: StatusFacts = {},
): Status {
  const info = new BinaryWriter().tag(1, WireType.LengthDelimited).string(reason);
  info.tag(2, WireType.LengthDelimited).string(domain);
  for (const [key, value] of Object.entries(metadata)) {
    const entry = new BinaryWriter().tag(1, WireType.LengthDelimited).string(key);
    entry.tag(2, WireType.LengthDelimited).string(value);
    info.tag(3, WireType.LengthDelimited).bytes(entry.finish());
  }
  const details = [{ typeUrl: "type.googleapis.com/google.rpc.ErrorInfo", value: info.finish() }];
  if (retryMs !== undefined) {
    const delay = new BinaryWriter().tag(1, WireType.Varint).int64(Math.floor(retryMs / 1000));
    delay.tag(2, WireType.Varint).int32((retryMs % 1000) * 1e6);
    const retry = new BinaryWriter().tag(1, WireType.LengthDelimited).bytes(delay.finish());
    details.push({ typeUrl: "type.googleapis.com/google.rpc.RetryInfo", value: retry.finish() });
  }
  return create(StatusSchema, { code, message: "said the fake", details });
}

/** What a fake status says besides its reason. */
export interface StatusFacts {
  readonly metadata?: Record<string, string>;
  readonly retryMs?: number;
  readonly domain?: string;
}
