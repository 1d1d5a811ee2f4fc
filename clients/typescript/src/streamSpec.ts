/** The messages of an item stream: what all of them have, and the names that differ. */

import type { Message } from "@bufbuild/protobuf";
import type { GenMessage } from "@bufbuild/protobuf/codegenv2";
import type { CallOptions, Client } from "@connectrpc/connect";

import type { Frame } from "./frames.js";
import {
  type AdmissionService,
  type CallIntent,
  CallIntentSchema,
  type CompletionCall,
  CompletionCallSchema,
  type GatewayService,
  type ItemCancel,
  type ItemContext,
  type MeasuredContext,
  MeasuredContextSchema,
  type ServedCompletion,
  ServedCompletionSchema,
  type Status,
  type Verdict,
  VerdictSchema,
} from "./stubs.js";

/** What an item carries: its payload whole, its cancellation, or a frame. */
export type ItemBody<Payload> =
  | { readonly case: "payload"; readonly value: Payload }
  | { readonly case: "cancel"; readonly value: ItemCancel }
  | Frame;

/** One item to send. */
export interface Item<Payload> {
  readonly context: ItemContext;
  readonly body: ItemBody<Payload>;
}

/** What a result carries: the answer whole, an error, or a frame; nothing when it is unknown. */
export type Outcome<Answer> =
  | { readonly case: "answer"; readonly value: Answer }
  | { readonly case: "error"; readonly value: Status }
  | { readonly case: undefined; readonly value?: undefined }
  | Frame;

/** One result that came. */
export interface ItemResult<Answer> {
  readonly sequence: bigint;
  readonly outcome: Outcome<Answer>;
}

/** One kind of item stream. */
export interface StreamSpec<Payload extends Message, Answer extends Message> {
  /** The RPC, for messages to people. */
  readonly name: string;
  readonly payload: GenMessage<Payload>;
  readonly answer: GenMessage<Answer>;
  /** Whether an item may be sent again when its stream broke. */
  readonly repeatable: boolean;
  /** Open the RPC: lists of items go out as one message each, lists of results come back. */
  converse(
    messages: AsyncIterable<Item<Payload>[]>,
    options: CallOptions,
  ): AsyncIterable<ItemResult<Answer>[]>;
}

/** The gateway's model calls. A repeat would be another call, unless the call has a key. */
export function completions(
  client: Client<typeof GatewayService>,
): StreamSpec<CompletionCall, ServedCompletion> {
  return {
    name: "Complete",
    payload: CompletionCallSchema,
    answer: ServedCompletionSchema,
    repeatable: false,
    async *converse(messages, options) {
      const requests = mapped(messages, (items) => ({
        items: items.map(({ context, body }) => ({
          context,
          body: body.case === "payload" ? { case: "call" as const, value: body.value } : body,
        })),
      }));
      for await (const { results } of client.complete(requests, options)) {
        yield results.map(({ sequence, outcome }) => ({
          sequence,
          outcome:
            outcome.case === "completion"
              ? { case: "answer" as const, value: outcome.value }
              : outcome,
        }));
      }
    },
  };
}

/** The sizes of calls that are not made; nothing changes, so an item may be sent again. */
export function measures(
  client: Client<typeof GatewayService>,
): StreamSpec<CompletionCall, MeasuredContext> {
  return {
    name: "Measure",
    payload: CompletionCallSchema,
    answer: MeasuredContextSchema,
    repeatable: true,
    async *converse(messages, options) {
      const requests = mapped(messages, (items) => ({
        items: items.map(({ context, body }) => ({
          context,
          body: body.case === "payload" ? { case: "call" as const, value: body.value } : body,
        })),
      }));
      for await (const { results } of client.measure(requests, options)) {
        yield results.map(({ sequence, outcome }) => ({
          sequence,
          outcome:
            outcome.case === "measured"
              ? { case: "answer" as const, value: outcome.value }
              : outcome,
        }));
      }
    },
  };
}

/** Admission's announcements of calls, for gateways and tests; a repeat gets the same verdict. */
export function admissions(
  client: Client<typeof AdmissionService>,
): StreamSpec<CallIntent, Verdict> {
  return {
    name: "AdmitCalls",
    payload: CallIntentSchema,
    answer: VerdictSchema,
    repeatable: true,
    async *converse(messages, options) {
      const requests = mapped(messages, (items) => ({
        items: items.map(({ context, body }) => ({
          context,
          body: body.case === "payload" ? { case: "intent" as const, value: body.value } : body,
        })),
      }));
      for await (const { results } of client.admitCalls(requests, options)) {
        yield results.map(({ sequence, outcome }) => ({
          sequence,
          outcome:
            outcome.case === "verdict"
              ? { case: "answer" as const, value: outcome.value }
              : outcome,
        }));
      }
    },
  };
}

async function* mapped<From, To>(
  source: AsyncIterable<From>,
  convert: (one: From) => To,
): AsyncGenerator<To, void, undefined> {
  for await (const one of source) yield convert(one);
}
