/** What an item stream has to send: whole items, frames and cancellations, in order. */

import { create, type Message } from "@bufbuild/protobuf";

import type { Item, ItemBody } from "./streamSpec.js";
import { ItemCancelSchema, type ItemContext, ItemContextSchema } from "./stubs.js";

/** Most items of one message. */
export const MESSAGE_ITEMS = 256;
/** Messages of several items stay below this many bytes. */
export const MESSAGE_BYTES = 2 << 20;

const ITEM_OVERHEAD_BYTES = 256;

/** An item whose caller waits, or has just ceased to. */
export interface QueuedItem {
  readonly sequence: bigint;
  readonly tenant: string;
  readonly traceparent: string;
  /** When its time is up, on the clock of `performance.now()`. */
  readonly deadline: number;
  /** Whether a part of it was given to the connection. */
  sent: boolean;
  /** Whether its caller has an answer or waits no more. */
  settled: boolean;
}

interface Entry<Payload> {
  readonly item: QueuedItem;
  readonly body: ItemBody<Payload>;
  readonly size: number;
}

/** A queue that gives what waits in it as the next message. */
export class ItemQueue<Payload extends Message> {
  #entries: Entry<Payload>[] = [];
  #head = 0;

  /** Append a part of an item; `size` is its body's in bytes. */
  push(item: QueuedItem, body: ItemBody<Payload>, size: number): void {
    this.#entries.push({ item, body, size: size + ITEM_OVERHEAD_BYTES });
  }

  /** Append the cancellation of an item. */
  pushCancel(item: QueuedItem): void {
    this.push(item, { case: "cancel", value: create(ItemCancelSchema) }, 0);
  }

  /** Forget everything. */
  clear(): void {
    this.#entries = [];
    this.#head = 0;
  }

  /**
   * Take what fits into the next message; what nobody waits for any more is left out.
   *
   * @param onlyBegun leave items of which nothing was sent yet in the queue.
   */
  next(onlyBegun: boolean): Item<Payload>[] {
    const items: Item<Payload>[] = [];
    let size = 0;
    for (; this.#head < this.#entries.length && items.length < MESSAGE_ITEMS; this.#head += 1) {
      const entry = this.#entries[this.#head];
      if (entry === undefined) break;
      const { item, body } = entry;
      if (item.settled && body.case !== "cancel") continue;
      if (onlyBegun && !item.sent) break;
      size += entry.size;
      if (items.length > 0 && size >= MESSAGE_BYTES) break;
      item.sent = true;
      items.push({ context: contextOf(item), body });
    }
    if (this.#head === this.#entries.length) this.clear();
    return items;
  }
}

/** Say what of the item's time is left as of now. */
function contextOf({ sequence, tenant, traceparent, deadline }: QueuedItem): ItemContext {
  const timeoutMs = Math.max(1, Math.floor(deadline - performance.now()));
  return create(ItemContextSchema, { sequence, tenant, traceparent, timeoutMs });
}
