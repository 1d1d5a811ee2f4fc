/**
 * The client's side of an item stream: many callers, few messages, one result each.
 *
 * What queues while a message is being written is the next message, so that the cost of a message
 * is shared. A broken stream is opened again, and items that may be repeated are sent again under
 * their ids until their time is up. Contract: docs/protocol.md, section "Item streams".
 */

import { setImmediate as nextTurn, setTimeout as pause } from "node:timers/promises";

import { fromBinary, type Message, toBinary } from "@bufbuild/protobuf";

import {
  CallforestError,
  errorOfCall,
  errorOfStatus,
  late,
  peerUnavailable,
  RefusedError,
} from "./errors.js";
import { FRAME_BYTES, type Frame, FrameAssembler, framesOf } from "./frames.js";
import { ItemQueue, type QueuedItem } from "./itemQueue.js";
import type { Item, ItemBody, ItemResult, StreamSpec } from "./streamSpec.js";

/** Longest time of an item, in milliseconds. */
export const TIMEOUT_MS_MAX = 3_600_000;
const STREAM_MS = 3_600_000;
const RENEWAL_GRACE_MS = 5000;
const BACKOFF_FIRST_MS = 50;
const BACKOFF_LAST_MS = 1000;

/** How a stream behaves. */
export interface ItemStreamOptions {
  /** Callers beyond this many unanswered ones wait for a place; 1,024 unless given. */
  readonly unansweredMax?: number;
  /**
   * When a stream takes no new items, in milliseconds: it ends once it has answered what it took,
   * and the next begins. Half an hour unless given, since a stream's own deadline is an hour.
   */
  readonly renewAfterMs?: number;
}

/** How one item is sent. */
export interface SendOptions {
  /** Owns what the item touches. */
  readonly tenant: string;
  /** How long the answer may take, repeats included, in milliseconds: 1 to 3,600,000. */
  readonly timeoutMs: number;
  /** The caller's W3C trace context. */
  readonly traceparent?: string | undefined;
  /** Ends the item when it is aborted; the caller gets the signal's reason. */
  readonly signal?: AbortSignal | undefined;
  /** Whether it may be sent again when the stream broke; what the stream says unless given. */
  readonly repeatable?: boolean | undefined;
}

interface Pending<Payload, Answer> extends QueuedItem {
  sequence: bigint;
  /** The payload whole, or its frames. */
  readonly bodies: readonly ItemBody<Payload>[];
  /** The payload's size in bytes. */
  readonly size: number;
  readonly repeatable: boolean;
  resolve(answer: Answer): void;
  reject(error: unknown): void;
  /** Stop the clock, and listen to the caller's signal no more. */
  release(): void;
}

/** One stream's own state. */
interface Conversation {
  readonly ending: AbortController;
  readonly renewAt: number;
  messageCount: number;
  answerCount: number;
}

/** Sends payloads over one bidirectional stream and gives each caller its answer. */
export class ItemStream<Payload extends Message, Answer extends Message> {
  readonly #spec: StreamSpec<Payload, Answer>;
  readonly #unansweredMax: number;
  readonly #renewAfterMs: number;
  readonly #waiting = new Set<Pending<Payload, Answer>>();
  readonly #unanswered = new Map<bigint, Pending<Payload, Answer>>();
  readonly #queue = new ItemQueue<Payload>();
  readonly #closing = new AbortController();
  #sequence = 0n;
  #wake: () => void = () => undefined;
  #runner: Promise<void> | undefined;

  constructor(
    spec: StreamSpec<Payload, Answer>,
    { unansweredMax = 1024, renewAfterMs = STREAM_MS / 2 }: ItemStreamOptions = {},
  ) {
    this.#spec = spec;
    this.#unansweredMax = unansweredMax;
    this.#renewAfterMs = renewAfterMs;
  }

