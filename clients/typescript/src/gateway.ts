/** A harness's side: model calls over gRPC, with the requests and responses of the HTTP routes. */

import { create, type JsonObject } from "@bufbuild/protobuf";
import { type Client, createClient, type Transport } from "@connectrpc/connect";

import { ItemStream, type ItemStreamOptions } from "./itemStream.js";
import { completions, measures } from "./streamSpec.js";
import {
  CompletionApi,
  type CompletionCall,
  CompletionCallSchema,
  GatewayService,
  type MeasuredContext,
  type ServedCompletion,
} from "./stubs.js";
import { callUnary } from "./unary.js";

/** How long a model call may take unless told otherwise, in milliseconds. */
export const COMPLETION_TIMEOUT_MS = 600_000;

/** How one model call is made, or measured. */
export interface MeasureOptions {
  /** How long the answer may take, in milliseconds: 1 to 3,600,000; ten minutes unless given. */
  readonly timeoutMs?: number;
  /** The caller's W3C trace context. */
  readonly traceparent?: string;
  /** Ends the call, and its generation, when it is aborted. */
  readonly signal?: AbortSignal;
  /**
   * An earlier call of the attempt: then the request's turns are only those that follow its answer
   * (a delta request). It is a claim that is checked, never trusted. HISTORY_REQUIRED asks for the
   * whole history.
   */
  readonly continuesCallId?: string;
  /** The request brings the whole history all the same; `continuesCallId` then breaks ties. */
  readonly historyIsWhole?: boolean;
}

/** How one model call is made, and made again. */
export interface CompleteOptions extends MeasureOptions {
  /**
   * Makes every repeat of the request the same call: 1 to 255 visible ASCII characters, minted at
   * random for each logical request before its first try. With it the call is sent again when its
   * stream broke.
   */
  readonly idempotencyKey?: string;
}

/** Makes model calls within attempts; many at once share one stream. */
export class GatewayClient {
  readonly #client: Client<typeof GatewayService>;
  readonly #calls: ItemStream<CompletionCall, ServedCompletion>;
  readonly #measures: ItemStream<CompletionCall, MeasuredContext>;
  readonly #tenant: string;

  /**
   * @param transport leads to the gateway's gRPC address.
   * @param tenant the gateway's.
   */
  constructor(transport: Transport, tenant = "default", options: ItemStreamOptions = {}) {
    this.#client = createClient(GatewayService, transport);
    this.#calls = new ItemStream(completions(this.#client), options);
    this.#measures = new ItemStream(measures(this.#client), options);
    this.#tenant = tenant;
  }

  /**
   * Make a model call and give what was served, once the call's row is durable.
   *
   * Without an idempotency key it is never repeated on its own: a repeat would be another call.
   *
   * @param captureKey names the attempt.
   * @param request the API's request: its JSON bytes, or what they mean. It asks for no stream.
   * @param api whose request it is; Chat Completions unless given.
   * @throws RefusedError REQUEST_REFUSED, ATTEMPT_NOT_FOUND, ATTEMPT_CLOSED, AMBIGUOUS_HISTORY,
   *   HISTORY_REQUIRED, HISTORY_CLAIM_REFUSED, MODE_MISMATCH, CONFIGURATION_CHANGED,
   *   CALL_MISMATCH; OVERLOADED with `retryAfterMs`: nothing was generated.
   * @throws UnavailableError the gateway or its engine is not there, or did not answer in time;
   *   whether the call counts is unknown.
   */
  async complete(
    captureKey: string,
    request: JsonObject | Uint8Array,
    api: CompletionApi = CompletionApi.CHAT,
    options: CompleteOptions = {},
  ): Promise<ServedCompletion> {
    const call = callOf(captureKey, request, api, options);
    const { timeoutMs = COMPLETION_TIMEOUT_MS, traceparent, signal } = options;
    call.idempotencyKey = options.idempotencyKey ?? "";
    const repeatable = call.idempotencyKey !== "";
    const tenant = this.#tenant;
    return this.#calls.send(call, { tenant, timeoutMs, traceparent, signal, repeatable });
  }

  /**
   * Learn how many prompt tokens a model call would have, by the same checks and the same splice.
   * No call is made and nothing is kept; parameters and errors are those of `complete`.
   */
  async measure(
    captureKey: string,
    request: JsonObject | Uint8Array,
    api: CompletionApi = CompletionApi.CHAT,
    options: MeasureOptions = {},
  ): Promise<MeasuredContext> {
    const call = callOf(captureKey, request, api, options);
    const { timeoutMs = COMPLETION_TIMEOUT_MS, traceparent, signal } = options;
    return this.#measures.send(call, { tenant: this.#tenant, timeoutMs, traceparent, signal });
  }

  /** Name the served models. */
  async models(timeoutMs = 10_000): Promise<string[]> {
    const answer = await callUnary((options) => this.#client.listModels({}, options), timeoutMs);
    return answer.models;
  }

  /** End the stream; the connection stays open. */
  async close(): Promise<void> {
    await this.#calls.close();
    await this.#measures.close();
  }
}

function callOf(
  captureKey: string,
  request: JsonObject | Uint8Array,
  api: CompletionApi,
  { continuesCallId, historyIsWhole = false }: MeasureOptions,
): CompletionCall {
  const bytes =
    request instanceof Uint8Array ? request : new TextEncoder().encode(JSON.stringify(request));
  return create(CompletionCallSchema, {
    captureKey,
    api,
    request: bytes,
    continuesCallId,
    historyIsWhole,
  });
}
