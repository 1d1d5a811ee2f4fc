/** Unary calls: a deadline always, repeats while the service is away, typed errors. */

import { setTimeout as pause } from "node:timers/promises";

import { type CallOptions, Code } from "@connectrpc/connect";

import { errorOfCall } from "./errors.js";

const BACKOFF_FIRST_MS = 50;
const BACKOFF_LAST_MS = 1000;

/**
 * Make a call that may be repeated; repeat it while the service is unavailable and time is left.
 *
 * Repeats wait a random part of a delay that doubles from 50 ms to 1 s, so that the clients of a
 * restarted service do not come back together.
 *
 * @param call makes the call, with the options that it is given.
 * @param timeoutMs how long all tries together may take, in milliseconds.
 * @throws RefusedError the service refused.
 * @throws UnavailableError no answer within `timeoutMs`.
 */
export async function callUnary<Response>(
  call: (options: CallOptions) => Promise<Response>,
  timeoutMs: number,
): Promise<Response> {
  const deadline = performance.now() + timeoutMs;
  for (let backoffMs = BACKOFF_FIRST_MS; ; backoffMs = Math.min(backoffMs * 2, BACKOFF_LAST_MS)) {
    try {
      return await call({ timeoutMs: Math.max(1, Math.floor(deadline - performance.now())) });
    } catch (thrown) {
      const error = errorOfCall(thrown);
      const delayMs = Math.random() * backoffMs;
      const again = error.code === Code.Unavailable && performance.now() + delayMs < deadline;
      if (!again) throw error;
      await pause(delayMs);
    }
  }
}