  /**
   * Send one payload and give its answer.
   *
   * @throws RefusedError the service refused it, or it exceeds 64 MiB.
   * @throws UnavailableError no answer within `timeoutMs`, or the stream broke and the item may
   *   not be repeated. Whether it took effect is unknown.
   * @throws RangeError `timeoutMs` is out of its range.
   */
  async send(payload: Payload, options: SendOptions): Promise<Answer> {
    const { tenant, timeoutMs, traceparent = "", signal } = options;
    const { repeatable = this.#spec.repeatable } = options;
    if (!(timeoutMs >= 1 && timeoutMs <= TIMEOUT_MS_MAX)) {
      throw new RangeError(`timeoutMs must be 1 to ${TIMEOUT_MS_MAX}, not ${timeoutMs}`);
    }
    signal?.throwIfAborted();
    if (this.#closing.signal.aborted) throw peerUnavailable(this.#spec.name, "closed");
    const deadline = performance.now() + timeoutMs;
    const serialized = toBinary(this.#spec.payload, payload);
    const large = serialized.length > FRAME_BYTES;
    const bodies = large ? framesOf(serialized) : [{ case: "payload" as const, value: payload }];
    return new Promise<Answer>((resolve, reject) => {
      const pending: Pending<Payload, Answer> = {
        sequence: 0n,
        tenant,
        traceparent,
        deadline,
        bodies,
        size: serialized.length,
        repeatable,
        sent: false,
        settled: false,
        resolve,
        reject,
        release: () => {
          clearTimeout(clock);
          signal?.removeEventListener("abort", abort);
        },
      };
      const abort = (): void => this.#settle(pending, () => reject(signal?.reason));
      const expire = (): void =>
        this.#settle(pending, () => reject(late(this.#spec.name, timeoutMs)));
      const clock = setTimeout(expire, timeoutMs);
      signal?.addEventListener("abort", abort, { once: true });
      this.#waiting.add(pending);
      this.#fill();
    });
  }

  /** End the stream; callers that still wait get UnavailableError. */
  async close(): Promise<void> {
    this.#closing.abort();
    this.#failAll(peerUnavailable(this.#spec.name, "closed"));
    this.#wake();
    await this.#runner;
  }

  /** Give free places to the callers that wait longest. */
  #fill(): void {
    if (this.#closing.signal.aborted) return;
    for (const pending of this.#waiting) {
      if (this.#unanswered.size >= this.#unansweredMax) break;
      this.#waiting.delete(pending);
      this.#sequence += 1n;
      pending.sequence = this.#sequence;
      this.#unanswered.set(pending.sequence, pending);
      this.#enqueue(pending);
    }
    this.#wake();
    if (this.#runner === undefined && this.#unanswered.size > 0) {
      this.#runner = this.#run();
    }
  }

  #enqueue(pending: Pending<Payload, Answer>): void {
    for (const body of pending.bodies) {
      const size = body.case === "chunk" ? body.value.content.length : 0;
      this.#queue.push(pending, body, body.case === "payload" ? pending.size : size);
    }
  }

  /**
   * Let a caller go, once: with its answer, or with why there is none. The server is told when it
   * still works on the item.
   */
  #settle(pending: Pending<Payload, Answer>, tell: () => void, answered = false): void {
    if (pending.settled) return;
    pending.settled = true;
    pending.release();
    this.#waiting.delete(pending);
    this.#unanswered.delete(pending.sequence);
    if (pending.sent && !answered) this.#queue.pushCancel(pending);
    tell();
    this.#fill();
  }

  /** Keep a stream open while there is something to await; never fails. */
  async #run(): Promise<void> {
    const closing = this.#closing.signal;
    let backoffMs = BACKOFF_FIRST_MS;
    while (!closing.aborted && this.#unanswered.size > 0) {
      const { answered, retryAfterMs } = await this.#converse();
      if (answered) {
        backoffMs = BACKOFF_FIRST_MS;
      } else if (this.#unanswered.size > 0) {
        // Waiting is bounded by the callers' own timeouts, each of which empties its place.
        const delayMs = Math.max(Math.random() * backoffMs, retryAfterMs);
        await pause(delayMs, undefined, { signal: closing }).catch(() => undefined);
        backoffMs = Math.min(backoffMs * 2, BACKOFF_LAST_MS);
      }
    }
    this.#runner = undefined; // in the same turn in which nothing was left
  }

  /** Run one stream until it ends; its reader is this very loop, apart from the writer. */
  async #converse(): Promise<{ answered: boolean; retryAfterMs: number }> {
    const conversation: Conversation = {
      ending: new AbortController(),
      renewAt: performance.now() + this.#renewAfterMs,
      messageCount: 0,
      answerCount: 0,
    };
    const signal = AbortSignal.any([conversation.ending.signal, this.#closing.signal]);
    const assembler = new FrameAssembler({ payloadsMax: this.#unansweredMax });
    let failure: CallforestError = peerUnavailable(this.#spec.name, "its stream ended");
    try {
      const options = { signal, timeoutMs: STREAM_MS };
      for await (const results of this.#spec.converse(this.#messages(conversation), options)) {
        conversation.answerCount += results.length;
        for (const result of results) this.#take(result, assembler);
      }
    } catch (error) {
      failure = errorOfCall(error);
    }
    conversation.ending.abort();
    this.#wake();
    this.#afterBreak(failure);
    return { answered: conversation.answerCount > 0, retryAfterMs: failure.retryAfterMs ?? 0 };
  }

  /** Give the messages of one stream, each when the connection has taken the one before. */
  async *#messages(conversation: Conversation): AsyncGenerator<Item<Payload>[], void, undefined> {
    const ended = conversation.ending.signal;
    while (!ended.aborted && !this.#closing.signal.aborted) {
      const old = performance.now() >= conversation.renewAt;
      const renewing = old && conversation.messageCount > 0; // each stream carries something
      const items = this.#queue.next(renewing);
      if (items.length > 0) {
        conversation.messageCount += 1;
        yield items;
      } else if (renewing && !this.#anySent()) {
        setTimeout(() => conversation.ending.abort(), RENEWAL_GRACE_MS).unref();
        return;
      } else {
        await new Promise<void>((resolve) => (this.#wake = resolve));
        await nextTurn(); // gathers what else queues in this turn of the event loop
      }
    }
  }

  #anySent(): boolean {
    for (const pending of this.#unanswered.values()) if (pending.sent) return true;
    return false;
  }

  #take({ sequence, outcome }: ItemResult<Answer>, assembler: FrameAssembler): void {
    const pending = this.#unanswered.get(sequence);
    if (pending === undefined) {
      assembler.drop(sequence);
      return;
    }
    const fail = (error: CallforestError): void =>
      this.#settle(pending, () => pending.reject(error), true);
    switch (outcome.case) {
      case "answer":
        this.#settle(pending, () => pending.resolve(outcome.value), true);
        break;
      case "error":
        assembler.drop(sequence);
        fail(errorOfStatus(outcome.value));
        break;
      case undefined:
        fail(peerUnavailable(this.#spec.name, "an unknown result"));
        break;
      default:
        this.#takeFrame(pending, outcome, assembler, fail);
    }
  }

  #takeFrame(
    pending: Pending<Payload, Answer>,
    frame: Frame,
    assembler: FrameAssembler,
    fail: (error: CallforestError) => void,
  ): void {
    try {
      const serialized = assembler.take(pending.sequence, frame);
      if (serialized === undefined) return;
      const answer = fromBinary(this.#spec.answer, serialized);
      this.#settle(pending, () => pending.resolve(answer), true);
    } catch (error) {
      const known = error instanceof CallforestError;
      fail(known ? error : peerUnavailable(this.#spec.name, "an answer that cannot be read"));
    }
  }

  /** Queue again what may be repeated, and fail what may not. */
  #afterBreak(failure: CallforestError): void {
    const fatal = failure instanceof RefusedError && failure.retryAfterMs === undefined;
    for (const pending of [...this.#unanswered.values()]) {
      if (fatal || (pending.sent && !pending.repeatable)) {
        this.#settle(pending, () => pending.reject(failure), true);
      }
    }
    this.#queue.clear();
    for (const pending of this.#unanswered.values()) {
      pending.sent = false;
      this.#enqueue(pending);
    }
  }

  #failAll(error: CallforestError): void {
    for (const pending of [...this.#waiting, ...this.#unanswered.values()]) {
      this.#settle(pending, () => pending.reject(error), true);
    }
  }
}
